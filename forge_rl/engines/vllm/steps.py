"""Detects a vLLM engine whose process lives but hangs in a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_LOOK_S = 1.0


async def watch_steps(
    ping: Callable[[], Awaitable[object]],
    expects: Callable[[], bool],
    *,
    stall_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once an engine that has work leaves a ping unanswered for `stall_s`.

    An engine answers between two steps. Looks are counted, not seconds: when this process itself was stopped, nobody is
    late.

    Args:
        ping: asks the engine something that takes no time.
        expects: whether steps are expected now: there are requests, and nothing else is asked of the engine that may
            take long, such as to load weights.
        stall_s: seconds.
        sleep: waits for so many seconds.
    """
    while True:
        await sleep(_LOOK_S)
        if not expects():
            continue
        answer = asyncio.ensure_future(ping())
        try:
            silent = 0.0
            while not answer.done():
                await sleep(_LOOK_S)
                silent = silent + _LOOK_S if expects() else 0.0
                if silent >= stall_s and not answer.done():
                    return
            answer.result()
        finally:
            answer.cancel()
