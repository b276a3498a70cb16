"""One attempt at a task: as many turns as its environment asks for, then the score."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ContextError, DeadlineError, ReplicaError
from forge_rl.rewards.scorer import score_again
from forge_rl.types import Episode, Outcome, Task, TokenIds, Turn

if TYPE_CHECKING:
    from forge_rl.services.environment import Environment
    from forge_rl.services.reward import Reward


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes, each in an environment session of its own.

    runner = EpisodeRunner(tokenizer, environment, reward)
    episode = await runner(task, client)
    """

    tokenizer: Tokenizer
    environment: Environment
    reward: Reward
    """Scores the episodes that their environment does not."""
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, task: Task, decode: Callable[[TokenIds], Awaitable[Turn]]) -> Episode:
        """Run one episode. A service's failure is an outcome; errors of `decode` are raised, but for dead engines.

        Raises:
            ContextError: the task's prompt leaves no room for an answer. Later on that makes the episode truncated.
        """
        began = self.clock()
        turns: list[Turn] = []
        outcome, reward, problem = Outcome.COMPLETED, 0.0, ""
        # Outcome of an error in what is done now; None where it is a bug, and raised.
        on_error: Outcome | None = Outcome.ENVIRONMENT_ERROR
        try:
            session, observation = await self.environment.open(task)
            prompt_ids: TokenIds = self.tokenizer.render(observation.messages)
            full = False
            while True:
                on_error = None
                try:
                    turns.append(await decode(prompt_ids))
                except BaseException as error:
                    full = isinstance(error, ContextError) and bool(turns)
                    if not full:
                        session.abandon()
                        raise
                on_error = Outcome.ENVIRONMENT_ERROR
                truncated = full or turns[-1].truncated
                step = await session.step("" if full else turns[-1].text, truncated=truncated)
                outcome = Outcome.TRUNCATED if truncated else Outcome.COMPLETED
                if step.model_error:
                    outcome = Outcome.MODEL_ERROR
                if full and not step.done:
                    await session.close()
                if full or step.done:
                    break
                on_error = None
                prompt_ids = self.tokenizer.extend(turns[-1].context, step.messages)
            if step.reward is None:
                on_error = Outcome.JUDGE_ERROR
                reward, problem = await score_again(self.reward, task, turns[-1].text)
            else:
                reward = step.reward
        except Exception as error:
            late = isinstance(error, DeadlineError) and on_error is not Outcome.JUDGE_ERROR
            if late or isinstance(error, ReplicaError):
                on_error = Outcome.INFRASTRUCTURE_ERROR
            if on_error is None:
                raise
            outcome, problem = on_error, str(error)
        seconds = self.clock() - began
        return Episode(task=task, turns=tuple(turns), reward=reward, outcome=outcome, problem=problem, seconds=seconds)
