"""Detects a vLLM engine that is alive but hangs in a step."""

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
    """Return once a busy engine leaves a ping unanswered for `stall_s` seconds.

    An engine answers between two steps. Time is measured in polls, so that a pause of this process itself does not
    count.

    Args:
        ping: sends the engine a request that it answers instantly.
        expects: whether steps are expected now: there are requests, and no slow operation such as a load is running.
        stall_s: timeout of a step in seconds.
        sleep: waits for a number of seconds.
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
                # A load that begins meanwhile keeps the engine from answering, too, and starts the count again.
                silent = silent + _LOOK_S if expects() else 0.0
                if silent >= stall_s and not answer.done():
                    return
            answer.result()
        finally:
            answer.cancel()
