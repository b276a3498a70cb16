"""Reward for multiple choice: the letter that an answer settles on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forge_rl.rewards.extract import boxed, tagged, true_answers
from forge_rl.rewards.protocol import TextReward
from forge_rl.types import Score, Task

_STATED = re.compile(r"(?i:answer(?: is)?:?) ?(?:\*\*)?\(?([A-Z])\b")
_LETTER = re.compile(r"\b([A-Z])\b")
_LONGEST = 200_000


@dataclass(frozen=True, kw_only=True)
class Choice(TextReward):
    """Scores 1.0 if a completion chooses the right letter, as in MMLU-Pro.

        Choice()(task, "So the answer is (C).")  # Score(total=1.0) if task.truth is {"answer": "C"}

    The choice is the last letter after "the answer is" or "Answer:", else the letter in <answer>...</answer> or
    \\boxed{...}, else the last capital letter that stands alone.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the right letter, or a list of right letters."""

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer."""
        right = {answer.strip().upper() for answer in true_answers(task, self.key, "choice")}
        chosen = chosen_letter(text)
        return Score(total=float(chosen in right), answer=chosen)


def chosen_letter(text: str) -> str:
    """Return the letter that a text chooses; "" for none."""
    text = text[-_LONGEST:]
    if stated := _STATED.findall(text):
        return str(stated[-1])
    for inside in (tagged(text), boxed(text)):
        if inside is not None and (found := _LETTER.findall(inside)):
            return str(found[-1])
    found = _LETTER.findall(text)
    return str(found[-1]) if found else ""
