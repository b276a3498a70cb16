"""Evaluations over staged services, beside training: their episodes, scores, pauses, rollbacks and errors."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ForgeError, ReplicaError, ServiceError
from forge_rl.rollout.evaluation import EvalConfig, Evaluation, score_set
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.evaluation.evaluator import EvaluationResult, Evaluator, RolloutEvaluations
from forge_rl.run.evaluation.example_evaluation import AnswerEvaluations
from forge_rl.services.completion import ResumableCompletion
from forge_rl.token_arrays import Chunk
from forge_rl.types import Episode, Outcome, Sampling, Score, Task
from tests.staged_rollouts import (
    StagedEnvironment,
    StagedGenerator,
    StagedReward,
    fail_once,
    rollouts,
    run_until_idle,
)


def sets_of(tasks: int, *names: str) -> dict[str, list[Task]]:
    """Sets of tasks that no batch has; all have the same."""
    named = [
        Task(id=str(number), source="held", messages=({"role": "user", "content": f"h{number}"},))
        for number in range(1, tasks + 1)
    ]
    return dict.fromkeys(names or ("held_out",), named)


def evaluation_of(
    sets: dict[str, list[Task]], *, episodes: int = 1, temperature: float = 0.0, **more: Any
) -> Evaluation:
    sampling = Sampling(max_tokens=4, temperature=temperature)
    return Evaluation(sets, episodes=episodes, sampling=sampling, **{"version": 0} | more)


async def test_evaluations_retry_only_lost_replicas_and_score_no_failure() -> None:
    asked: Counter[str] = Counter()

    class Moody(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            asked[self._task.id] += 1
            if self._task.id == "2":
                raise ServiceError("KeyError: 'x'", service="environment", replica=0)
            if self._task.id == "3" and asked["3"] == 1:
                raise ReplicaError("gone", service="environment", replica=0)
            return Step(done=True, reward=float(self._task.id))

    sets = sets_of(4)
    executor = rollouts(environment=StagedEnvironment(Moody))
    evaluation = evaluation_of(sets)
    executor.start_evaluation(evaluation)
    assert not evaluation.complete
    await executor.finish_evaluation()
    assert asked == {"1": 1, "2": 1, "3": 2, "4": 1}
    results = evaluation.results("held_out")
    assert [[episode.reward for episode in each if episode.outcome.scored] for each in results] == [
        [1],
        [],
        [3],
        [4],
    ]
    assert score_set("held_out", results, k=1)["avg@1"] == pytest.approx(8 / 3)
    with pytest.raises(
        ForgeError, match="all 1 episodes of the evaluation set held_out failed; held 2 ended with"
    ) as caught:
        score_set("held_out", results[1:2], k=1)
    assert caught.value.hint == "fix the environment or the agent, which raised this"
    assert executor.metrics()["rollouts/in_flight"] == 0
    await executor.finish_evaluation()  # again: nothing happens
    assert asked["1"] == 1


async def test_evaluations_have_their_own_sampling_and_repeat_their_seeds() -> None:
    async def seeds(executor: RolloutExecutor, generator: StagedGenerator, *, wait: bool) -> set[tuple[str, int]]:
        generator.seen.clear()
        evaluation = evaluation_of(sets_of(3), episodes=2, temperature=0.5)
        executor.start_evaluation(evaluation)
        if wait:
            await executor.finish_evaluation()
        batch = await executor.next_batch()
        await executor.finish_evaluation()
        assert {episode.task.source for episode in batch.episodes} == {"counting"}
        assert len(batch.episodes) == 12
        assert [len(each) for each in evaluation.results("held_out")] == [2, 2, 2]
        shown = {(chr(ids[0]), sampling.temperature) for ids, sampling in generator.seen}
        assert shown >= {("h", 0.5)}
        assert ("h", 1.0) not in shown
        return {("".join(map(chr, ids)), sampling.seed or 0) for ids, sampling in generator.seen if ids[0] == ord("h")}

    async def main() -> None:
        generator = StagedGenerator()
        executor = rollouts(generator=generator)
        first = await seeds(executor, generator, wait=False)
        generator.version = 1
        assert await seeds(executor, generator, wait=True) == first
        assert len({seed for _, seed in first}) == 6

    await main()


@pytest.mark.parametrize("kind", ["synchronous", "pipelined", "asynchronous"])
async def test_a_batchs_tasks_are_answered_greedily_after_an_evaluation(kind: Any) -> None:
    class Moody(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            if self._task.id == spoiled:
                raise ServiceError("KeyError: 'x'", service="environment", replica=0)
            return Step(done=True, reward=float(self._task.id))

    spoiled, generator, told = "", StagedGenerator(), list[str]()
    executor = rollouts(
        schedule=ScheduleConfig(kind=kind),
        generator=generator,
        environment=StagedEnvironment(Moody),
        warn=told.append,
    )
    evaluation = evaluation_of(sets_of(2))
    batch = await executor.next_batch()
    executor.start_evaluation(evaluation)
    spoiled = batch.groups[1].task.id
    generator.seen.clear()
    found = await executor.greedy_rewards(batch)
    assert evaluation.complete
    wanted = [float(group.task.id) for group in batch.groups]
    wanted[1] = math.nan
    np.testing.assert_array_equal(found.numpy(), wanted)
    greedy = ["".join(map(chr, ids)) for ids, sampling in generator.seen if sampling.temperature == 0]
    shown = [str(group.task.messages[0]["content"]) for group in batch.groups]
    assert sorted(greedy) == sorted(["h1", "h2", *shown])
    (warning,) = (text for text in told if "greedy" in text)
    assert warning.startswith(f"1 of 3 greedy episodes failed; counting {spoiled} ended with environment_error: ")
    spoiled = ""
    assert len((await executor.next_batch()).episodes) == len(batch.episodes)


def test_a_batch_waits_for_an_evaluation_of_one_version_and_for_no_other() -> None:
    async def main(one_version: bool) -> bool:
        gate = asyncio.Event()

        class Slow(SingleTurn):
            async def step(self, answer: str, *, truncated: bool = False) -> Step:
                if self._task.source == "held":
                    await gate.wait()
                return Step(done=True, reward=float(int(answer) % 7))

        executor = rollouts(environment=StagedEnvironment(Slow))
        evaluation = evaluation_of(sets_of(2), one_version=one_version)
        executor.start_evaluation(evaluation)
        waiting = asyncio.create_task(executor.next_batch())
        await run_until_idle()
        came = waiting.done()
        if not came:
            assert executor.waiting_for() == "the evaluation of version 0 lacks 2 episodes"
        gate.set()
        await waiting
        await executor.finish_evaluation()
        assert evaluation.complete
        return came

    assert asyncio.run(main(one_version=False))
    assert not asyncio.run(main(one_version=True))


async def test_interrupted_evaluations_of_examples_are_generated_again() -> None:
    gate, published = asyncio.Event(), list[int]()

    class Slow(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            await gate.wait()
            return Step(done=True, reward=float(self._task.id))

    class Losses:
        complete = False

        def start(self, *_: object) -> None: ...
        async def finish(self) -> None:
            self.complete = True

        def pop(self, sets: object, step: int) -> EvaluationResult:
            metrics = {"held_out": -2.0, "eval/held_out/loss": 2.0}
            return EvaluationResult(step=step, score=-2.0, metrics=metrics, tokens=10, episodes={})

        def cancel(self) -> None:
            self.complete = False

    async def publish() -> int:
        published.append(len(published))
        return published[-1]

    executor, devices = rollouts(environment=StagedEnvironment(Slow)), DeviceHandover(StagedGenerator())
    answers = RolloutEvaluations(EvalConfig(), executor, max_tokens=4, warn=print)
    evaluator = Evaluator(sets_of(3), AnswerEvaluations(Losses(), answers, executor, devices, publish))  # type: ignore[arg-type]
    evaluator.start(0, 0)
    for opens in (False, True):
        dying = asyncio.create_task(evaluator.finish())
        await run_until_idle()
        assert executor.metrics()["rollouts/in_flight"] == 3
        dying.cancel()
        await asyncio.wait([dying])
        assert dying.cancelled()
        assert evaluator.pop() is None
        if opens:  # its episodes end before it is restarted: nothing follows them
            gate.set()
            await run_until_idle()
            assert not [*executor._scheduler.planner.groups()]
        evaluator.rollback(0)
        evaluator.restart(0, 0)
    await evaluator.finish()
    assert published == [0, 1, 2]
    result = evaluator.pop()
    assert result is not None
    assert (result.score, result.metrics["held_out"], result.metrics["eval/held_out/loss"]) == (2, 2, 2)
    assert executor.metrics()["rollouts/in_flight"] == 0


async def test_an_evaluation_pauses_with_training_and_reports_versions() -> None:
    class Halfway(StagedGenerator):
        """Decodes letter by letter; those of evaluations wait halfway."""

        def __init__(self) -> None:
            super().__init__()
            self.go_on = asyncio.Event()

        async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
            for count in range(4):
                if count == 2 and completion.prompt_ids[0] == ord("h"):
                    await self.go_on.wait()
                finish = "stop" if count == 3 else ""
                digit = str((completion.sampling.seed or 0) // 10**count % 10)
                completion.add(
                    Chunk(
                        token_ids=(ord(digit),), logprobs=(-1.0,), versions=(self.version,), text=digit, finish=finish
                    )
                )

    generator = Halfway()
    executor = rollouts(generator=generator, schedule=ScheduleConfig(max_lag=1))
    evaluation = evaluation_of(sets_of(3), version=0)
    executor.start_evaluation(evaluation)
    await executor.next_batch()
    await run_until_idle()
    assert generator.told == ["pause"]
    status = executor.status()
    assert (status.episodes_running, status.evaluated, status.to_evaluate) == (3, 0, 3)
    assert "evaluated 0/3" in str(status)
    generator.version = 1
    generator.go_on.set()
    batch = await executor.next_batch()
    assert generator.told[:2] == ["pause", "resume"]
    assert {group.task.source for group in batch.groups} == {"counting"}
    await executor.finish_evaluation()
    assert evaluation.other_versions("held_out") == 0.5
    assert "evaluated" not in str(executor.status())
    await executor.close()


async def test_a_rollback_ends_an_evaluation_which_can_start_again() -> None:
    gate = asyncio.Event()

    class Slow(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            await gate.wait()
            return Step(done=True, reward=1.0)

    executor = rollouts(environment=StagedEnvironment(Slow))
    state = executor.state()
    lost, again = evaluation_of(sets_of(2)), evaluation_of(sets_of(2))
    executor.start_evaluation(lost)
    waiting = asyncio.create_task(executor.next_batch())
    await run_until_idle()
    waiting.cancel()
    await executor.restore(state)
    gate.set()
    await run_until_idle()
    assert (lost.left, executor.evaluation) == (2, None), "nothing of it is counted"
    executor.start_evaluation(again)
    await executor.finish_evaluation()
    assert again.complete
    assert lost.left == 2


async def test_an_error_ends_an_evaluation_and_a_later_wait_retries_it() -> None:
    executor = rollouts()
    fail_once(executor, lambda task: task.source == "held")
    evaluation = evaluation_of(sets_of(3))
    executor.start_evaluation(evaluation)
    with pytest.raises(RuntimeError, match="a bug"):
        await executor.finish_evaluation()
    async with asyncio.timeout(60):
        await executor.finish_evaluation()
    assert [len(each) for each in evaluation.results("held_out")] == [1, 1, 1]


async def test_evaluations_score_whole_groups_where_the_reward_needs_it() -> None:
    def best_of_group(task: Task, episodes: Sequence[Episode]) -> list[Score]:
        if task.id == "2":
            raise ServiceError("KeyError: 'x'", service="reward", replica=0)
        most = max(int(episode.text) for episode in episodes)
        return [Score(total=float(int(episode.text) == most)) for episode in episodes]

    executor = rollouts(reward=StagedReward(best_of_group, form="group"))
    evaluation = evaluation_of(sets_of(2), episodes=3, temperature=1.0)
    executor.start_evaluation(evaluation)
    await executor.finish_evaluation()
    good, bad = evaluation.results("held_out")
    assert sorted(episode.reward for episode in good) == [0, 0, 1]
    assert {episode.outcome for episode in bad} == {Outcome.JUDGE_ERROR}


@pytest.mark.parametrize("fails_last", [False, True])
async def test_a_failed_episode_leaves_the_rest_of_its_evaluation_scored(fails_last: bool) -> None:
    failed, others = asyncio.Event(), asyncio.Semaphore(0)
    worlds = list[object]()

    class World:
        def __init__(self, task: Task) -> None:
            self.task, self.number = task, len(worlds)
            worlds.append(self)

        async def reset(self) -> Observation:
            return Observation(messages=self.task.messages)

        async def step(self, completion: str) -> Step:
            if self.number != 2:
                await (asyncio.sleep(0) if fails_last else failed.wait())
                others.release()
                return Step(done=True)
            for _ in range(2 if fails_last else 0):
                await others.acquire()
            failed.set()
            raise OSError("broken")

    reward = StagedReward(lambda task, episodes: [1.0 for _ in episodes], form="group")
    executor = rollouts(environment=StagedEnvironment(World), reward=reward)
    evaluation = evaluation_of({"held_out": sets_of(1)["held_out"]}, episodes=3, temperature=1.0)
    executor.start_evaluation(evaluation)
    await executor.finish_evaluation()
    [results] = evaluation.results("held_out")
    outcomes = sorted(str(episode.outcome) for episode in results)
    assert outcomes == ["completed", "completed", "environment_error"]
    assert [episode.reward for episode in results if episode.outcome.scored] == [1.0, 1.0]
