"""Deadlines: each call is told when it is due, whatever else began or ended meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.virtual_time import run
from forge_rl.runtime.link import Deadlines


class Call:
    def __init__(self, deadline_s: float, be_late: Callable[[], None]) -> None:
        self.deadline_s = deadline_s
        self.be_late = be_late


def test_each_is_late_when_it_is_due_and_only_then():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        late: list[tuple[str, float]] = []
        deadlines: Any = Deadlines()
        began = loop.time()

        def add(name: str, seconds: float) -> Call:
            call = Call(seconds, lambda: late.append((name, loop.time() - began)))
            deadlines.add(call)
            return call

        a, ends, _ = (add(name, 2.0) for name in ("a", "ends", "b"))
        add("short", 0.5)
        add("long", 8.0)
        await asyncio.sleep(1)
        deadlines.discard(ends)
        add("c", 2.0)
        await asyncio.sleep(1.5)
        assert late == [("short", 0.5), ("a", 2), ("b", 2)]
        deadlines.discard(a)  # it is over, as all that is late
        await asyncio.sleep(1)
        assert late[3:] == [("c", 3)]
        add("d", 2.0)  # nothing else took as long by then
        await asyncio.sleep(6)
        assert late[4:] == [("d", 5.5), ("long", 8)]

    run(main())


def test_what_is_cleared_is_never_late():
    async def main() -> None:
        late: list[str] = []
        deadlines: Any = Deadlines()
        a, b = (Call(1.0, lambda name=name: late.append(name)) for name in ("a", "b"))
        deadlines.add(a)
        deadlines.clear()
        deadlines.discard(a)
        await asyncio.sleep(2)
        assert late == []
        deadlines.add(b)
        await asyncio.sleep(2)
        assert late == ["b"]

    run(main())
