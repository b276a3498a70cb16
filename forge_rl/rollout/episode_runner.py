"""Runs one attempt at a task: turns until its environment is done, then the score."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_rl.errors import ContextError, DeadlineError, InfrastructureError, ReplicaError, SpendingError
from forge_rl.rewards.scorer import scored
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Message, Outcome, Score, Task, ToolCall, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forge_rl.envs.protocol import Parsed, Step
    from forge_rl.services.environment import Environment, EnvSession, LocalSession
    from forge_rl.services.reward import Reward

Tools = Sequence["Mapping[str, object]"]
Parse = Callable[[Turn, Tools], Awaitable["Parsed"]]
"""Parses a turn into content and calls of these tools."""


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes, each in an environment session of its own.

    runner = EpisodeRunner(tokenizer, environment, reward, parse)
    episode = await runner(task, client)
    """

    tokenizer: Tokenizer
    environment: Environment
    reward: Reward
    """Scores episodes that their environment does not score. A reward that needs the whole group is called later."""
    parse: Parse | None = None
    """Parses tool calls from turns if the task has tools."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    async def __call__(self, task: Task, decode: Callable[[TokenIds], Awaitable[Turn]]) -> Episode:
        """Run one episode. Failures of services become outcomes; errors of `decode`, except dead engines, are raised.

        Raises:
            PoisonError: the task killed several engines, one after another.
            ContextError: the task's prompt leaves no room for an answer. In later turns, the episode is truncated.
            SpendingError: a judge's spending limit is reached.
        """
        began, began_at = self.clock(), self.wall_clock()
        turns: list[Turn] = []
        given: list[tuple[float | None, Mapping[str, float]]] = []  # per step: reward and its parts
        session: EnvSession | LocalSession | None = None
        # Outcome if the current operation fails; None if an error would be a bug, to be raised.
        on_error: Outcome | None = Outcome.ENVIRONMENT_ERROR
        try:
            session, observation = await self.environment.open(task)
            tools = observation.tools or task.tools
            shown: tuple[Message, ...] = tuple(observation.messages)
            prompt_ids: TokenIds = self.tokenizer.render(shown, tools=tools)
            del observation  # tools may be large, and there are thousands of episodes
            full = False
            while True:
                on_error, parsed, asked_s = None, None, self.clock()
                try:
                    turns.append(await decode(prompt_ids))
                    seconds = self.clock() - asked_s
                    turns[-1] = Turn.of_arrays(**vars(turns[-1]) | {"messages": shown, "seconds": seconds})
                    if tools and self.parse is not None:
                        parsed = await self.parse(turns[-1], tools)
                except ContextError:
                    full = bool(turns)
                    if not full:
                        raise
                on_error = Outcome.ENVIRONMENT_ERROR
                truncated, asked_s = full or turns[-1].truncated, self.clock()
                step = await session.step("" if full else turns[-1].text, truncated=truncated, parsed=parsed)
                if not full:
                    done = {"response_s": self.clock() - asked_s, "calls": step.calls or (parsed[1] if parsed else ())}
                    turns[-1] = Turn.of_arrays(**vars(turns[-1]) | done)
                given.append((step.reward, step.parts))
                if full and not step.done:
                    await session.close()
                if full or step.done:
                    break
                prompt_ids = self._next_prompt(turns[-1], step, tools, parsed[1] if parsed else ())
                shown = step.messages if step.history is None else step.history
                del step
        except BaseException as error:
            if session is not None:
                session.abandon()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, DeadlineError | ReplicaError | InfrastructureError):
                on_error = Outcome.INFRASTRUCTURE_ERROR
            if on_error is None or isinstance(error, SpendingError):
                raise
            episode = Episode(task=task, turns=tuple(turns), outcome=on_error, problem=str(error))
        else:
            outcome = Outcome.TRUNCATED if truncated else Outcome.COMPLETED
            if step.model_error:
                outcome = Outcome.MODEL_ERROR
            episode = Episode(task=task, turns=tuple(turns), output=step.output, outcome=outcome)
            episode = await scored(episode, self.reward, _own_score(given, len(turns)))
        return episode.updated(seconds=self.clock() - began, began=began_at)

    def _next_prompt(self, turn: Turn, step: Step, tools: Tools, calls: Sequence[ToolCall]) -> TokenIds:
        """Return the next prompt: everything so far plus the new messages, or a new history."""
        if step.history is not None:
            return self.tokenizer.render(step.history, tools=tools)
        shown: list[Message] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": {}}} for call in calls
        ]
        return self.tokenizer.extend(turn.context, step.messages, tools=tools, calls=shown)


def _own_score(given: Sequence[tuple[float | None, Mapping[str, float]]], turns: int) -> Score | None:
    """Return the environment's score, the sum of its steps' rewards; None if it gave none.

    If a step before the last has a reward, the score also has the reward of each turn.
    """
    if all(reward is None for reward, _ in given):
        return None
    rewards = [reward or 0.0 for reward, _ in given]
    parts: dict[str, float] = {}
    for _, values in given:
        for name, value in values.items():
            parts[name] = parts.get(name, 0.0) + value
    by_turn = rewards[:turns]
    by_turn[-1] += sum(rewards[turns:])  # of a last step without a turn, after the context was full
    several = any(reward is not None for reward, _ in given[:-1])
    return Score(total=sum(rewards), parts=parts, turns=by_turn if several else (), turns_in_total=several)
