"""One attempt at a task: as many turns as its world wants, then the score."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import DeadlineError, ReplicaError
from forge_rl.types import Episode, Outcome, Task, Turn

Decode: TypeAlias = Callable[[tuple[int, ...]], Awaitable[Turn]]
"""Decodes the answer to a prompt."""


class EnvSession(Protocol):
    """What an attempt needs of an environment's world."""

    async def step(self, answer: str) -> Step: ...

    async def close(self) -> None: ...

    def abandon(self) -> None: ...


class EnvService(Protocol):
    """What attempts need of the Environment."""

    async def open(self, task: Task) -> tuple[EnvSession, Observation]: ...


class Scorer(Protocol):
    """What attempts need of the Reward."""

    async def score(self, task: Task, text: str) -> float: ...


class EpisodeRunner:
    """Attempts at tasks, each in a world of its own.

    Args:
        tokenizer: of the policy.
        environment: makes the worlds.
        reward: scores those whose world does not.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        environment: EnvService,
        reward: Scorer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._environment = environment
        self._reward = reward
        self._clock = clock

    async def __call__(self, task: Task, decode: Decode) -> Episode:
        """One attempt. What a service fails at is an outcome; what `decode` raises is raised, but for dead engines."""
        began = self._clock()
        turns: list[Turn] = []

        def ended(outcome: Outcome, reward: float = 0.0, problem: str = "") -> Episode:
            return Episode(
                task=task,
                turns=tuple(turns),
                reward=reward,
                outcome=outcome,
                problem=problem,
                seconds=self._clock() - began,
            )

        outcome = Outcome.COMPLETED
        try:
            world, observation = await self._environment.open(task)
            prompt_ids = self._tokenizer.render(observation.messages)
        except Exception as error:
            return ended(_outcome_of(error, Outcome.ENVIRONMENT_ERROR), problem=str(error))
        while True:
            try:
                turn = await decode(prompt_ids)
            except (ReplicaError, DeadlineError) as error:
                world.abandon()
                return ended(Outcome.INFRASTRUCTURE_ERROR, problem=str(error))
            except BaseException:
                world.abandon()
                raise
            turns.append(turn)
            try:
                step = await world.step(turn.text)
                if not step.done and turn.truncated:
                    await world.close()
            except Exception as error:
                return ended(_outcome_of(error, Outcome.ENVIRONMENT_ERROR), problem=str(error))
            if turn.truncated:
                outcome = Outcome.TRUNCATED
            if step.model_error:
                outcome = Outcome.MODEL_ERROR
            if step.done or turn.truncated:
                break
            prompt_ids = self._tokenizer.extend(turn.prompt_ids + turn.token_ids, step.messages)
        reward = step.reward
        if reward is None:
            try:
                reward = await self._reward.score(task, turn.text)
            except Exception as error:
                return ended(_outcome_of(error, Outcome.JUDGE_ERROR), problem=str(error))
        return ended(outcome, reward)


def _outcome_of(error: Exception, own: Outcome) -> Outcome:
    """What an error of a service makes of an episode."""
    return Outcome.INFRASTRUCTURE_ERROR if isinstance(error, ReplicaError | DeadlineError) else own
