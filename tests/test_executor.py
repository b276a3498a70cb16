"""Rollouts over staged services: batches, turns, seeds, outcomes, and the bound on groups that teach nothing."""

import asyncio
import json

import pytest

from forge_rl.data.mixture import Mixture
from forge_rl.envs.protocol import Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import DeadlineError, ServiceError, TaskError
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.types import Outcome, Sampling, Task
from tests.staged_rollouts import CountingSource, StagedEnvironment, StagedGenerator, StagedReward, TwoTurns, rollouts


def test_a_batch_has_p_groups_of_g_episodes_of_one_task_each() -> None:
    batch = asyncio.run(rollouts().next_batch())
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert [len(group.episodes) for group in batch.groups] == [4, 4, 4]
    assert batch.version == 5
    assert batch.rewards.shape == (3, 4)


def test_the_seed_decides_the_batches_and_no_two_episodes_share_one() -> None:
    async def two_batches(seed: int) -> list[str]:
        generator = StagedGenerator()
        executor = rollouts(seed=seed, generator=generator)
        found = []
        for generator.version in range(2):
            found += [episode.text for episode in (await executor.next_batch()).episodes]
        return found

    def texts(seed: int) -> list[str]:
        return asyncio.run(two_batches(seed))

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert len(set(texts(0))) == 24


def test_a_restored_state_goes_on_with_the_same_batches() -> None:
    async def main() -> None:
        generator = StagedGenerator()
        whole = rollouts(generator=generator)
        await whole.next_batch()
        state = json.loads(json.dumps(whole.state()))
        generator.version = 1
        expected = await whole.next_batch()
        restored = rollouts(generator=generator)
        await restored.restore(state)
        batch = await restored.next_batch()
        assert [group.task.id for group in batch.groups] == ["4", "5", "6"]
        assert batch.rewards.tolist() == expected.rewards.tolist()

    asyncio.run(main())


def test_engines_are_listed_when_they_change_and_not_for_every_episode() -> None:
    async def main() -> None:
        class Listed(StagedGenerator):
            listed = 0

            def engines(self) -> dict[int, int]:
                self.listed += 1
                return super().engines()

        generator = Listed()
        executor = rollouts(generator=generator)
        for version in range(3):
            generator.version = version
            await executor.next_batch()
        assert generator.listed == 1
        for listener in generator.listeners:
            listener()
        assert generator.listed == 2

    asyncio.run(main())


def test_a_later_turn_is_shown_the_exact_tokens_of_the_earlier_ones() -> None:
    generator = StagedGenerator()
    executor = rollouts(generator=generator, environment=StagedEnvironment(TwoTurns))
    task = CountingSource().draw()
    episode = asyncio.run(executor.episode(task, Sampling(max_tokens=4, seed=8)))
    first, second = episode.turns
    assert second.prompt_ids.tolist() == [*first.context, *map(ord, "again")]
    assert episode.reward == 0.75
    assert len(episode.segments) == 1


def test_a_truncated_answer_ends_the_episode_and_its_session() -> None:
    environment = StagedEnvironment(TwoTurns)
    executor = rollouts(generator=StagedGenerator(truncated=True), environment=environment)
    episode = asyncio.run(executor.episode(CountingSource().draw(), Sampling(max_tokens=4, seed=8)))
    assert episode.outcome is Outcome.TRUNCATED
    assert len(episode.turns) == 1
    assert environment.closed == 1


def test_batches_with_equal_rewards_are_drawn_again_and_the_bound_is_said() -> None:
    source = CountingSource()
    executor = rollouts(mixture=Mixture({"counting": source}), reward=StagedReward(lambda task, text: 0.5))
    with pytest.raises(TaskError, match=r"counting gave 64 groups in a row that could not be used.*were 0\.5"):
        asyncio.run(executor.next_batch())
    assert source.drawn == 3 + 64


def test_a_group_with_equal_rewards_is_replaced_where_that_is_asked_for() -> None:
    def even_tasks_teach(task: Task, text: str) -> float:
        return float(int(text) % 7) if int(task.id) % 2 == 0 else 1.0

    schedule = ScheduleConfig(max_lag=0, replace_uniform=True)
    executor = rollouts(reward=StagedReward(even_tasks_teach), schedule=schedule)
    batch = asyncio.run(executor.next_batch())
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    assert executor.metrics()["groups/replaced_uniform"] == 3


def test_a_judge_that_fails_once_costs_only_another_attempt() -> None:
    failed: set[str] = set()
    warnings: list[str] = []

    def fail_once(task: Task, text: str) -> float:
        if task.id not in failed:
            failed.add(task.id)
            raise ServiceError("ValueError: no", service="reward", replica=0, call="score")
        return float(int(text) % 7)

    executor = rollouts(reward=StagedReward(fail_once), warn=warnings.append)
    batch = asyncio.run(executor.next_batch())
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert {episode.outcome for episode in batch.episodes} == {Outcome.COMPLETED}
    found = executor.metrics()
    assert (found["outcomes/judge_error"], found["outcomes/completed"]) == (3, 12)
    assert len(warnings) == 3
    assert "judge_error: reward replica 0, call score: ValueError: no" in warnings[0]


def test_what_fails_again_and_again_is_replaced_and_a_source_that_only_fails_is_named() -> None:
    def fail_odd(task: Task, text: str) -> float:
        if int(task.id) % 2:
            raise DeadlineError("no answer within 1 s", service="reward", replica=0)
        return float(int(text) % 7)

    executor = rollouts(reward=StagedReward(fail_odd))
    batch = asyncio.run(executor.next_batch())
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    found = executor.metrics()
    assert found["groups/replaced_failed"] == 3
    assert found["outcomes/infrastructure_error"] >= 9

    def fail(task: Task, text: str) -> float:
        raise ServiceError("ValueError: no", service="reward", replica=0)

    executor = rollouts(reward=StagedReward(fail), schedule=ScheduleConfig(max_lag=0, most_replaced=5))
    with pytest.raises(TaskError, match=r"counting gave 5 groups in a row.*judge_error: reward replica 0: ValueError"):
        asyncio.run(executor.next_batch())


def test_an_environment_that_raises_and_a_model_that_breaks_its_protocol_are_told_apart() -> None:
    class Picky(SingleTurn):
        async def step(self, answer: str) -> Step:
            if int(self._task.id) == 1:
                raise ServiceError("KeyError: 'x'", service="environment", replica=0)
            return Step(done=True, reward=float(int(answer) % 5), model_error=int(answer) % 2 == 0)

    executor = rollouts(environment=StagedEnvironment(Picky))
    batch = asyncio.run(executor.next_batch())
    assert "1" not in [group.task.id for group in batch.groups]
    broken = [episode for episode in batch.episodes if episode.outcome is Outcome.MODEL_ERROR]
    assert broken
    assert all(int(episode.text) % 2 == 0 for episode in broken)
    assert executor.metrics()["outcomes/environment_error"] >= 3


def test_evaluation_is_greedy_and_keeps_the_order() -> None:
    generator = StagedGenerator()
    source = CountingSource()
    tasks = [source.draw() for _ in range(5)]
    executor = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(task.id)))
    episodes = asyncio.run(executor.evaluate(tasks))
    assert [episode.reward for episode in episodes] == [1, 2, 3, 4, 5]
    assert {sampling.temperature for _, sampling in generator.seen} == {0}
