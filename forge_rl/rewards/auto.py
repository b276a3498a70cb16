"""Default reward: compares with the task's answer by the rule of its kind."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from forge_rl.rewards.answers import Match
from forge_rl.rewards.choice import letter_of, settled_letter
from forge_rl.rewards.extract import true_answers
from forge_rl.rewards.kinds import kind_of
from forge_rl.rewards.maths import Maths, number_score
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.verifiers import REASONING_GYM, ReasoningGymReward
from forge_rl.types import Score, Task


@dataclass(frozen=True, kw_only=True)
class Auto(TextReward):
    """Scores reasoning-gym tasks by their verifiers, and others by the true answer, whose kind decides the rule.

        Auto()(task, "so there are 5.")  # Score(total=1.0, answer="5") if task.truth is {"answer": "5"}

    A number must have the same value, in any notation, and no other unit; an expression the same parts and values, as
    in `math`; an option the same letter; any other text the same words, as in `match`. Empty text is not an answer.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of true answers."""

    def __call__(self, task: Task, text: str) -> Score | Awaitable[Score]:
        """Raises TaskError for a task without an answer."""
        if task.verifier == REASONING_GYM:
            return ReasoningGymReward()(task, text)
        truths, text = true_answers(task, self.key, "auto"), self.graded(text)
        kinds = set(map(kind_of, truths))
        if kinds == {"number"}:
            return number_score(task, truths, text, percent_is_unit=True)
        # Alternatives of several kinds, such as ["1/2", "x/2"]: `math` compares the answer with each by its own rule.
        if "expression" in kinds or "number" in kinds:
            return Maths(key=self.key, percent_is_unit=True, thoughts=self.thoughts)(task, text)
        if kinds == {"choice"}:
            # Only an explicit choice counts here, unlike in `choice`: a lone capital letter in prose may be an ordinary
            # word.
            letter = settled_letter(text)
            return Score(total=float(letter in map(letter_of, truths)), answer=letter)
        return Match(key=self.key, thoughts=self.thoughts)(task, text)
