"""Rollouts over staged services: batches, turns, seeds, and the bound on batches that teach nothing."""

import asyncio
from collections.abc import Sequence

import pytest

from forge_rl.data.mixture import Mixture
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ServiceError, TaskError
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

    def __init__(self, *, truncated: bool = False) -> None:
        self.seen: list[tuple[tuple[int, ...], Sampling]] = []
        self.truncated = truncated

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Turn:
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
    def texts(seed: int) -> list[str]:
        made = rollouts(seed=seed)
        return [episode.text for _ in range(2) for episode in asyncio.run(made.next_batch()).episodes]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert len(set(texts(0))) == 24


def test_a_restored_state_goes_on_with_the_same_batches() -> None:
    whole = rollouts()
    asyncio.run(whole.next_batch())
    state = whole.state()
    expected = asyncio.run(whole.next_batch())
    restored = rollouts()
    restored.restore(state)
    assert asyncio.run(restored.next_batch()).rewards.tolist() == expected.rewards.tolist()


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
    warnings: list[str] = []
    made = rollouts(reward=StagedReward(lambda task, text: 0.0), warn=warnings.append)
    with pytest.raises(TaskError, match="8 batches in a row had equal rewards"):
        asyncio.run(made.next_batch())
    assert len(warnings) == 8
    assert "0 in 3" in warnings[0]


def test_an_error_of_one_episode_is_raised_as_itself() -> None:
    def fail(task: Task, text: str) -> float:
        raise ServiceError("gone", service="reward", replica=0)

    with pytest.raises(ServiceError, match="reward replica 0: gone"):
        asyncio.run(rollouts(reward=StagedReward(fail)).next_batch())


def test_evaluation_is_greedy_and_keeps_the_order() -> None:
    generator = StagedGenerator()
    source = CountingSource()
    tasks = [source.draw() for _ in range(5)]
    made = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(task.id)))
    episodes = asyncio.run(made.evaluate(tasks))
    assert [episode.reward for episode in episodes] == [1, 2, 3, 4, 5]
    assert {sampling.temperature for _, sampling in generator.seen} == {0}
