"""Pauses of a run on request: waiting for their end, and how long they last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from forge_rl.system.listeners import Listeners


class Hold:
    """Tracks whether the run is paused, and for how many seconds in total.

        hold.pause()
        await hold.released()  # returns after hold.resume()

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._before = 0.0
        self._released = asyncio.Event()
        self._released.set()
        self.listeners = Listeners[[]]()
        """Called after each change."""

    @property
    def paused(self) -> bool:
        """Whether the run is paused, or will be at its next boundary."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Seconds paused so far, over all pauses."""
        return self._before + self.lasts_s

    @property
    def lasts_s(self) -> float:
        """Seconds since the current pause began; 0 if there is none."""
        return 0.0 if self._since is None else self._clock() - self._since

    def pause(self) -> None:
        """Pause; does nothing if it is paused already."""
        if self._since is None:
            self._since = self._clock()
            self._released.clear()
            self.listeners.tell()

    def resume(self) -> None:
        """Resume; does nothing if it is not paused."""
        if self._since is not None:
            self._before, self._since = self.seconds, None
            self._released.set()
            self.listeners.tell()

    async def released(self) -> None:
        """Wait until the run is not paused."""
        await self._released.wait()
