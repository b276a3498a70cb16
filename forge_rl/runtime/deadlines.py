"""Deadlines of thousands of calls at a time, which nearly all end before: one timer for all that may take as long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Deadlines(Generic[T]):
    """Watches what must end in time. Of those that may take as long, the first to begin is the first to be late.

    Args:
        late: told of each that was not discarded in time.
    """

    def __init__(self, late: Callable[[T], None]) -> None:
        self._late = late
        self._due: dict[float, dict[T, float]] = {}
        """By how long they may take: what runs, in the order in which it began, and until when on the loop's clock."""
        self._timers: dict[float, asyncio.TimerHandle] = {}

    def add(self, item: T, seconds: float) -> None:
        """From now on it may take so long."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if seconds not in self._due:
            self._due[seconds] = {}
            self._timers[seconds] = loop.call_at(due, self._look, seconds)
        self._due[seconds][item] = due

    def discard(self, item: T, seconds: float) -> None:
        """It has ended; `seconds` as they were given to `add`."""
        due = self._due.get(seconds)
        if due is not None:
            due.pop(item, None)

    def clear(self) -> None:
        """All have ended."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._due.clear()

    def _look(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        items, late = self._due[seconds], []
        for item, due in items.items():
            if due > loop.time():
                self._timers[seconds] = loop.call_at(due, self._look, seconds)
                break
            late.append(item)
        else:
            del self._due[seconds], self._timers[seconds]
        for item in late:
            items.pop(item)
            self._late(item)
