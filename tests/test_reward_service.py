"""The Reward service: scores, with functions that fail in every way, on replicas that die."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError, DeadlineError, ForgeError, HangError, PoisonError, ServiceError
from forge_rl.rewards.protocol import RewardFunction
from forge_rl.rewards.scorer import score_again, with_score
from forge_rl.runtime import link as link_module
from forge_rl.runtime import replica as replica_module
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.replica import Replica
from forge_rl.services.reward import RewardService
from forge_rl.services.service_start import ServiceStart
from forge_rl.types import Episode, Score, Task
from tests import fake_envs
from tests.fake_actors import cluster, send_signal
from tests.fake_envs import task_of
from tests.overcome import overcome_an_error

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_S = 120.0


@contextlib.asynccontextmanager
async def reward(
    logs: Path, function: RewardFunction, *, replicas: int = 1, deadline_s: float = LONG_S
) -> AsyncIterator[tuple[RewardService, Faults]]:
    async with cluster(logs) as (meshes, faults):
        config = RewardService.Config(replicas=replicas, deadline_s=deadline_s)
        service = await RewardService.start(
            config, ServiceStart(cluster=meshes, faults=faults, deadline_s=LONG_S), function=function
        )
        try:
            yield service, faults
        finally:
            faults.closing = True
            await service.stop()


async def score(service: RewardService, task: Task, text: str) -> float:
    """Score the text of an answer."""
    episode = Episode(task=task, turns=(), output=text)
    [score] = await service.score([episode])
    return with_score(episode, score).reward


async def full_strength(service: RewardService) -> None:
    """Wait until all replicas serve."""
    changed = asyncio.Event()
    service._shared.service.listeners.add(changed.set)
    async with asyncio.timeout(LONG_S):
        while not all(replica.serving for replica in service._shared.service.replicas):
            await changed.wait()
            changed.clear()


async def test_answers_are_scored_by_every_kind_of_function(tmp_path: Path):
    async with reward(tmp_path, fake_envs.length) as (service, _):
        task = task_of()
        assert await score(service, task, "four") == 4.0
        await service.replace(lambda task, text: 7)
        assert await score(service, task, "") == 7.0
        await service.replace(fake_envs.Meeting())  # async: side by side
        assert await asyncio.gather(score(service, task, ""), score(service, task, "")) == [2.0, 2.0]
        await service.replace(fake_envs.Alone())  # plain: one by one
        assert await asyncio.gather(*(score(service, task, "") for _ in range(8))) == [1.0] * 8

        async def awaited() -> float:
            return 9.0

        await service.replace(lambda task, text: awaited())  # plain, but what it gives is not
        assert await score(service, task, "") == 9.0


async def test_what_a_function_raises_is_no_death(tmp_path: Path):
    async with reward(tmp_path, fake_envs.obedient) as (service, faults):
        with pytest.raises(ServiceError, match="ValueError: mine") as caught:
            await score(service, task_of(), "raise mine")
        assert type(caught.value) is ServiceError
        assert (caught.value.service, caught.value.call) == ("reward", "score")
        for value in ("nan", "inf"):
            with pytest.raises(ForgeError, match=f"the reward of t is {value}"):
                await score(service, task_of(), f"number {value}")
        with pytest.raises(ServiceError, match="pickle"):
            await service.replace(_Holds(threading.Lock()))
        assert await score(service, task_of(), "number 3") == 3.0
        assert "obedient" in repr(service)
        assert faults.seen == []


class _Holds:
    def __init__(self, held: object) -> None:
        self.held = held

    def __call__(self, task: object, text: str) -> float:
        return 0.0


async def test_a_score_whose_replica_dies_is_had_elsewhere(tmp_path: Path):
    async with reward(tmp_path, fake_envs.length, replicas=2) as (service, faults):
        scores = [score(service, task_of(once=tmp_path / "once"), "x" * n) for n in range(20)]
        assert await asyncio.gather(*scores) == [float(n) for n in range(20)]
        assert ["status 5" in fault.cause for fault in faults.seen] == [True]
        assert faults.fatal is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_new_replica_scores_with_the_function_of_the_day(number: signal.Signals, tmp_path: Path):
    async with reward(tmp_path, fake_envs.pid, replicas=1) as (service, faults):
        first = int(await score(service, task_of(), ""))
        send_signal(first, number)
        waiting = asyncio.create_task(score(service, task_of(), ""))
        assert int(await waiting) not in (first, 0)
        assert (await score(service, task_of(), "")) == waiting.result()
        # Replaced while none is there.
        send_signal(int(waiting.result()), number)
        await asyncio.wait_for(asyncio.shield(service._shared.service.replicas[0].death), LONG_S)
        await service.replace(fake_envs.negative)
        assert await score(service, task_of(), "") == -1.0
        assert [fault.fatal for fault in faults.seen] == [False, False]


async def test_a_function_that_is_replaced_while_a_replica_starts_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with reward(tmp_path, fake_envs.pid) as (service, _):
        original, is_given = Replica.call, asyncio.Event()
        go_on = asyncio.Event()

        async def call(replica: Replica, method: str, *args: object, **settings: object) -> object:
            answer = await original(replica, method, *args, **settings)  # type: ignore[arg-type]
            if method == "replace" and not is_given.is_set():
                is_given.set()
                await go_on.wait()
            return answer

        monkeypatch.setattr(Replica, "call", call)
        os.kill(int(await score(service, task_of(), "")), signal.SIGKILL)
        await is_given.wait()
        await service.replace(fake_envs.negative)
        go_on.set()
        assert await score(service, task_of(), "") == -1.0


async def test_a_plain_function_leaves_the_loop_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_module, "POLL_S", 0.5)
    monkeypatch.setattr(replica_module, "_SILENT_POLLS", 4)

    async with reward(tmp_path, fake_envs.obedient) as (service, faults):
        assert await score(service, task_of(), "sleep 4") == 1.0
        assert faults.seen == []


async def test_a_function_that_hangs_is_named_and_its_replica_replaced(tmp_path: Path):
    async with reward(tmp_path, fake_envs.obedient, deadline_s=2.0) as (service, faults):
        with pytest.raises(HangError, match=r"no answer within 2 s for s t \(.*fake_envs.py:\d+\)") as caught:
            await score_again(service, [Episode(task=task_of(), turns=(), output="sleep 600")])
        assert (caught.value.service, caught.value.replica, caught.value.call) == ("reward", 0, "score")
        await asyncio.wait_for(asyncio.shield(service._shared.service.replicas[0].death), LONG_S)
        assert await score(service, task_of(), "number 4") == 4.0
        assert [fault.cause for fault in faults.seen] == [
            "its reward function did not come back within its deadline"
        ], "it is not tried again"
        log = await asyncio.to_thread((tmp_path / "reward-0.log").read_text)
        assert "in obedient" in log, "its stack is printed"
        # One that only waited for others is no reason.
        many = [score(service, task_of(), "sleep 0.8") for _ in range(5)]
        assert await asyncio.gather(*many) == [1.0] * 5
        assert len(faults.seen) == 1


async def test_an_async_function_that_hangs_is_late_but_ends_no_process(tmp_path: Path):
    async def late(task: Task, text: str) -> float:
        await overcome_an_error()
        await asyncio.Event().wait()
        return 2.0

    async with reward(tmp_path, late, deadline_s=2.0) as (service, faults):
        with pytest.raises(DeadlineError, match="no answer within 2 s"):
            await score(service, task_of(), "")
        assert faults.seen == []
        replacements: list[None] = []
        service.replaced.add(lambda: replacements.append(None))
        await service.replace(fake_envs.length)
        assert replacements == [None]
        assert await score(service, task_of(), "four") == 4.0


async def test_an_answer_that_kills_its_scorer_costs_itself_and_no_other(tmp_path: Path):
    def deadly(task: Task, text: str) -> float:
        return os._exit(6) if text == "poison" else float(len(text))

    async with reward(tmp_path, deadly) as (service, faults):
        calls = [asyncio.create_task(score(service, replace(task_of(), id=f"{n}"), "fine")) for n in range(20)]
        for number in range(3):
            task = replace(task_of(), id=f"p{number}")
            episode = Episode(task=task, turns=(), output="poison")
            with pytest.raises(PoisonError, match=f"scoring .* p{number} killed 3 replicas.*status 6"):
                await score_again(service, [episode])
            assert await score(service, task_of(), "fine") == 4.0
        assert await asyncio.gather(*calls) == [4.0] * 20
        assert len(faults.seen) == 9
        await full_strength(service)
        assert faults.fatal is None


async def test_a_new_reward_is_tried_before_it_is_taken(tmp_path: Path):
    def raising(task: Task, text: str) -> float:
        raise KeyError("absent")

    async with reward(tmp_path, fake_envs.length) as (service, faults):
        task, events = task_of(), list[str]()
        service.try_on(lambda: [[Episode(task=task, turns=(), score=Score(total=4.0), output="four")]])
        service.replaced.add(lambda: events.append("replaced"))
        with pytest.raises(ConfigError, match=r"fails on s t.*KeyError: 'absent' \(.*test_reward_service.py:\d+\)"):
            await service.replace(raising)
        with pytest.raises(ConfigError, match="the reward of t is nan"):
            await service.replace(lambda task, text: float("nan"))
        assert await score(service, task, "four") == 4.0
        assert (events, service.function, faults.seen) == ([], fake_envs.length, [])
        await service.replace(lambda task, text: 7.0)
        assert await score(service, task, "four") == 7.0
        assert events == ["replaced"]


def test_settings_are_checked():
    for settings, text in (({"replicas": 0}, "replicas is 0"), ({"deadline_s": 0}, "deadline-s is 0")):
        with pytest.raises(ConfigError, match=text):
            RewardService.Config(**settings)
