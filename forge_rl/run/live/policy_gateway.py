"""A gateway to a run's engines, for programs of attached clients, such as lm-eval."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from forge_rl.rollout.agent_runner import GATEWAY
from forge_rl.services.policy_backend import Backend
from forge_rl.tokens.tokenizer import Tokenizer


class PolicyGateway:
    """Serves the current policy over OpenAI's API, from the first `open` until it is closed.

    It listens on loopback; only the run's control socket gives out the key. Requests share the engines with episodes,
    and wait while the engines are paused.

    Args:
        backend: decodes completions.
        tokenizer: the model's tokenizer.
        warn: called with a line for the user.
    """

    def __init__(self, backend: Backend, tokenizer: Tokenizer, warn: Callable[[str], None]) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._warn = warn
        self._key = secrets.token_urlsafe(32)
        self._gateway: Any = None
        self._opening = asyncio.Lock()

    async def open(self) -> dict[str, object]:
        """Start the gateway unless it is open; returns its URL and key, and the model's name, folder and context
        length."""
        # Two clients may ask at once, and both get the same gateway.
        async with self._opening:
            if self._gateway is None:
                settings = GATEWAY["GatewayConfig"]()
                gateway = GATEWAY["Gateway"](
                    settings, self._backend, self._tokenizer, api_key=self._key, warn=self._warn
                )
                try:
                    await gateway.start()
                # Also on cancellation: it may be listening already.
                except BaseException:
                    await gateway.stop()
                    raise
                self._gateway = gateway
        return {
            "url": self._gateway.base_url,
            "key": self._key,
            "model": self._gateway.model,
            "folder": str(self._tokenizer.folder.resolve()),
            "max_model_len": self._backend.max_model_len,
        }

    async def close(self) -> None:
        """Cancel its requests and stop listening; does nothing if it was never opened."""
        if self._gateway is not None:
            await self._gateway.stop()
