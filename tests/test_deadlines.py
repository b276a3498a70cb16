"""Deadlines: each call is told when it is due, whatever else began or ended meanwhile."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from benchmarks.virtual_time import run
from forge_rl.runtime.link import Deadlines


class Call:
    def __init__(self, deadline_s: float, be_late: Callable[[], None]) -> None:
        self.deadline_s = deadline_s
        self.due = math.inf
        self._be_late = be_late

    def be_late(self) -> None:
        self.due = math.inf
        self._be_late()


def test_each_is_late_when_it_is_due_and_only_then():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        late: list[tuple[str, float]] = []
        calls: Any = {}
        deadlines = Deadlines(calls)
        began = loop.time()

        def add(name: str, seconds: float) -> None:
            calls[name] = Call(seconds, lambda: late.append((name, loop.time() - began)))
            deadlines.start(calls[name])

        for name in ("a", "ends", "b"):
            add(name, 2.0)
        add("short", 0.5)
        add("long", 8.0)
        await asyncio.sleep(1)
        del calls["ends"]
        add("c", 2.0)
        await asyncio.sleep(1.5)
        assert late == [("short", 0.5), ("a", 2), ("b", 2)]
        del calls["a"]
        await asyncio.sleep(1)
        assert late[3:] == [("c", 3)]
        add("d", 2.0)
        await asyncio.sleep(1.5)
        deadlines.start(calls["long"])  # an item came
        await asyncio.sleep(4.5)
        assert late[4:] == [("d", 5.5)]
        await asyncio.sleep(4)
        assert late[5:] == [("long", 13)]

    run(main())


def test_what_is_cancelled_is_never_late():
    async def main() -> None:
        late: list[str] = []
        calls: Any = {name: Call(1.0, lambda name=name: late.append(name)) for name in ("a", "b")}
        deadlines = Deadlines(calls)
        deadlines.start(calls.pop("a"))
        deadlines.cancel()
        await asyncio.sleep(2)
        assert late == []
        deadlines.start(calls["b"])
        await asyncio.sleep(2)
        assert late == ["b"]

    run(main())


def test_successive_late_calls_are_not_examined_each_time():
    async def main() -> None:
        looks = 0

        class Calls(dict[int, Any]):
            def values(self) -> Any:
                nonlocal looks
                looks += 1
                return super().values()

        late: list[int] = []
        calls = Calls(
            (number, Call(1 + number / 1000, lambda number=number: late.append(number))) for number in range(1000)
        )
        deadlines = Deadlines(calls)
        for call in dict.values(calls):
            deadlines.start(call)
        await asyncio.sleep(3)
        assert late == list(range(1000))
        assert looks <= 21

    run(main())


def test_no_stream_is_late_while_streams_are_held():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        late: list[tuple[str, float]] = []
        calls: Any = {}
        deadlines = Deadlines(calls)

        def add(name: str, *, streams: bool) -> None:
            calls[name] = Call(2.0, lambda: late.append((name, loop.time())))
            calls[name].on_item = print if streams else None
            deadlines.start(calls[name])

        add("before", streams=True)
        await asyncio.sleep(1)
        deadlines.hold_streams(True)
        add("meanwhile", streams=True)
        add("plain", streams=False)
        await asyncio.sleep(9)
        assert late == [("plain", 3)]
        deadlines.start(calls["before"])  # a last item came
        await asyncio.sleep(9)
        deadlines.hold_streams(False)
        await asyncio.sleep(9)
        assert late[1:] == [("before", 21), ("meanwhile", 21)]

    run(main())
