"""Replicas that die or hang: noticed, killed whole, brought back, and abandoned when they keep dying."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError, DeadlineError, PoisonError, ReplicaError, ServiceError
from forge_rl.runtime import link as link_module
from forge_rl.runtime import replica as replica_module
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.processes import ProcessTree, describe_exit
from forge_rl.runtime.replica import Replica, ReplicaState
from forge_rl.runtime.service import Service
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.supervisor import Supervisor
from tests.fake_actors import FakeActor, fake_service, pid_of
from tests.processes import lives

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_S = 120.0
"""A deadline that no test reaches."""


class Naps:
    """Sleep that only records the seconds between restarts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

        self.hold_at: float | None = None
        """The one that does not end."""

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if seconds == self.hold_at:
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def supervised(
    logs: Path,
    *,
    replicas: int = 2,
    restart: Restart | None = None,
    before: Callable[[int], Awaitable[None]] | None = None,
    after: Callable[[int], Awaitable[None]] | None = None,
    uniform: bool = False,
    **settings: object,
) -> AsyncIterator[tuple[Service, Faults, Naps]]:
    """A service whose replicas are spawned again; `before` and `after` run around the spawn."""
    async with fake_service(logs, replicas=replicas, **settings) as (service, faults):
        naps = Naps()

        async def respawn(index: int) -> None:
            if before is not None:
                await before(index)
            replica = service.spawn(FakeActor, f"actor {index}", index=index)
            await service.watch(replica, deadline_s=LONG_S)
            if after is not None:
                await after(index)

        Supervisor(service, respawn, restart or Restart(), uniform=uniform, sleep=naps).supervise()
        yield service, faults, naps


async def until(service: Service, condition: Callable[[], bool]) -> None:
    """Wait until something is so after a change of the serving replicas."""
    changed = asyncio.Event()
    service.listeners.add(changed.set)
    async with asyncio.timeout(LONG_S):
        while not condition():
            await changed.wait()
            changed.clear()
    service.listeners.discard(changed.set)


def all_serve(service: Service) -> bool:
    return all(replica.serving for replica in service.replicas)


async def test_a_dead_replica_is_replaced_and_its_work_goes_on_elsewhere(tmp_path: Path):
    async with supervised(tmp_path) as (service, faults, _):
        served: list[list[int]] = []
        service.listeners.add(lambda: served.append([r.index for r in service.replicas if r.serving]))
        recoveries: list[float | None] = []
        faults.listeners.add(lambda fault: recoveries.append(fault.recovered_s))
        dead, other = service.replicas
        other.held = 5  # so that the first is chosen
        held_call = asyncio.create_task(dead.ask("hold", deadline_s=LONG_S))
        routed = asyncio.create_task(service.route("hold", deadline_s=LONG_S))
        await dead.ask("answer", 0, deadline_s=LONG_S)
        assert (dead.in_flight, other.in_flight) == (2, 0)
        os.kill(await pid_of(service, 0), signal.SIGKILL)
        with pytest.raises(ReplicaError, match="SIGKILL"):
            await held_call
        assert dead.state is ReplicaState.QUARANTINED
        await asyncio.sleep(0)
        assert other.in_flight == 1  # at once
        await other.ask("answer", 0, deadline_s=LONG_S)  # comes after what waits
        await other.call("release", deadline_s=LONG_S)
        assert await routed == "actor 1"

        await until(service, lambda: all_serve(service))
        fresh = service.replicas[0]
        assert (fresh.index, fresh.incarnation, fresh.in_flight) == (0, 1, 0)
        assert fresh.log == tmp_path / f"{service.name}-0.1.log"
        assert fresh.log.exists()
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("actor 0", 1)
        assert served == [[1], [0, 1]]
        (fault,) = faults.seen
        assert (fault.service, fault.replica, fault.fatal) == (service.name, 0, False)
        assert fault.recovered_s is not None
        assert recoveries == [None, fault.recovered_s]
        assert len(faults._actions) == 2, "Monarch's late word about the old one is nobody's"


@pytest.mark.parametrize("process", ["itself", "a descendant"])
async def test_a_replica_that_is_stopped_is_killed_and_replaced(process: str, tmp_path: Path):
    async with supervised(tmp_path) as (service, faults, _):
        replica = service.replicas[0]
        child = await replica.ask("start_child", deadline_s=LONG_S)
        pid = await pid_of(service)
        os.kill(pid if process == "itself" else child, signal.SIGSTOP)
        with pytest.raises(ReplicaError, match="hung: its process was stopped"):
            await replica.ask("hold", deadline_s=LONG_S)
        await until(service, lambda: all_serve(service))
        assert service.replicas[0].incarnation == 1
        assert not lives(child)
        assert not lives(pid)
        assert [fault.cause for fault in faults.seen] == ["hung: its process was stopped"]


async def test_a_stopped_descendant_is_left_alone_where_that_is_wanted(tmp_path: Path):
    async with supervised(tmp_path, descendants=False) as (service, _, _):
        first, second = service.replicas
        os.kill(await first.ask("start_child", deadline_s=LONG_S), signal.SIGSTOP)
        os.kill(await pid_of(service, 1), signal.SIGSTOP)
        await asyncio.wait_for(asyncio.shield(second.death), LONG_S)
        assert first.alive


async def test_all_that_a_dead_replica_had_started_ends_before_it_is_replaced(tmp_path: Path):
    liveness: list[bool] = []
    children: list[int] = []

    async def look(_: int) -> None:
        liveness.extend(lives(pid) for pid in children)

    async with supervised(tmp_path, before=look) as (service, _, _):
        # One that is as old as the last look at the replica, and one that was never looked at.
        children.append(await service.replicas[0].ask("start_child", deadline_s=LONG_S))
        service.replicas[0].tree.has_stopped(max_processes=64)
        assert children[0] in service.replicas[0].tree.members
        children.append(await service.replicas[0].ask("start_child", deadline_s=LONG_S))
        os.kill(await pid_of(service, 0), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        await until(service, lambda: all_serve(service))
        assert liveness == [False, False]


async def test_a_new_replica_serves_only_when_it_is_ready(tmp_path: Path):
    started, gate = asyncio.Event(), asyncio.Event()

    async def get_ready(_: int) -> None:
        started.set()
        await gate.wait()

    async with supervised(tmp_path, replicas=1, after=get_ready) as (service, _, _):
        os.kill(await pid_of(service), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        waiting = [asyncio.create_task(service.route("answer", i, deadline_s=LONG_S)) for i in range(3)]
        await started.wait()
        fresh = service.replicas[0]
        assert fresh.state is ReplicaState.STARTING
        assert await fresh.call("echo", 1, deadline_s=LONG_S) == ("actor 0", 1)
        assert not any(task.done() for task in waiting)
        gate.set()
        assert await asyncio.gather(*waiting) == [("actor 0", i) for i in range(3)]


async def test_all_may_die_at_once(tmp_path: Path):
    async with supervised(tmp_path, replicas=3) as (service, faults, _):
        pids = [await pid_of(service, index) for index in range(3)]
        routed = [asyncio.create_task(service.route("answer", i, deadline_s=LONG_S)) for i in range(30)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [value for _, value in await asyncio.gather(*routed)] == list(range(30))
        await until(service, lambda: all_serve(service))
        assert [replica.incarnation for replica in service.replicas] == [1, 1, 1]
        assert [fault.fatal for fault in faults.seen] == [False] * 3
        assert all(fault.recovered_s is not None for fault in faults.seen)
        assert faults.fatal is None


async def test_a_replica_that_keeps_dying_is_retried_while_others_go_on(tmp_path: Path):
    async def die(index: int) -> None:
        if service.replicas[index].incarnation not in (6, 7):
            await service.replicas[index].call("exit", 7, deadline_s=LONG_S)

    restart = Restart(max_restarts=4)
    async with supervised(tmp_path, restart=restart, after=die) as (service, faults, naps):
        assert await service.route("answer", 0, deadline_s=LONG_S)
        os.kill(await pid_of(service, 0), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        await until(service, lambda: all_serve(service))
        assert naps.seconds == [0.0, 1.0, 2.0, 4.0, 300.0, 300.0]
        assert service.replicas[0].incarnation == 6
        assert [fault.replica for fault in faults.seen] == [0] * 6
        assert faults.fatal is None

        # When the others die while it rests, nobody waits for it.
        naps.hold_at = 300.0
        os.kill(await pid_of(service, 0), signal.SIGKILL)
        async with asyncio.timeout(LONG_S):
            while service.replicas[0].state is not ReplicaState.ABANDONED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for i in range(3):
            assert await service.route("answer", i, deadline_s=LONG_S) == ("actor 1", i)

        # The last one too: all who wait are told why.
        os.kill(await pid_of(service, 1), signal.SIGKILL)
        await until(service, lambda: not service.replicas[1].serving)
        waiting = [asyncio.create_task(service.route("answer", i, deadline_s=LONG_S)) for i in range(3)]
        waiting.append(asyncio.create_task(service.available()))
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert type(error) is ServiceError
            assert error.service == service.name
            assert error.message == (
                f"no replica is left; replica 0: {describe_exit(-signal.SIGKILL)}; "
                "replica 1: its process exited with status 7"
            )
        fatal = await asyncio.wait_for(faults.wait(), LONG_S)
        assert (fatal.service, fatal.replica) == (service.name, None)
        assert "no replica is left; replica 0: " in fatal.message


async def test_two_deaths_before_any_answer_end_the_service(tmp_path: Path):
    async with supervised(tmp_path, replicas=1, uniform=True) as (service, faults, naps):
        for _ in range(2):
            await until(service, lambda: all_serve(service))
            await service.replicas[0].call("say", "ValueError: head size 16", deadline_s=LONG_S)
            with pytest.raises(ReplicaError):
                await service.replicas[0].call("exit", 71, deadline_s=LONG_S)
        fatal = await asyncio.wait_for(faults.wait(), LONG_S)
        assert "no replica is left; replica 0: its process exited with status 71: ValueError: head size 16" in str(
            fatal
        )
        assert naps.seconds == [0.0], "it was restarted once"


async def test_a_replica_that_does_not_start_again_is_killed_and_tried_again(tmp_path: Path):
    fails = ["before", "after", "cancelled"]
    pids: list[int] = []

    async def before(_: int) -> None:
        if fails[:1] == ["before"]:
            raise ValueError(fails.pop(0))

    async def after(index: int) -> None:
        pids.append(await pid_of(service, index))
        if fails:
            raise asyncio.CancelledError if fails[0] == "cancelled" else ConfigError(fails.pop(0))

    async def cancelled_once(index: int) -> None:
        try:
            await after(index)
        except asyncio.CancelledError:
            fails.pop(0)
            raise

    async with supervised(tmp_path, replicas=1, before=before, after=cancelled_once) as (service, faults, naps):
        os.kill(await pid_of(service), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        await until(service, lambda: all_serve(service))
        assert fails == []
        assert len(naps.seconds) == 4
        assert [lives(pid) for pid in pids] == [False, False, True]
        causes = [fault.cause for fault in faults.seen]
        assert "SIGKILL" in causes[0]
        assert causes[1:] == [
            "it did not restart: ValueError: before",
            "it did not restart: ConfigError: after",
            "it did not restart: CancelledError: ",
        ]
        assert all(fault.recovered_s is not None for fault in faults.seen)
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("actor 0", 1)


async def test_a_replica_that_served_for_long_starts_afresh(tmp_path: Path):
    clock_s = 0.0
    restart = Restart(max_restarts=2)
    async with supervised(tmp_path, replicas=1, restart=restart, clock=lambda: clock_s) as (service, _, naps):
        for served_s in (10, 59, 60, 100, 59):
            clock_s += served_s
            os.kill(await pid_of(service), signal.SIGKILL)
            await until(service, lambda: not service.replicas[0].serving)
            await until(service, lambda: all_serve(service))
        assert naps.seconds == [0, 1, 0, 0, 1]


async def test_what_kills_each_replica_that_it_meets_does_not_kill_them_all(tmp_path: Path):
    async with supervised(tmp_path) as (service, faults, _):
        with pytest.raises(PoisonError, match=r"a call killed 3 replicas .* its process exited with status 9"):
            await service.route("run", Killer(), deadline_s=LONG_S)
        assert len(faults.seen) == 3
        await until(service, lambda: all_serve(service))
        assert sum(replica.incarnation for replica in service.replicas) == 3


async def test_deaths_are_blamed_only_on_the_call_in_progress(tmp_path: Path):
    restart = Restart(max_restarts=1)
    async with supervised(tmp_path, replicas=1, restart=restart, blames=True) as (service, faults, naps):
        held_calls = [asyncio.create_task(service.route("hold", deadline_s=LONG_S, about="idle")) for _ in range(9)]
        dead = service.replicas[0]
        await dead.ask("answer", 1, deadline_s=LONG_S)

        async def kill(replica: Replica) -> object:
            return await replica.ask("run", Killer(), deadline_s=LONG_S)

        with pytest.raises(PoisonError, match=r"task 7 killed 3 replicas .* its process exited with status 9"):
            await service.try_on(kill, about="task 7", refuses=True)
        with pytest.raises(PoisonError, match=r"task 7 killed 3 replicas"):
            await service.try_on(kill, about="task 7", refuses=True)
        assert len(faults.seen) == 3, "the task is not tried again"
        await until(service, lambda: all_serve(service))
        assert not any(task.done() for task in held_calls), "what only waited is on its fourth replica"
        assert naps.seconds == [0.0] * 3, "no death of the replica is in a row"
        assert faults.fatal is None
        assert service.replicas[0].incarnation == 3
        assert await service.route("run", Fine(), deadline_s=LONG_S, about="task 8") == 8
        await service.replicas[0].call("release", deadline_s=LONG_S)
        assert await asyncio.gather(*held_calls) == ["actor 0"] * 9
        assert [name for name in os.listdir(tmp_path) if name.endswith(".calls")] == [service.replicas[0].notes.name]


async def test_a_listener_that_raises_changes_nothing_for_others_and_is_told_of(tmp_path: Path):
    async with supervised(tmp_path, replicas=1) as (service, faults, _):
        recoveries: list[float | None] = []

        def full(*_: object) -> None:
            raise OSError("no space left")

        service.listeners.add(full)
        faults.listeners.add(full)
        faults.listeners.add(lambda fault: recoveries.append(fault.recovered_s))
        os.kill(await pid_of(service), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        await until(service, lambda: all_serve(service))
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("actor 0", 1)
        assert [recovered is None for recovered in recoveries] == [True, False]
        assert sorted("no space left" in fault.cause for fault in faults.seen) == [False, True]
        assert faults.fatal is None


async def test_a_process_whose_loop_hangs_prints_its_stacks_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_module, "POLL_S", 0.2)
    monkeypatch.setattr(replica_module, "_SILENT_POLLS", 4)

    async with supervised(tmp_path, replicas=1, blames=True) as (service, _, _):
        replica = service.replicas[0]
        with pytest.raises(ReplicaError, match="its event loop does not answer") as caught:
            await replica.ask("run", Holding(), deadline_s=LONG_S)
        assert caught.value.blamed
        log = await asyncio.to_thread(replica.log.read_text)
        assert "in __call__" in log


class Holding:
    """Holds the interpreter: Python has no turn to print anything."""

    def __call__(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")


class Fine:
    def __call__(self) -> int:
        return 8


class Killer:
    def __call__(self) -> None:
        os._exit(9)


async def test_an_error_and_a_deadline_are_not_tried_again(tmp_path: Path):
    async with supervised(tmp_path) as (service, faults, _):
        with pytest.raises(ServiceError, match="ValueError"):
            await service.route("run", Invalid(), deadline_s=LONG_S)
        with pytest.raises(DeadlineError):
            await service.route("hold", deadline_s=0.1)
        ended = [await replica.ask("ended", deadline_s=LONG_S) for replica in service.replicas]
        assert sorted(ended) == [[], ["hold"]]
        # A replica's own word that another one died is an error like others.
        with pytest.raises(ReplicaError, match="of another service"):
            await service.route("run", OfAnother(), deadline_s=LONG_S)
        assert faults.seen == []


class Invalid:
    def __call__(self) -> None:
        raise ValueError


class OfAnother:
    def __call__(self) -> None:
        raise ReplicaError("of another service", service="other", replica=0)


async def test_a_replica_marked_failed_is_killed_and_replaced(tmp_path: Path):
    async with supervised(tmp_path) as (service, faults, _):
        replica = service.replicas[1]
        pid = await pid_of(service, 1)
        held_call = asyncio.create_task(replica.ask("hold", deadline_s=LONG_S))
        await replica.ask("answer", 0, deadline_s=LONG_S)
        service.mark_failed(replica, "garbage")
        with pytest.raises(ReplicaError, match="garbage"):
            await held_call
        await until(service, lambda: all_serve(service))
        assert not lives(pid)
        service.mark_failed(replica, "again")  # it is dead
        assert service.replicas[1].alive
        assert [fault.cause for fault in faults.seen] == ["garbage"]


async def test_a_service_can_stop_in_the_middle_of_a_restart(tmp_path: Path):
    started = asyncio.Event()

    async def hang(_: int) -> None:
        started.set()
        await asyncio.Event().wait()

    async with supervised(tmp_path, replicas=1, after=hang) as (service, faults, _):
        os.kill(await pid_of(service), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        waiting = asyncio.create_task(service.route("answer", 1, deadline_s=LONG_S))
        await started.wait()
        await service.stop()
        with pytest.raises(ServiceError, match="the service has been stopped"):
            await waiting
        assert len(faults.seen) == 1
        assert not [task for task in asyncio.all_tasks() if "Service." in task.get_coro().__qualname__]


@pytest.mark.parametrize("deaths", ["once", "twice", "exit"])
async def test_a_first_replica_that_a_signal_ends_is_started_once_more(tmp_path: Path, deaths: str):
    async with fake_service(tmp_path, replicas=0) as (service, faults):
        spawned = list[int]()

        async def start_one(index: int) -> None:
            spawned.append(index)
            replica = service.spawn(FakeActor, f"actor {index}", index=index)
            await service.watch(replica, deadline_s=LONG_S)
            if index == 0 and (spawned.count(0) == 1 or deaths == "twice"):
                if deaths == "exit":
                    await replica.call("exit", 3, deadline_s=LONG_S)
                os.kill(await replica.call("process_id", deadline_s=LONG_S), signal.SIGSEGV)
                await replica.call("hang", deadline_s=LONG_S)

        supervisor = Supervisor(service, start_one, Restart())
        if deaths == "once":
            await supervisor.start(2)
            assert all_serve(service)
            assert [(fault.cause, fault.fatal) for fault in faults.seen] == [
                ("its process was ended by SIGSEGV", False)
            ]
            assert not service.recoverable
        else:
            with pytest.raises(ReplicaError, match="SIGSEGV" if deaths == "twice" else "exited with status 3"):
                await supervisor.start(2)
        assert spawned.count(0) == 1 + (deaths != "exit")


async def test_a_replica_that_dies_while_others_start_is_replaced_once_they_have(tmp_path: Path):
    async with fake_service(tmp_path, replicas=0) as (service, faults):

        async def start_one(index: int) -> None:
            replica = service.spawn(FakeActor, f"actor {index}", index=index)
            await service.watch(replica, deadline_s=LONG_S)
            if index == 1:
                await until(service, lambda: service.at(0) is not None and service.replicas[0].serving)
                os.kill(await pid_of(service), signal.SIGKILL)
                await service.replicas[0].death

        await Supervisor(service, start_one, Restart()).start(2)
        await until(service, lambda: all_serve(service))
        assert [fault.fatal for fault in faults.seen] == [False]


async def test_without_supervision_a_death_is_fatal(tmp_path: Path):
    async with fake_service(tmp_path) as (service, faults):
        os.kill(await pid_of(service), signal.SIGSTOP)
        error = await asyncio.wait_for(faults.wait(), LONG_S)
        assert (error.service, error.replica, error.message) == (service.name, 0, "hung: its process was stopped")
        assert service.replicas[0].state is ReplicaState.ABANDONED
        with pytest.raises(ServiceError, match="no replica is left"):
            await service.available()
        # By hand, too, it can be replaced.
        await service.processes.clean_up(service.replicas[0])
        await service.watch(service.spawn(FakeActor, "fresh", index=0), deadline_s=LONG_S)
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("fresh", 1)


def test_restarts_are_bounded_by_numbers_that_make_sense():
    delays = [Restart(max_restarts=9).delay_s(deaths) for deaths in range(1, 11)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60, 300]
    with pytest.raises(ConfigError, match=r"restart\.max-restarts is -1"):
        Restart(max_restarts=-1)


async def test_a_killed_replicas_shared_memory_is_freed_by_its_tracker(tmp_path: Path):
    async with supervised(tmp_path, replicas=1) as (service, _, _):
        name = await service.replicas[0].ask("run", MakeSemaphore(), deadline_s=LONG_S)
        left = f"sem.{name.removeprefix('/')}"
        assert left in os.listdir("/dev/shm")
        os.kill(await pid_of(service), signal.SIGKILL)
        await until(service, lambda: not service.replicas[0].serving)
        await until(service, lambda: all_serve(service))
        assert left not in os.listdir("/dev/shm")


async def test_a_replica_restarts_whose_death_monarch_reports_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessTree, "_on_end", lambda self, pid, on_end: self._unwatch(pid))  # notices nothing

    async with supervised(tmp_path, replicas=1) as (service, faults, _):
        os.kill(await pid_of(service), signal.SIGKILL)
        await until(service, lambda: bool(faults.seen))
        await until(service, lambda: all_serve(service))
        assert len(faults.seen) == 1, faults.seen


class MakeSemaphore:
    def __call__(self) -> str:
        import multiprocessing

        semaphore = multiprocessing.get_context("spawn").Semaphore()
        MakeSemaphore.kept = semaphore
        return semaphore._semlock.name
