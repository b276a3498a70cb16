"""Event loop clock that stands still while the process is stopped, so that no deadline expires meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_TICK_S = 1.0
"""Maximum seconds between two reads of the loop's clock."""
_PAUSE_S = 5.0
"""A longer gap between reads counts as a pause: the process was stopped, by Ctrl-Z or a debugger, or blocked."""


@contextlib.contextmanager
def clock_without_pauses() -> Iterator[None]:
    """Exclude pauses of this process from the running loop's clock from now on; detects pauses within the body.

    Other processes continue during a pause, and their answers are ready when this one resumes; without this, every call
    in flight would have timed out.
    """
    loop = asyncio.get_running_loop()
    clock = loop.time
    last_reading, paused_s, ticking = clock(), 0.0, True

    def time() -> float:
        nonlocal last_reading, paused_s
        reading = clock()
        if ticking and reading - last_reading > _PAUSE_S:
            paused_s += reading - last_reading
        last_reading = reading
        return reading - paused_s

    def tick() -> None:
        if ticking:
            loop.call_later(_TICK_S, tick)

    loop.time = time  # type: ignore[method-assign]  # stays after the body, as scheduled callbacks rely on it
    tick()
    try:
        yield
    finally:
        ticking = False
