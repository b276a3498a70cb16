"""An event loop's clock that stands still while its process does not run, so that no deadline passes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_TICK_S = 1.0
"""Seconds after which the loop looks at its clock at the latest."""
_PAUSE_S = 5.0
"""Seconds without a look that count as a pause: the process was stopped, by Ctrl-Z or a debugger, or held up."""


@contextlib.contextmanager
def clock_without_pauses() -> Iterator[None]:
    """Have the running loop's clock leave out pauses of its process, from now on; they are noticed within the body.

    What is awaited with a deadline goes on in other processes, and answers lie there when this one runs again: without
    this, everything in flight would be late.
    """
    loop = asyncio.get_running_loop()
    clock = loop.time
    looked, paused, ticking = clock(), 0.0, True

    def time() -> float:
        nonlocal looked, paused
        now = clock()
        if ticking and now - looked > _PAUSE_S:
            paused += now - looked
        looked = now
        return now - paused

    def tick() -> None:
        if ticking:
            loop.call_later(_TICK_S, tick)

    loop.time = time  # type: ignore[method-assign]  # it stays: what is scheduled counts by it
    tick()
    try:
        yield
    finally:
        ticking = False
