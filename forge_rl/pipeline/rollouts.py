"""Rollouts: from tasks to scored groups. Environments and rewards overlap decoding; an episode is scored as it ends."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forge_rl.data.mixture import Mixture
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import TaskError
from forge_rl.runtime.tasks import task_group
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import Reward
from forge_rl.types import Batch, Episode, Group, Outcome, Sampling, Task, Turn

_MOST_UNIFORM_BATCHES = 8
"""After as many batches in a row with nothing to learn from, the run stops."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a batch is."""

    groups: int
    """P."""
    episodes: int
    """G."""


class Rollouts:
    """Makes batches.

    Args:
        mixture: where tasks come from.
        shape: of a batch.
        tokenizer: of the policy.
        generator: decodes.
        environment: makes each episode's world.
        reward: scores episodes whose world does not.
        seed: of the sampling; the same seed gives the same batches.
        version: of the trainer's weights, as of now.
        warn: takes a line for the user.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        mixture: Mixture,
        shape: Shape,
        tokenizer: Tokenizer,
        generator: Generator,
        environment: Environment,
        reward: Reward,
        seed: int,
        version: Callable[[], int],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mixture = mixture
        self._shape = shape
        self._tokenizer = tokenizer
        self._generator = generator
        self._environment = environment
        self._reward = reward
        self._seed = seed
        self._version = version
        self._warn = warn
        self._clock = clock
        self._batches = 0

    async def next_batch(self) -> Batch:
        """A batch of P groups in the mixture's proportions, in which rewards differ within at least one group.

        Raises:
            TaskError: many batches in a row had equal rewards in every group, so that there is nothing to learn.
        """
        for attempt in range(1, _MOST_UNIFORM_BATCHES + 1):
            batch = await self._batch()
            if not all(group.is_uniform for group in batch.groups):
                return batch
            seen = Counter(round(group.rewards[0], 3) for group in batch.groups)
            rewards = ", ".join(f"{reward:g} in {count}" for reward, count in seen.most_common(3))
            self._warn(
                f"all {len(batch.groups)} groups had equal rewards ({rewards}): batch {attempt} of at most "
                f"{_MOST_UNIFORM_BATCHES} in a row is drawn again"
            )
        sources = ", ".join(self._mixture)
        raise TaskError(
            f"{_MOST_UNIFORM_BATCHES} batches in a row had equal rewards within every group; the last: {rewards}",
            mend=f"the tasks ({sources}) are too easy or too hard for this model, or the answer is not recognised: "
            "look at episodes.jsonl, choose other --tasks, or raise --group-size",
        )

    async def _batch(self) -> Batch:
        tasks = self._mixture.draw(self._shape.groups)
        self._batches += 1
        sampling = self._generator.sampling
        groups: list[list[asyncio.Task[Episode]]] = []
        async with task_group() as running:
            for place, task in enumerate(tasks):
                seeds = [self._seed_of(place, index) for index in range(self._shape.episodes)]
                groups.append([running.create_task(self.episode(task, replace(sampling, seed=seed))) for seed in seeds])
        return Batch(
            groups=tuple(
                Group(task=task, episodes=tuple(episode.result() for episode in episodes))
                for task, episodes in zip(tasks, groups, strict=True)
            ),
            version=self._version(),
        )

    async def evaluate(self, tasks: Sequence[Task]) -> list[Episode]:
        """One greedy episode of each task, in order."""
        greedy = Sampling(max_tokens=self._generator.sampling.max_tokens, temperature=0)
        async with task_group() as running:
            episodes = [running.create_task(self.episode(task, greedy)) for task in tasks]
        return [episode.result() for episode in episodes]

    async def episode(self, task: Task, sampling: Sampling) -> Episode:
        """One attempt at a task: as many turns as its world wants, then the score."""
        began = self._clock()
        world, observation = await self._environment.open(task)
        prompt_ids = self._tokenizer.render(observation.messages)
        turns: list[Turn] = []
        while True:
            turn = await self._generator.generate(prompt_ids, sampling)
            turns.append(turn)
            step = await world.step(turn.text)
            if step.done:
                break
            if turn.truncated:
                await world.close()
                break
            prompt_ids = self._tokenizer.extend(turn.prompt_ids + turn.token_ids, step.messages)
        reward = step.reward if step.reward is not None else await self._reward.score(task, turn.text)
        return Episode(
            task=task,
            turns=tuple(turns),
            reward=reward,
            outcome=Outcome.TRUNCATED if turn.truncated else Outcome.COMPLETED,
            seconds=self._clock() - began,
        )

    def state(self) -> dict[str, object]:
        """Where the mixture and the sampling stand, as JSON."""
        return {"mixture": self._mixture.state(), "batches": self._batches}

    def restore(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        mixture, batches = state.get("mixture"), state.get("batches")
        if not isinstance(mixture, dict) or not isinstance(batches, int):
            raise TaskError(f"the saved state of the rollouts holds {sorted(state)}", mend="start a new run")
        self._mixture.restore(mixture)
        self._batches = batches

    def _seed_of(self, group: int, episode: int) -> int:
        return zlib.crc32(f"{self._seed}/{self._batches}/{group}/{episode}".encode())
