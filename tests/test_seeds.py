"""Seeds, and that whole rollouts hand each request its own; `engine_draws` does it on an engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import get_args

import numpy as np

from forge_rl.data.mixture import Mixture
from forge_rl.errors import ReplicaError
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.system.seeds import Purpose, derive_seed
from forge_rl.types import Sampling, Task
from tests.staged_rollouts import CountingSource, StagedEnvironment, StagedGenerator, TwoTurns, rollouts


def test_seeds_of_draws_are_independent_and_stable_over_versions() -> None:
    assert derive_seed(0, "episode", (3, 1, 0), "gsm8k", "17", 2, 1) == 8261618893343915313
    keys = [(seed, purpose, place) for seed in (-1, 0, 1) for purpose in get_args(Purpose) for place in range(300)]
    seeds = np.array([derive_seed(*key) for key in keys])
    assert len(np.unique(seeds % 2**32)) >= len(keys) - 1, "torch uses the lower half on CPU"
    for bit in range(63):
        assert abs((seeds >> bit & 1).mean() - 0.5) < 5 * 0.5 / len(keys) ** 0.5, f"bit {bit} is biased"
    assert 0 <= seeds.min() <= seeds.max() < 2**63


def test_what_a_seed_is_derived_from_cannot_be_read_in_two_ways() -> None:
    places = [("1", "23"), ("12", "3"), ("1, 23",), ("1', '23",), (1, 23), ((1, 23),), ((1,), 23), (123,), ("123",), ()]
    places += [("task",), ("task", 0), ("task\0",), ("\udc80",), ("task", "")]
    assert len({derive_seed(0, "evaluation", *place) for place in places}) == len(places)
    assert derive_seed(0, "episode") != derive_seed(0, "evaluation")


class SameTwoTasks(CountingSource):
    """Two tasks, epoch after epoch."""

    def draw(self) -> Task:
        super().draw()
        number = str(self.drawn % 2)
        return Task(id=number, source=self.name, messages=({"role": "user", "content": number},))


def rollouts_of(generator: StagedGenerator, environment: type = TwoTurns, seed: int = 0) -> RolloutExecutor:
    return rollouts(
        generator=generator,
        environment=StagedEnvironment(environment),
        mixture=Mixture({"counting": SameTwoTasks()}),
        groups=2,
        seed=seed,
    )


def seeds_of(generator: StagedGenerator) -> list[int]:
    return [sampling.seed or 0 for _, sampling in generator.seen]


def test_all_kinds_of_draws_have_seeds_of_their_own() -> None:
    failed: set[str] = set()

    class FailsOnce(TwoTurns):
        async def step(self, answer: str, *, truncated: bool = False) -> object:  # type: ignore[override]
            if self.turns == 1 and self.task.id not in failed:
                failed.add(self.task.id)
                raise ReplicaError("gone", service="environment", replica=0)
            return await super().step(answer, truncated=truncated)

    async def run(seed: int) -> list[int]:
        generator, tasks = StagedGenerator(), [SameTwoTasks().draw()]
        executor = rollouts_of(generator, FailsOnce, seed)
        evaluation = Evaluation({"one": tasks}, episodes=2, sampling=Sampling(max_tokens=4), version=0)
        executor.start_evaluation(evaluation)
        for _ in range(3):
            await executor.next_batch()
        await executor.finish_evaluation()
        return seeds_of(generator)

    seeds = asyncio.run(run(0)) + asyncio.run(run(1))
    batches, retried, evaluated = 3 * 2 * 4 * 2, 2 * 2, 2 * 2
    assert len(seeds) == 2 * (batches + evaluated) + retried
    assert [seed for seed, count in Counter(seeds).items() if count > 1] == []


async def test_a_resumed_run_draws_what_it_would_have_drawn() -> None:
    undisturbed = StagedGenerator()
    executor = rollouts_of(undisturbed)
    await executor.next_batch()
    state, before = executor.state(), len(undisturbed.seen)
    for _ in range(2):
        await executor.next_batch()

    resumed = StagedGenerator()
    executor = rollouts_of(resumed)
    await executor.restore(state)
    for _ in range(2):
        await executor.next_batch()
    assert Counter(seeds_of(resumed)) == Counter(seeds_of(undisturbed)[before:])
