"""The default reward: compares with the task's answer in the way that suits it."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import dataclass

from forge_rl.rewards.answers import Match, Number
from forge_rl.rewards.extract import is_number
from forge_rl.rewards.maths import Maths
from forge_rl.rewards.truth import true_answers
from forge_rl.rewards.verifiers import REASONING_GYM, ReasoningGymReward
from forge_rl.types import Score, Task

_MATHS = re.compile(r"[\\$^%√π]|[\d)]\s*[/*+=]|=\s*[-\d]|\d[a-z]\b|\b[a-z]\s*=")


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Scores tasks of reasoning-gym by its verifiers, and others by their answer: `number` where that is a number,
    `math` where it looks like mathematics, and `match` otherwise.

    Auto()(task, "so there are 5.")  # Score(total=1.0, answer="5") where task.truth is {"answer": "5"}
    """

    key: str = "answer"
    """Entry of the task's truth that holds the right answer, or a list of right ones."""

    def __call__(self, task: Task, text: str) -> Score | Awaitable[Score]:
        """Raises TaskError for a task without an answer."""
        if task.verifier == REASONING_GYM:
            return ReasoningGymReward()(task, text)
        right = true_answers(task, self.key, "auto")
        if all(map(is_number, right)):
            return Number(key=self.key)(task, text)
        score = Match(key=self.key)(task, text)
        if score.total == 1.0 or not any(map(_MATHS.search, right)):
            return score
        return Maths(key=self.key)(task, text)
