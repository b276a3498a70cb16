"""Default reward: compares with the task's answer by the method that suits it."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import dataclass

from forge_rl.rewards.answers import Match, Number
from forge_rl.rewards.extract import is_number, true_answers
from forge_rl.rewards.maths import Maths
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.verifiers import REASONING_GYM, ReasoningGymReward
from forge_rl.types import Score, Task

_MATHS = re.compile(r"[\\$^%√π]|[\d)]\s*[/*+=]|=\s*[-\d]|\d[a-z]\b|\b[a-z]\s*=")


@dataclass(frozen=True, kw_only=True)
class Auto(TextReward):
    """Scores reasoning-gym tasks by their verifiers, and others by the true answer: `number` if it is a number, `math`
    if it looks like mathematics, and `match` otherwise.

    Auto()(task, "so there are 5.")  # Score(total=1.0, answer="5") if task.truth is {"answer": "5"}
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of true answers."""

    def __call__(self, task: Task, text: str) -> Score | Awaitable[Score]:
        """Raises TaskError for a task without an answer."""
        if task.verifier == REASONING_GYM:
            return ReasoningGymReward()(task, text)
        right, text = true_answers(task, self.key, "auto"), self.graded(text)
        if all(map(is_number, right)):
            return Number(key=self.key)(task, text)
        score = Match(key=self.key)(task, text)
        if score.total == 1.0 or not any(map(_MATHS.search, right)):
            return score
        return Maths(key=self.key, thoughts=self.thoughts)(task, text)
