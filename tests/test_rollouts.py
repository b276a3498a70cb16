"""Rollouts over staged services: batches, turns, seeds, outcomes, and the bound on groups that teach nothing."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from forge_rl.data.mixture import Mixture
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import DeadlineError, ReplicaError, ServiceError, TaskError
from forge_rl.pipeline.plans import ScheduleConfig
from forge_rl.pipeline.rollouts import Rollouts, Shape
from forge_rl.types import Message, Outcome, Sampling, Task, Turn


class CountingSource:
    """Tasks 0, 1, 2, …"""

    name = "counting"

    def __init__(self) -> None:
        self.drawn = 0

    def draw(self) -> Task:
        self.drawn += 1
        return Task(id=str(self.drawn), source=self.name, messages=({"role": "user", "content": str(self.drawn)},))

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        return ()

    def state(self) -> dict[str, object]:
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, object]) -> None:
        self.drawn = int(str(state["drawn"]))


class Letters:
    """A tokenizer of one token a letter."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message["content"])

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        return (*ids, *self.render(messages))


class StagedGenerator:
    """Answers with its seed, so that every episode differs."""

    sampling = Sampling(max_tokens=4)

    version = 0

    def __init__(self, *, truncated: bool = False) -> None:
        self.seen: list[tuple[tuple[int, ...], Sampling]] = []
        self.truncated = truncated

    def engines(self) -> dict[int, int]:
        return {0: 8, 1: 8}

    async def pause(self) -> None:
        """Nothing is in flight."""

    async def resume(self) -> None:
        """Nothing is in flight."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, engine: int) -> Turn:
        self.seen.append((tuple(prompt_ids), sampling))
        text = str(sampling.seed)
        ids = tuple(ord(letter) for letter in text)
        return Turn(
            prompt_ids=tuple(prompt_ids),
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(0,) * len(ids),
            text=text,
            truncated=self.truncated,
        )


class TwoTurns:
    """Asks twice, and rewards by itself."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.turns = 0

    async def reset(self) -> Observation:
        return Observation(messages=self.task.messages)

    async def step(self, answer: str) -> Step:
        self.turns += 1
        if self.turns == 1:
            return Step(messages=({"role": "user", "content": "again"},), done=False)
        return Step(done=True, reward=0.75)


class StagedEnvironment:
    def __init__(self, factory: type) -> None:
        self.factory = factory
        self.closed = 0

    async def open(self, task: Task) -> tuple[object, Observation]:
        env = self.factory(task)
        owner = self

        class World:
            async def step(self, answer: str) -> Step:
                step: Step = await env.step(answer)
                return step

            async def close(self) -> None:
                owner.closed += 1

        return World(), await env.reset()


class StagedReward:
    def __init__(self, score: object) -> None:
        self.score_of = score

    async def score(self, task: Task, text: str) -> float:
        return self.score_of(task, text)  # type: ignore[operator, no-any-return]


def rollouts(**changes: object) -> Rollouts:
    parts: dict[str, object] = {
        "mixture": Mixture({"counting": CountingSource()}),
        "shape": Shape(groups=3, episodes=4),
        "schedule": ScheduleConfig(max_lag=0),
        "tokenizer": Letters(),
        "generator": StagedGenerator(),
        "environment": StagedEnvironment(SingleTurn),
        "reward": StagedReward(lambda task, text: float(len(text) % 2 + int(text) % 7)),
        "seed": 0,
        "version": lambda: 5,
        "warn": lambda text: None,
    }
    return Rollouts(**(parts | changes))  # type: ignore[arg-type]


def test_a_batch_has_p_groups_of_g_episodes_of_one_task_each() -> None:
    batch = asyncio.run(rollouts().next_batch())
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert [len(group.episodes) for group in batch.groups] == [4, 4, 4]
    assert batch.version == 5
    assert batch.rewards.shape == (3, 4)


def test_the_seed_decides_the_batches_and_no_two_episodes_share_one() -> None:
    async def two_batches(seed: int) -> list[str]:
        generator = StagedGenerator()
        made = rollouts(seed=seed, generator=generator)
        found = []
        for generator.version in range(2):
            found += [episode.text for episode in (await made.next_batch()).episodes]
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
        restored.restore(state)
        batch = await restored.next_batch()
        assert [group.task.id for group in batch.groups] == ["4", "5", "6"]
        assert batch.rewards.tolist() == expected.rewards.tolist()

    asyncio.run(main())


def test_a_later_turn_is_shown_the_exact_tokens_of_the_earlier_ones() -> None:
    generator = StagedGenerator()
    made = rollouts(generator=generator, environment=StagedEnvironment(TwoTurns))
    task = CountingSource().draw()
    episode = asyncio.run(made.episode(task, Sampling(max_tokens=4, seed=8)))
    first, second = episode.turns
    assert second.prompt_ids == first.prompt_ids + first.token_ids + tuple(map(ord, "again"))
    assert episode.reward == 0.75
    assert len(episode.segments) == 1


def test_a_truncated_answer_ends_the_episode_and_its_world() -> None:
    environment = StagedEnvironment(TwoTurns)
    made = rollouts(generator=StagedGenerator(truncated=True), environment=environment)
    episode = asyncio.run(made.episode(CountingSource().draw(), Sampling(max_tokens=4, seed=8)))
    assert episode.outcome is Outcome.TRUNCATED
    assert len(episode.turns) == 1
    assert environment.closed == 1


def test_batches_with_equal_rewards_are_drawn_again_and_the_bound_is_said() -> None:
    source = CountingSource()
    made = rollouts(mixture=Mixture({"counting": source}), reward=StagedReward(lambda task, text: 0.5))
    with pytest.raises(TaskError, match=r"counting gave 64 groups in a row that could not be used.*were 0\.5"):
        asyncio.run(made.next_batch())
    assert source.drawn == 3 + 64


def test_a_group_with_equal_rewards_is_replaced_where_that_is_asked_for() -> None:
    def even_tasks_teach(task: Task, text: str) -> float:
        return float(int(text) % 7) if int(task.id) % 2 == 0 else 1.0

    schedule = ScheduleConfig(max_lag=0, replace_uniform=True)
    made = rollouts(reward=StagedReward(even_tasks_teach), schedule=schedule)
    batch = asyncio.run(made.next_batch())
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    assert made.metrics()["groups/replaced_uniform"] == 3


def test_a_judge_that_fails_once_costs_nothing_but_another_attempt() -> None:
    failed: set[str] = set()
    warnings: list[str] = []

    def fail_once(task: Task, text: str) -> float:
        if task.id not in failed:
            failed.add(task.id)
            raise ServiceError("ValueError: no", service="reward", replica=0, call="score")
        return float(int(text) % 7)

    made = rollouts(reward=StagedReward(fail_once), warn=warnings.append)
    batch = asyncio.run(made.next_batch())
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert {episode.outcome for episode in batch.episodes} == {Outcome.COMPLETED}
    found = made.metrics()
    assert (found["outcomes/judge_error"], found["outcomes/completed"]) == (3, 12)
    assert len(warnings) == 3
    assert "judge_error: reward replica 0, call score: ValueError: no" in warnings[0]


def test_what_fails_again_and_again_is_replaced_and_a_source_that_only_fails_is_named() -> None:
    def fail_odd(task: Task, text: str) -> float:
        if int(task.id) % 2:
            raise DeadlineError("no answer within 1 s", service="reward", replica=0)
        return float(int(text) % 7)

    made = rollouts(reward=StagedReward(fail_odd))
    batch = asyncio.run(made.next_batch())
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    found = made.metrics()
    assert found["groups/replaced_failed"] == 3
    assert found["outcomes/infrastructure_error"] >= 9

    def fail(task: Task, text: str) -> float:
        raise ServiceError("ValueError: no", service="reward", replica=0)

    made = rollouts(reward=StagedReward(fail), schedule=ScheduleConfig(max_lag=0, most_replaced=5))
    with pytest.raises(TaskError, match=r"counting gave 5 groups in a row.*judge_error: reward replica 0: ValueError"):
        asyncio.run(made.next_batch())


def test_the_death_of_a_process_is_raised_as_itself() -> None:
    def fail(task: Task, text: str) -> float:
        raise ReplicaError("gone", service="reward", replica=0)

    with pytest.raises(ReplicaError, match="reward replica 0: gone"):
        asyncio.run(rollouts(reward=StagedReward(fail)).next_batch())


def test_a_world_that_raises_and_a_model_that_breaks_its_protocol_are_told_apart() -> None:
    class Picky(SingleTurn):
        async def step(self, answer: str) -> Step:
            if int(self._task.id) == 1:
                raise ServiceError("KeyError: 'x'", service="environment", replica=0)
            return Step(done=True, reward=float(int(answer) % 5), model_error=int(answer) % 2 == 0)

    made = rollouts(environment=StagedEnvironment(Picky))
    batch = asyncio.run(made.next_batch())
    assert "1" not in [group.task.id for group in batch.groups]
    broken = [episode for episode in batch.episodes if episode.outcome is Outcome.MODEL_ERROR]
    assert broken
    assert all(int(episode.text) % 2 == 0 for episode in broken)
    assert made.metrics()["outcomes/environment_error"] >= 3


def test_evaluation_is_greedy_and_keeps_the_order() -> None:
    generator = StagedGenerator()
    source = CountingSource()
    tasks = [source.draw() for _ in range(5)]
    made = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(task.id)))
    episodes = asyncio.run(made.evaluate(tasks))
    assert [episode.reward for episode in episodes] == [1, 2, 3, 4, 5]
    assert {sampling.temperature for _, sampling in generator.seen} == {0}
