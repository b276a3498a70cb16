"""One attempt at a task: as many turns as its environment asks for, then the score."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import DeadlineError, ReplicaError
from forge_rl.types import Episode, Outcome, Task, Turn

Decode: TypeAlias = Callable[[tuple[int, ...]], Awaitable[Turn]]
"""Decodes the completion of a prompt."""


class EnvSession(Protocol):
    """The environment of one episode."""

    async def step(self, answer: str) -> Step: ...

    async def close(self) -> None: ...

    def abandon(self) -> None: ...


class EnvService(Protocol):
    """The part of the Environment service that episodes use."""

    async def open(self, task: Task) -> tuple[EnvSession, Observation]: ...


class Scorer(Protocol):
    """The part of the Reward service that episodes use."""

    async def score(self, task: Task, text: str) -> float: ...


class EpisodeRunner:
    """Runs episodes, each in an environment session of its own.

        runner = EpisodeRunner(tokenizer, environment, reward)
        episode = await runner(task, client)

    Args:
        tokenizer: of the policy.
        environment: opens the sessions.
        reward: scores the episodes that their environment does not.
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
        """Run one episode. A service's failure is an outcome; errors of `decode` are raised, but for dead engines."""
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

        def failed(error: Exception, own: Outcome) -> Episode:
            infrastructure = isinstance(error, ReplicaError | DeadlineError)
            return ended(Outcome.INFRASTRUCTURE_ERROR if infrastructure else own, problem=str(error))

        outcome = Outcome.COMPLETED
        try:
            session, observation = await self._environment.open(task)
            prompt_ids = self._tokenizer.render(observation.messages)
        except Exception as error:
            return failed(error, Outcome.ENVIRONMENT_ERROR)
        while True:
            try:
                turn = await decode(prompt_ids)
            except BaseException as error:
                session.abandon()
                if isinstance(error, ReplicaError | DeadlineError):
                    return failed(error, Outcome.INFRASTRUCTURE_ERROR)
                raise
            turns.append(turn)
            try:
                step = await session.step(turn.text)
                if not step.done and turn.truncated:
                    await session.close()
            except Exception as error:
                return failed(error, Outcome.ENVIRONMENT_ERROR)
            if turn.truncated:
                outcome = Outcome.TRUNCATED
            if step.model_error:
                outcome = Outcome.MODEL_ERROR
            if step.done or turn.truncated:
                break
            prompt_ids = self._tokenizer.extend(turn.prompt_ids + turn.token_ids, step.messages)
        if step.reward is not None:
            return ended(outcome, step.reward)
        try:
            return ended(outcome, await self._reward.score(task, turn.text))
        except Exception as error:
            return failed(error, Outcome.JUDGE_ERROR)
