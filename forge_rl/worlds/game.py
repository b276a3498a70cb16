"""A small text game: the model guesses a number, and each reply is higher or lower."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.task_list import TaskList, split
from forge_rl.errors import TaskError, check_flags
from forge_rl.types import Task

_MOST_TASKS = 1000
_HELD_OUT_SHARE = 0.25
_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True)
class GuessNumber:
    """Makes number-guessing games; comes with its own tasks, up to 1000 numbers of which a quarter is held out.

        python -m recipes.grpo --env game:highest=20,max_turns=6

    A correct guess has reward 1.
    """

    highest: int = 20
    """Highest number to guess."""
    max_turns: int = 6
    """Maximum guesses per game."""
    possible: float = 0.1
    """Reward of a wrong guess that is consistent with the replies so far; credited to the tokens of its turn."""
    scores_itself: ClassVar[bool] = True
    """See `EnvFactory`."""

    def __post_init__(self) -> None:
        limits = {"minimum": {"highest": 2, "max_turns": 1}, "maximum": {"highest": 10 ** (_MOST_DIGITS - 1)}}
        check_flags(self, "--env game: ", **limits)

    def __call__(self, task: Task) -> GuessingGame:
        return GuessingGame(self, task)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return the game's tasks."""
        # A fixed seed, so that all runs play with the same numbers.
        numbers = random.Random(0).sample(range(1, self.highest + 1), min(self.highest, _MOST_TASKS))
        train, held_out = split([*map(self._task, numbers)], _HELD_OUT_SHARE, key=lambda task: task.id)
        return {"game": TaskList("game", train, held_out, seed=seed)}

    def _task(self, number: int) -> Task:
        text = (
            f"I think of a number from 1 to {self.highest}. Guess it in {self.max_turns} turns; I say whether it is "
            "higher or lower. Write only your guess."
        )
        # All games have the same messages; they differ only in the truth.
        return Task(
            id=f"game/{self.highest}/{number}",
            source="game",
            messages=({"role": "user", "content": text},),
            truth={"number": number, "answer": str(number)},
        )


class GuessingGame:
    """One game."""

    def __init__(self, config: GuessNumber, task: Task) -> None:
        self._config, self._task = config, task
        number = task.truth.get("number")
        if not isinstance(number, int):
            raise TaskError(f"the task {task.id!r} has no number to guess", hint="omit --tasks: the game has its own")
        self._number, self._low, self._high, self._turns = number, 1, config.highest, 0

    async def reset(self) -> Observation:
        return Observation(messages=self._task.messages)

    async def step(self, completion: str) -> Step:
        self._turns += 1
        numbers = re.findall(r"\d+", completion)
        # The last number, as a model may reason before it guesses; more digits are too many for any game, and for int.
        # 0 is never possible.
        guess = int(numbers[-1][:_MOST_DIGITS]) if numbers else 0
        if guess == self._number:
            return Step(done=True, reward=1.0, parts={"won": 1.0})
        # The bounds follow from the replies: a guess outside of them ignores what the model was told.
        reward = self._config.possible if self._low <= guess <= self._high else 0.0
        if self._turns == self._config.max_turns:
            return Step(done=True, reward=reward, parts={"won": 0.0})
        if not numbers:
            reply = f"Write a number from 1 to {self._config.highest}."
        elif guess < self._number:
            reply, self._low = "Higher.", max(self._low, guess + 1)
        else:
            reply, self._high = "Lower.", min(self._high, guess - 1)
        return Step(done=False, reward=reward, messages=({"role": "user", "content": reply},))
