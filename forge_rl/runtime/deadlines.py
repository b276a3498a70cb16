"""Deadlines of thousands of calls at a time, nearly all met: one timer for all calls of the same deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Deadlines(Generic[T]):
    """Watches items that must be discarded in time.

    Of the items with the same deadline, the first added is the first to be late.

    Args:
        late: told of each item that was not discarded in time.
    """

    def __init__(self, late: Callable[[T], None]) -> None:
        self._late = late
        self._due: dict[float, dict[T, float]] = {}
        """Items in order of addition, with the time on the loop's clock when each is due, by deadline in seconds."""
        self._timers: dict[float, asyncio.TimerHandle] = {}

    def add(self, item: T, seconds: float) -> None:
        """Watch an item, which has so many seconds from now."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if seconds not in self._due:
            self._due[seconds] = {}
            self._timers[seconds] = loop.call_at(due, self._look, seconds)
        self._due[seconds][item] = due

    def discard(self, item: T, seconds: float) -> None:
        """Forget an item; `seconds` as given to `add`."""
        due = self._due.get(seconds)
        if due is not None:
            due.pop(item, None)

    def clear(self) -> None:
        """Forget all items."""
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
