"""Deadlines: each is told of when it is due, whatever else began or ended meanwhile."""

import asyncio

from benchmarks.virtual_time import run
from forge_rl.runtime.deadlines import Deadlines


def test_each_is_late_when_it_is_due_and_only_then():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        late: list[tuple[str, float]] = []
        deadlines = Deadlines[str](lambda item: late.append((item, loop.time() - began)))
        began = loop.time()
        for item in ("a", "ends", "b"):
            deadlines.add(item, 2.0)
        deadlines.add("short", 0.5)
        deadlines.add("long", 8.0)
        await asyncio.sleep(1)
        deadlines.discard("ends", 2.0)
        deadlines.add("c", 2.0)
        await asyncio.sleep(1.5)
        assert late == [("short", 0.5), ("a", 2), ("b", 2)]
        deadlines.discard("a", 2.0)  # it is over, as all that is late
        await asyncio.sleep(1)
        assert late[3:] == [("c", 3)]
        deadlines.add("d", 2.0)  # nothing else took as long by then
        await asyncio.sleep(6)
        assert late[4:] == [("d", 5.5), ("long", 8)]

    run(main())


def test_what_is_cleared_is_never_late():
    async def main() -> None:
        late: list[str] = []
        deadlines = Deadlines(late.append)
        deadlines.add("a", 1.0)
        deadlines.clear()
        deadlines.discard("a", 1.0)
        await asyncio.sleep(2)
        assert late == []
        deadlines.add("b", 1.0)
        await asyncio.sleep(2)
        assert late == ["b"]

    run(main())
