"""The link: many calls in few messages, each on its own; every way to fail, and that nothing is left of it."""

import asyncio
import contextlib
import functools
import operator
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from forge_rl.errors import ConfigError, DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime import link as link_module
from forge_rl.runtime import replica as replica_module
from forge_rl.runtime.actor import ServiceActor
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.link import LinkEnd
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from tests.fake_actors import fake_service, pid_of
from tests.overcome import overcome_an_error

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_S = 120.0
"""A deadline that no test reaches: what fails must be noticed, not waited for."""

TASKS_OF_OURS = ("Link.", "Service.")


@dataclass(frozen=True)
class Shared:
    """One service of one replica for the tests that harm nothing."""

    runner: asyncio.Runner
    service: Service
    faults: Faults

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        self.runner.run(main)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        context = fake_service(tmp_path_factory.mktemp("logs"))
        yield Shared(runner, *runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))
        runner.run(no_task_is_left())


async def no_task_is_left() -> None:
    left = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    assert not [name for name in left if name.startswith(TASKS_OF_OURS)], left


@contextlib.asynccontextmanager
async def held(service: Service) -> AsyncIterator[Replica]:
    """A service's replica with a call in flight that nothing may touch."""
    (replica,) = service.replicas
    call = asyncio.create_task(replica.ask("hold", deadline_s=LONG_S))
    try:
        yield replica
        if service.replicas and replica.alive:
            await replica.call("release", deadline_s=LONG_S, rank=0)
            assert await call == "actor 0"
            assert replica.in_flight == 0
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


class Streamed:
    """A stream that is under way, and its items."""

    def __init__(self, replica: Replica, method: str, *args: object, deadline_s: float = LONG_S) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        ask = replica.ask(method, *args, deadline_s=deadline_s, on_item=self._items.put_nowait)
        self.end = asyncio.create_task(ask)

    async def take(self, count: int) -> list[Any]:
        return [await self._items.get() for _ in range(count)]

    async def rest(self) -> list[Any]:
        await self.end
        return [self._items.get_nowait() for _ in range(self._items.qsize())]


class Locked(ForgeError):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class Mute(Exception):
    """An error that cannot even be said."""

    def __str__(self) -> str:
        raise ValueError


class Stillborn:
    """Pickles, and does not unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return operator.truediv, (1, 0)


def test_many_calls_travel_in_few_messages(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            before = await replica.ask("posts", deadline_s=LONG_S)
            answers = [replica.ask("answer", i, deadline_s=LONG_S) for i in range(1000)]
            assert await asyncio.gather(*answers) == [("actor 0", i) for i in range(1000)]
            assert await replica.ask("posts", deadline_s=LONG_S) - before <= 20
            assert replica.in_flight == 1
            assert shared.faults.seen == []

    shared.run(main())


def test_what_plain_pickle_cannot_do_travels_too(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:

            class Local:
                value = 3

            _, local = await replica.ask("answer", Local(), deadline_s=LONG_S)
            assert (type(local), local.value) == (Local, 3)
            assert await replica.ask("run", lambda: Local.value + 1, deadline_s=LONG_S) == 4
            doubled = await replica.ask("run", lambda: lambda x: 2 * x, deadline_s=LONG_S)
            assert doubled(4) == 8

    shared.run(main())


def test_what_a_script_itself_defines_is_sent_by_value(monkeypatch: pytest.MonkeyPatch):
    import __main__
    from forge_rl.runtime.link import _dumps

    def function() -> int:
        return 5

    function.__module__, function.__qualname__ = "__main__", "function"
    monkeypatch.setattr(__main__, "function", function, raising=False)
    data = _dumps(function)
    monkeypatch.delattr(__main__, "function")  # as in the other process
    assert pickle.loads(data)() == 5


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("3 is too few", hint="set --n to 4"), ConfigError, "3 is too few"),
        (ValueError("no such thing"), ServiceError, "ValueError: no such thing"),
        (Locked(), ServiceError, "Locked: it holds a lock"),
        (Mute(), ServiceError, "Mute"),
        (SystemExit(3), ServiceError, "SystemExit: 3"),
        (asyncio.CancelledError(), ServiceError, "CancelledError"),
    ],
)
def test_an_error_ends_its_own_call_only(error: BaseException, kind: type[ForgeError], text: str, shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            with pytest.raises(ForgeError, match=text) as caught:
                await replica.ask("run", _Raising(type(error), error.args), deadline_s=LONG_S)
            assert type(caught.value) is kind
            if isinstance(caught.value, ServiceError):
                assert (caught.value.service, caught.value.replica, caught.value.call) == (
                    shared.service.name,
                    0,
                    "run",
                )
                assert str(replica.log) in caught.value.hint
            assert shared.faults.seen == []

    shared.run(main())


async def _overcome_and_be_cancelled() -> None:
    await overcome_an_error()
    raise asyncio.CancelledError


def test_a_call_that_cancels_itself_is_answered(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            with pytest.raises(ServiceError, match="CancelledError"):
                await replica.ask("run", _overcome_and_be_cancelled, deadline_s=LONG_S)

    shared.run(main())


class _Raising:
    """Makes an error where it is called, as some cannot travel."""

    def __init__(self, kind: type[BaseException], args: tuple[object, ...]) -> None:
        self.kind, self.args = kind, args

    def __call__(self) -> None:
        if self.kind is Locked:
            raise Locked
        if self.kind is ConfigError:
            raise ConfigError("3 is too few", hint="set --n to 4")
        raise self.kind(*self.args)


def test_the_stack_of_an_error_is_in_the_log(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            with pytest.raises(ServiceError):
                await replica.ask("run", _Raising(KeyError, ("absent",)), deadline_s=LONG_S)
            assert "KeyError: 'absent'" in replica.log.read_text()
            assert "in __call__" in replica.log.read_text()

    shared.run(main())


def test_what_cannot_be_pickled_ends_its_own_call_only(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            for argument, text in (
                (threading.Lock(), "an argument cannot be pickled: TypeError"),
                (Stillborn(), "ZeroDivisionError"),
            ):
                with pytest.raises(ServiceError, match=text) as caught:
                    await replica.ask("answer", argument, deadline_s=LONG_S)
                assert type(caught.value) is ServiceError
                assert (caught.value.service, caught.value.call) == (shared.service.name, "answer")
            for function, text in (
                (threading.Lock, "TypeError: cannot pickle"),
                (Stillborn, "the result cannot be unpickled: ZeroDivisionError"),
            ):
                with pytest.raises(ServiceError, match=text) as caught:
                    await replica.ask("run", function, deadline_s=LONG_S)
                assert type(caught.value) is ServiceError
            for method in ("nonsense", "echo"):  # there is none; that is an endpoint
                with pytest.raises(ServiceError, match="Error"):
                    await replica.ask(method, 1, deadline_s=LONG_S)
            with pytest.raises(ServiceError):
                await replica.ask("count", 3, deadline_s=LONG_S)  # a stream
            assert replica.alive
            assert shared.faults.seen == []

    shared.run(main())


def test_a_call_that_is_given_up_is_cancelled_in_the_replica(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            task = asyncio.create_task(replica.ask("hold", deadline_s=LONG_S))
            await replica.ask("answer", 0, deadline_s=LONG_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await replica.ask("ended", deadline_s=LONG_S) == ["hold"]
            with pytest.raises(DeadlineError, match=r"no answer within 0.1 s") as late:
                await replica.ask("hold", deadline_s=0.1)
            assert (late.value.service, late.value.replica, late.value.call) == (shared.service.name, 0, "hold")
            assert await replica.ask("ended", deadline_s=LONG_S) == ["hold"]
            assert replica.in_flight == 1
            call = shared.faults.waiting_for()
            assert call is not None
            assert (call[0].method, call[1]) == ("hold", 1)

    shared.run(main())


async def test_a_call_that_is_given_up_before_it_starts_does_not():
    class Actor:
        started = 0

        async def start(self) -> None:
            self.started += 1

    actor = Actor()
    end = LinkEnd(actor)
    call, cancel = (7, "start", pickle.dumps(()), False), (7, "", b"", False)
    end.post(pickle.dumps([call, cancel]))
    assert pickle.loads(await end.collect(0.01)) == []
    assert actor.started == 0
    end.post(pickle.dumps([cancel, call]))  # what was given up is forgotten
    ((number, _, value),) = pickle.loads(await end.collect(LONG_S))
    assert (number, pickle.loads(value)) == (7, None)
    end.post(pickle.dumps([cancel]))
    assert actor.started == 1


def test_a_stream_comes_item_by_item(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            await replica.ask("answer", 0, deadline_s=LONG_S)
            stream = Streamed(replica, "count", 5000)
            assert await stream.take(3) == [0, 1, 2]
            assert replica.in_flight == 2
            assert await stream.rest() == list(range(3, 5000))
            assert replica.in_flight == 1
            many = [Streamed(replica, "count", n) for n in range(20)]
            assert [await stream.rest() for stream in many] == [list(range(n)) for n in range(20)]

    shared.run(main())


def test_the_deadline_of_a_stream_is_for_each_item(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            assert await Streamed(replica, "drip", 8, 0.5, deadline_s=3.5).rest() == list(range(8))

    shared.run(main())


async def test_deadlines_go_on_after_their_timer_has_gone_off_or_was_cancelled() -> None:
    calls: dict[int, link_module._Pending] = {}
    deadlines = link_module.Deadlines(calls)
    for number in range(4):
        call = calls[number] = link_module._Pending(number, "answer", 0.01)
        deadlines.start(call)
        if number == 2:
            deadlines.cancel()
            deadlines.start(call)
        _, text = await asyncio.wait_for(call, LONG_S)
        assert text == b"no answer within 0.01 s"
        del calls[number]
        await asyncio.sleep(0.1)  # the timer goes off once more, with nothing left to wait for


def test_a_stream_gives_what_came_before_its_error(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            for args, deadline_s, kind in (
                ((3, ConfigError("mine")), LONG_S, ConfigError),
                ((3, ValueError("mine")), LONG_S, ServiceError),
                ((-3,), 1.0, DeadlineError),
            ):
                stream = Streamed(replica, "count", *args, deadline_s=deadline_s)
                assert await stream.take(3) == [0, 1, 2]
                with pytest.raises(ForgeError) as caught:
                    await stream.end
                assert type(caught.value) is kind
            assert await replica.ask("ended", deadline_s=LONG_S) == ["count"]  # the late one
            with pytest.raises(ServiceError):
                await Streamed(replica, "answer", 3).end  # no stream

    shared.run(main())


def test_a_streams_reader_may_end_it_or_raise_and_the_replica_hears(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            items: list[int] = []

            def take(item: int) -> bool:
                items.append(item)
                return item == 1

            def refuse(item: int) -> None:
                raise KeyError(item)

            assert await replica.ask("count", -3, deadline_s=LONG_S, on_item=take) is None
            assert items == [0, 1]
            with pytest.raises(KeyError, match="0"):
                await replica.ask("count", -3, deadline_s=LONG_S, on_item=refuse)
            assert await replica.ask("ended", deadline_s=LONG_S) == ["count", "count"]
            assert replica.in_flight == 1

    shared.run(main())


def test_leaving_a_stream_early_ends_it_in_the_replica(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            for items in (1, 0):
                stream = Streamed(replica, "count", -3)
                await stream.take(items)
                await replica.ask("answer", 0, deadline_s=LONG_S)
                stream.end.cancel()
                await asyncio.gather(stream.end, return_exceptions=True)
                assert await replica.ask("ended", deadline_s=LONG_S) == ["count"]
            assert replica.in_flight == 1

    shared.run(main())


async def test_replies_wait_in_the_replica_until_the_controller_collects_some():
    size, items = link_module._MOST_WAITING_BYTES // 4, 40

    class Actor:
        async def pour(self) -> AsyncIterator[bytes]:
            for _ in range(items):
                yield bytes(size)

        async def one(self) -> bytes:
            return bytes(size)

    async def main() -> None:
        end = LinkEnd(Actor())
        end.post(pickle.dumps([(0, "pour", pickle.dumps(()), True)]))
        end.post(pickle.dumps([(number, "one", pickle.dumps(()), False) for number in range(1, items)]))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(end._replies) == 4, "a pickle is a little longer than its bytes"
        replies_collected = []
        while len(replies_collected) < 2 * items:
            replies = pickle.loads(await end.collect(LONG_S))
            assert len(replies) <= 2, "a message is bounded too"
            replies_collected += replies
        assert end._waiting_bytes == 0
        assert sorted(number for number, *_ in replies_collected) == [0] * (items + 1) + list(range(1, items))

    await main()


def test_a_large_value_travels_in_slices():
    rows = [np.full(1 << 20, number, np.int32) for number in range(5)]
    actor = ServiceActor()
    actor._parcel.extend(reversed(replica_module._in_slices(rows)))
    assert len(actor._parcel) == 6, "a row each, and the end"
    assert max(map(len, actor._parcel)) < replica_module._SLICE_BYTES + (1 << 20)
    assert all(np.array_equal(a, b) for a, b in zip(actor.take_parcel(), rows, strict=True))
    assert actor._parcel == []


class Part:
    """Something that is made for the pickle of a large value, and notes the thread in which it is freed."""

    freed_in: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return Part, ()

    def __del__(self) -> None:
        self.freed_in.append(threading.get_ident())


class Large:
    """A value whose parts are made as it is pickled, as a row makes arrays."""

    def __reduce__(self) -> tuple[object, ...]:
        return list, ([Part() for _ in range(9)],)


async def test_nothing_of_a_large_value_is_copied_or_freed_in_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    sent_parts, Part.freed_in = [], []

    class Sent(Replica):
        def __init__(self) -> None:
            pass

        async def call(self, method: str, data: bytes, first: bool, **_: object) -> None:  # type: ignore[override]
            assert type(data) is bytes, "what is sent is not copied before"
            sent_parts.append((method, first, len(data)))

    monkeypatch.setattr(replica_module, "_SLICE_BYTES", 100_000)

    await Sent().send([Large(), *(letter * 200_000 for letter in "xyz")], for_call="step", deadline_s=LONG_S)
    await asyncio.sleep(0)
    assert len(Part.freed_in) == 9
    assert threading.get_ident() not in Part.freed_in
    assert [first for _, first, _ in sent_parts] == [True] + [False] * (len(sent_parts) - 1)
    assert len(sent_parts) == 4


async def test_everything_in_flight_fails_when_the_replica_dies(tmp_path: Path):
    async with fake_service(tmp_path) as (service, faults):
        (replica,) = service.replicas
        stream = Streamed(replica, "count", -3)
        assert await stream.take(3) == [0, 1, 2]
        asks = [asyncio.create_task(replica.ask("hold", deadline_s=LONG_S)) for _ in range(20)]
        await replica.ask("answer", 0, deadline_s=LONG_S)
        os.kill(await pid_of(service), signal.SIGKILL)
        for error in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(error, ReplicaError)
            assert "SIGKILL" in error.message
            assert (error.service, error.replica, error.call) == (service.name, 0, "hold")
        with pytest.raises(ReplicaError, match="SIGKILL"):
            await stream.end
        with pytest.raises(ReplicaError, match="SIGKILL"):
            await replica.ask("answer", 0, deadline_s=LONG_S)
        assert replica.in_flight == 0
        assert len(faults.seen) == 1
        assert faults.waiting_for() is None


async def test_a_service_that_stops_ends_what_is_in_flight(tmp_path: Path):
    async def main() -> None:
        async with fake_service(tmp_path) as (service, faults), held(service) as replica:
            ask = asyncio.create_task(replica.ask("hold", deadline_s=LONG_S))
            stream = Streamed(replica, "count", -1)
            assert await stream.take(1) == [0]
            await service.stop()
            for end in (ask, stream.end):
                with pytest.raises(ServiceError, match="the service has been stopped") as caught:
                    await end
                assert type(caught.value) is ServiceError
            assert faults.seen == []

    await main()
    await no_task_is_left()


async def test_several_ranks_are_linked_by_their_first(tmp_path: Path):
    async def main() -> None:
        async with fake_service(tmp_path, ranks=2) as (service, _), held(service) as replica:
            assert await replica.ask("rank", deadline_s=LONG_S) == 0

    await main()
    await no_task_is_left()


async def test_a_loop_that_does_not_answer_is_a_death_and_an_idle_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_module, "POLL_S", 0.5)
    monkeypatch.setattr(replica_module, "_SILENT_POLLS", 8)

    async with fake_service(tmp_path, replicas=2) as (service, _):
        blocked, idle = service.replicas
        await idle.ask("answer", 0, deadline_s=LONG_S)
        with pytest.raises(ReplicaError, match="hung: its event loop does not answer"):
            await blocked.ask("block", 60.0, deadline_s=LONG_S)
        assert idle.alive
        assert await idle.ask("answer", 1, deadline_s=LONG_S) == ("actor 1", 1)


async def test_a_service_without_calls_has_no_link(tmp_path: Path):
    async with fake_service(tmp_path) as (service, _):
        assert not service.replicas[0].link.open
        await service.replicas[0].ask("answer", 0, deadline_s=LONG_S)
        assert service.replicas[0].link.open


def test_functions_with_arguments_travel(shared: Shared):
    async def main() -> None:
        async with held(shared.service) as replica:
            power = functools.partial(pow, 2, 10)
            assert await replica.ask("run", power, deadline_s=LONG_S) == 1024

    shared.run(main())
