"""Calls to the store's actors from any process; apart from the transports, which load torch."""

from __future__ import annotations

import asyncio
from typing import Any

from forge_rl.errors import ForgeError, WeightsError

_DEADLINE_S = 600.0


async def ask(actor: Any, method: str, *args: object, what: str) -> Any:
    """Call an actor of the store from any process.

    Raises:
        ForgeError: raised by the actor.
        WeightsError: the actor raised another error, died or timed out; calls it `what`.
    """
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await getattr(actor, method).call_one(*args)
    except Exception as error:
        remote = getattr(error, "exception", None)
        if isinstance(remote, ForgeError):
            raise remote from error
        cause = next(iter(str(remote or error).strip().splitlines()), type(error).__name__)
        raise WeightsError(f"{what} does not answer to {method}: {cause}", hint="see logs/weights-*.log") from error
