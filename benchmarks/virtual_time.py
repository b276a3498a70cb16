"""An event loop on virtual time: when nothing is ready, the clock jumps to the next timer. Hours take seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio with a clock of its own. Only timers and tasks; whatever waits for the outside world waits for ever."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and no timer is set: a deadlock")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
