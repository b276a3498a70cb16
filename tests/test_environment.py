"""The Environment service: sessions are opened, stepped and closed, also when they or their process fail."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge_rl.envs.protocol import EnvFactory, Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError, DeadlineError, ForgeError, PoisonError, ReplayError, ReplicaError, ServiceError
from forge_rl.runtime import link as link_module
from forge_rl.runtime import replica as replica_module
from forge_rl.runtime.faults import Faults
from forge_rl.services.environment import Environment, EnvSession, LocalSession
from forge_rl.services.service_start import ServiceStart
from forge_rl.types import Task
from tests.fake_actors import cluster
from tests.fake_envs import NotingEnv, PlainlyClosed, Unclosed, task_of

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_S = 120.0


@contextlib.asynccontextmanager
async def environment(
    logs: Path, factory: EnvFactory = NotingEnv, *, replicas: int = 1, deadline_s: float = LONG_S
) -> AsyncIterator[tuple[Environment, Faults]]:
    async with cluster(logs) as (made, faults):
        config = Environment.Config(replicas=replicas, deadline_s=deadline_s)
        service = await Environment.start(
            config, ServiceStart(cluster=made, faults=faults, deadline_s=LONG_S), factory=factory
        )
        try:
            yield service, faults
        finally:
            faults.closing = True
            await service.stop()


async def notes_of(service: Environment, notes: Path) -> list[str]:
    """Return the notes of all environments, once the abandoned ones are closed."""
    await asyncio.gather(*service._closing)
    return notes.read_text().splitlines()  # noqa: ASYNC240


def pid_of(observation: Observation) -> int:
    return int(str(observation.messages[0]["content"]))


async def test_a_world_that_only_shows_its_task_runs_in_process():
    nowhere: Any = None  # neither cluster nor faults: nothing is started
    service = await Environment.start(Environment.Config(), nowhere, factory=SingleTurn)
    task = task_of()
    session, seen = await service.open(task)
    assert seen == Observation(messages=task.messages)
    assert await session.step("a") == Step(done=True)
    session.abandon()
    await session.close()
    assert repr(service) == "Environment  in process  1 sessions opened"
    await service.stop()


def test_a_world_in_process_is_told_of_a_cut_answer_if_its_step_takes_that():
    class Deaf(SingleTurn):
        async def step(self, answer: str) -> Step:  # type: ignore[override]
            return Step(done=True, reward=0.0)

    class Hearing(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            return Step(done=True, reward=float(truncated))

    async def again() -> SingleTurn:
        return SingleTurn(task_of())

    for factory, reward in ((Deaf, 0.0), (Hearing, 1.0)):
        assert asyncio.run(LocalSession(factory(task_of()), again).step("a", truncated=True)).reward == reward


@pytest.mark.parametrize(("factory", "word"), [(NotingEnv, "close"), (PlainlyClosed, "plainly")])
async def test_a_session_is_closed_when_its_environment_is_done_and_on_request(
    factory: EnvFactory, word: str, tmp_path: Path
):
    async with environment(tmp_path, factory) as (service, _):
        notes = tmp_path / "notes"
        first, seen = await service.open(task_of(notes=notes))
        second, _ = await service.open(task_of(notes=notes))
        pid = pid_of(seen)
        assert (await first.step("a")).messages[0]["content"] == "a"
        assert (await second.step("b")).messages[0]["content"] == "b"
        assert service._service.replicas[0].held == 2
        assert await first.step("done") == Step(done=True, reward=2.0)
        assert await notes_of(service, notes) == [f"reset {pid}"] * 2 + [f"{word} {pid} a done"]
        await first.close()  # is done already
        await second.close()
        await second.close()
        assert (await notes_of(service, notes))[3:] == [f"{word} {pid} b"]
        assert service._service.replicas[0].held == 0
        third, _ = await service.open(task_of(notes=notes))
        assert await third.step("wrong") == Step(done=True, reward=1.0, model_error=True)


async def test_an_environment_needs_no_close(tmp_path: Path):
    async with environment(tmp_path, Unclosed) as (service, _):
        for end in ("step", "close"):
            session, _ = await service.open(task_of())
            await (session.step("x") if end == "step" else session.close())


async def test_what_an_environment_raises_is_no_death_and_closes_the_session(tmp_path: Path):
    async with environment(tmp_path) as (service, faults):
        notes = tmp_path / "notes"
        with pytest.raises(ServiceError, match="ValueError: early") as caught:
            await service.open(task_of(notes=notes, reset="raise early"))
        assert type(caught.value) is ServiceError
        assert (caught.value.service, caught.value.call) == ("environment", "reset")
        assert len(await notes_of(service, notes)) == 2
        session, seen = await service.open(task_of(notes=notes))
        with pytest.raises(ServiceError, match="ValueError: late") as caught:
            await session.step("raise late")
        assert type(caught.value) is ServiceError
        pid = pid_of(seen)
        ended = await notes_of(service, notes)
        assert ended == [f"reset {pid}", f"close {pid}", f"reset {pid}", f"close {pid} raise late"]
        await session.close()
        assert service._service.replicas[0].held == 0
        assert faults.seen == []


async def test_what_takes_too_long_is_named_and_closed(tmp_path: Path):
    async with environment(tmp_path, deadline_s=2.0) as (service, _):
        notes = tmp_path / "notes"
        with pytest.raises(DeadlineError) as caught:
            await service.open(task_of(notes=notes, reset="hang"))
        assert (caught.value.service, caught.value.replica, caught.value.call) == ("environment", 0, "reset")
        assert len(await notes_of(service, notes)) == 2
        session, _ = await service.open(task_of(notes=notes))
        with pytest.raises(DeadlineError, match=r"no answer within 2 s") as caught:
            await session.step("hang")
        assert (caught.value.service, caught.value.replica, caught.value.call) == ("environment", 0, "step")
        assert len(await notes_of(service, notes)) == 4
        other, _ = await service.open(task_of(notes=notes))
        task = asyncio.create_task(other.step("hang"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ends = [line.split()[0] for line in await notes_of(service, notes)]
        assert ends == ["reset", "close"] * 3
        assert service._service.replicas[0].held == 0


async def test_a_blocking_environment_delays_its_process_but_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_module, "POLL_S", 0.5)
    monkeypatch.setattr(replica_module, "_SILENT_POLLS", 4)

    async with environment(tmp_path) as (service, faults):
        blocking, other = [(await service.open(task_of(notes=tmp_path / "notes")))[0] for _ in range(2)]
        steps = await asyncio.gather(blocking.step("block 4"), other.step("done"))
        assert [step.done for step in steps] == [False, True]
        assert faults.seen == []


class Constructed(NotingEnv):
    """An environment whose constructor follows its task's orders."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        match task.truth.get("construct"):
            case "wait":  # until another environment has written
                until = time.monotonic() + LONG_S
                while not Path(str(task.truth["awaited"])).exists():
                    assert time.monotonic() < until, "the constructor held up the other environments"
                    time.sleep(0.01)
            case "hang":
                threading.Event().wait()
            case "loop":
                asyncio.get_running_loop()
            case "fail":
                raise ValueError("no such room")
            case "stop":
                next(iter(()))


async def test_a_slow_constructor_holds_up_no_other_environment(tmp_path: Path):
    async with environment(tmp_path, Constructed) as (service, _):
        awaited = tmp_path / "awaited"
        other, _seen = await service.open(task_of(notes=awaited))
        awaited.unlink()
        opening = asyncio.create_task(service.open(task_of(notes=awaited, awaited=awaited, construct="wait")))
        assert (await other.step("done")).done  # whose close writes
        session, _seen = await opening
        await session.close()


async def test_a_constructor_may_need_the_loop_or_raise_without_a_death(tmp_path: Path):
    async with environment(tmp_path, Constructed) as (service, faults):
        session, _ = await service.open(task_of(notes=tmp_path / "notes", construct="loop"))
        await session.close()
        with pytest.raises(ServiceError, match="ValueError: no such room"):
            await service.open(task_of(construct="fail"))
        with pytest.raises(ForgeError, match="constructor raised StopIteration"):
            await service.open(task_of(construct="stop"))
        assert faults.seen == []


async def test_a_constructor_that_never_returns_ends_its_process(tmp_path: Path):
    async with environment(tmp_path, Constructed, deadline_s=0.5) as (service, faults):
        [replica] = service._service.replicas
        with pytest.raises(ForgeError, match=r"no answer within|did not return"):
            await service.open(task_of(notes=tmp_path / "notes", construct="hang"))
        assert "the constructor of an environment did not come back" in await replica.death
        assert len(faults.seen) == 1


async def test_an_environment_in_process_is_constructed_beside_the_event_loop():
    constructed_in: list[int] = []

    class Shown(SingleTurn):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            constructed_in.append(threading.get_ident())

    nowhere: Any = None
    service = await Environment.start(Environment.Config(), nowhere, factory=Shown)
    await service.open(task_of())
    assert threading.get_ident() not in constructed_in


async def test_an_environment_is_told_of_a_cut_answer_if_it_wants_to_know(tmp_path: Path):
    async with environment(tmp_path, Told) as (service, _):
        session, _ = await service.open(task_of(notes=tmp_path / "notes"))
        assert not (await session.step("done", truncated=True)).done
        assert (await session.step("done")).done
    async with environment(tmp_path) as (service, _):
        session, _ = await service.open(task_of(notes=tmp_path / "notes"))
        assert (await session.step("done", truncated=True)).done


class Told(NotingEnv):
    """Goes on where an answer was cut."""

    async def step(self, answer: str, *, truncated: bool = False) -> Step:
        return await super().step("goes on" if truncated else answer)


async def test_sessions_are_spread_by_how_many_are_open(tmp_path: Path):
    async with environment(tmp_path, replicas=2) as (service, _):
        opened = [await service.open(task_of(notes=tmp_path / "notes")) for _ in range(6)]
        pids = [pid_of(seen) for _, seen in opened]
        assert len(set(pids)) == 2
        assert pids.count(pids[0]) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_session_is_lost_with_its_replica_and_new_ones_open_elsewhere(number: signal.Signals, tmp_path: Path):
    async with environment(tmp_path, replicas=2) as (service, faults):
        notes = tmp_path / "notes"
        opened = [await service.open(task_of(notes=notes)) for _ in range(4)]
        dead = pid_of(opened[0][1])
        gone: list[EnvSession] = [session for session, seen in opened if pid_of(seen) == dead]
        kept: list[EnvSession] = [session for session, seen in opened if pid_of(seen) != dead]
        steps = [asyncio.create_task(session.step("hang")) for session in gone]
        os.kill(dead, number)
        for step in steps:
            with pytest.raises(ReplicaError, match="SIGKILL" if number == signal.SIGKILL else "hung"):
                await step
        for session in gone:
            with pytest.raises(ReplicaError):
                await session.step("again")
            await session.close()
        for session in kept:
            assert (await session.step("done")).done
        _, seen = await service.open(task_of(notes=notes))
        assert pid_of(seen) != dead
        assert [(fault.service, fault.fatal) for fault in faults.seen] == [("environment", False)]
        assert service.pop_metrics() == {"environment/refused": 2.0 * len(gone)}


class Story:
    """Shows all that was said; notes each step that it works on. A task may have it show its process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.said: list[str] = []

    async def reset(self) -> Observation:
        return Observation(messages=self.task.messages)

    async def step(self, answer: str) -> Step:
        self.note(answer)
        self.said.append(answer)
        shown = [*self.said, str(os.getpid())] if self.task.truth.get("differs") else self.said
        return Step(done=answer == "done", messages=({"role": "user", "content": f"{shown} at {object()}"},))

    def note(self, answer: str) -> None:
        with Path(str(self.task.truth["notes"])).open("a") as file:
            file.write(f"{os.getpid()} {answer}\n")


class Remembering(Story):
    """Takes earlier turns from their steps."""

    async def resume(self, answer: str, step: Step, calls: object) -> bool:
        self.said += [answer] * (answer != "a")
        return answer != "a"


@pytest.mark.parametrize(
    ("factory", "worked"), [(Story, ["a", "b", "c"]), (Remembering, ["a", "c"])], ids=["replayed", "resumed"]
)
async def test_an_environment_outlives_its_process_without_losing_a_turn(
    factory: EnvFactory, worked: list[str], tmp_path: Path
):
    async with environment(tmp_path, factory, replicas=2) as (service, faults):
        notes = tmp_path / "notes"
        session, _ = await service.open(task_of(notes=notes))
        other, _ = await service.open(task_of(notes=notes, differs=True))
        for answer in ("a", "b"):
            await session.step(answer)
        await other.step("a")
        first, second = (int(notes.read_text().splitlines()[at].split()[0]) for at in (0, 2))
        os.kill(first, signal.SIGKILL)
        step = await session.step("c")
        assert str(step.messages[0]["content"]).startswith("['a', 'b', 'c'] at")
        lines = [line.split() for line in notes.read_text().splitlines()][3:]
        assert lines == [[str(second), answer] for answer in worked]
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ReplayError, match="its turn 1 gave"):
            await other.step("y")
        assert (await session.step("done")).done
        assert service.pop_metrics() == {"environment/replayed": 2.0, "environment/differed": 1.0}
        assert [replica.held for replica in service._service.replicas] == [0, 0]
        assert len(faults.seen) == 2


class Copied(Story):
    """Copies itself, and must not be replayed."""

    replayable = False

    async def fork(self) -> Story:
        made = Copied(self.task)
        made.said = [*self.said]
        return made


class Unique(Story):
    replayable = False


@pytest.mark.parametrize(("factory", "worked"), [(Story, "a a b c"), (Copied, "a b c")], ids=["replayed", "copied"])
async def test_a_fork_goes_on_from_the_same_state_by_itself(factory: EnvFactory, worked: str, tmp_path: Path):
    async with environment(tmp_path, factory, replicas=2) as (service, _):
        notes = tmp_path / "notes"
        session, _ = await service.open(task_of(notes=notes))
        await session.step("a")
        fork = await session.fork()
        assert str((await session.step("b")).messages[0]["content"]).startswith("['a', 'b'] at")
        assert str((await fork.step("c")).messages[0]["content"]).startswith("['a', 'c'] at")
        assert " ".join(line.split()[1] for line in notes.read_text().splitlines()) == worked
        if factory is Story:
            os.kill(int(notes.read_text().split()[0]), signal.SIGKILL)
            another = await session.fork()
            assert str((await another.step("d")).messages[0]["content"]).startswith("['a', 'b', 'd'] at")
            await another.close()
        await session.close()
        await fork.close()
        assert [replica.held for replica in service._service.replicas] == [0, 0]


async def test_a_world_that_can_be_neither_copied_nor_replayed_is_not_forked(tmp_path: Path):
    async with environment(tmp_path, Unique) as (service, _):
        session, _ = await service.open(task_of(notes=tmp_path / "notes"))
        with pytest.raises(ForgeError, match="has no `fork`"):
            await session.fork()
        assert (await session.step("done")).done
        assert [replica.held for replica in service._service.replicas] == [0]


async def test_a_session_whose_replica_dies_while_it_opens_is_opened_elsewhere(tmp_path: Path):
    async with environment(tmp_path, Fatal, replicas=2) as (service, faults):
        task = task_of(notes=tmp_path / "notes", once=tmp_path / "once")
        session, _ = await service.open(task)
        assert (await session.step("done")).done
        assert ["status 3" in fault.cause for fault in faults.seen] == [True]
        # All die, and come back.
        for replica in service._service.replicas:
            service._service.mark_failed(replica, "test")
        session, _ = await service.open(task)
        assert (await session.step("done")).done


class Fatal(NotingEnv):
    """Kills its process the first time that it is reset."""

    async def reset(self) -> Observation:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(str(self._task.truth["once"]), os.O_CREAT | os.O_EXCL))
            os._exit(3)
        return await super().reset()


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_task_that_kills_its_environments_is_refused_and_others_go_on(where: str, tmp_path: Path):
    async with environment(tmp_path) as (service, faults):
        deadly = replace(task_of(notes=tmp_path / "notes", reset="exit 6" * (where == "reset")), id="deadly")
        for _ in range(3 * (where == "step")):
            session, _ = await service.open(deadly)
            with pytest.raises(ReplicaError, match="status 6") as caught:
                await session.step("exit 6")
            assert caught.value.blamed
        for _ in range(2):
            with pytest.raises(PoisonError, match="the environment of s deadly killed 3 replicas"):
                await service.open(deadly)
        assert len(faults.seen) == 3
        assert faults.fatal is None
        session, _ = await service.open(task_of(notes=tmp_path / "notes"))
        assert (await session.step("done")).done


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path):
    async with cluster(tmp_path) as (made, faults):
        with pytest.raises((ServiceError, TypeError)):
            await Environment.start(
                Environment.Config(),
                ServiceStart(cluster=made, faults=faults, deadline_s=LONG_S),
                factory=Unpicklable(),
            )


class Unpicklable:
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("not this one")

    def __call__(self, task: object) -> Unclosed:
        raise AssertionError


def test_settings_are_checked():
    for settings, text in (({"replicas": 0}, "replicas is 0"), ({"deadline_s": 0}, "deadline-s is 0")):
        with pytest.raises(ConfigError, match=text):
            Environment.Config(**settings)
    with pytest.raises(AssertionError, match="model"):
        Step(done=False, messages=({"role": "user", "content": "?"},), model_error=True)
