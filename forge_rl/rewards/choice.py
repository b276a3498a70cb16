"""Reward for multiple choice: the letter that an answer settles on."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.extract import marked, true_answers
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.quantities import plain
from forge_rl.types import Score, Task

# The letter itself, as B, (B), [B], B), B., **B**, $B$ or \text{B}.
_FORM = r"(?:\*\*|\\text\{|\$)?[\(\[]?([A-Za-z])[\)\]]?[.):]?(?:\*\*|\}|\$)?[.):]?"
_LETTER_ALONE = re.compile(rf"\s*(?:(?i:option|choice|answer)\s+)?{_FORM}\s*")
# The letter before its option's text, as in "(B) Paris" or "B. Paris".
_WITH_TEXT = re.compile(r"\s*(?:\*\*)?(?:\(([A-Za-z])\)|([A-Za-z])[.):])(?:\*\*)?\s+\S.*", re.DOTALL)
# After "answer", "option" or "choice", a capital letter, or a letter of any case in brackets. What follows must not be
# prose: in "the answer A gives is", A is a name. A negated statement is found too, to be dropped by `_stated`.
_STATED = re.compile(
    r"(?:\b(?i:answer|option|choice)(?:\*\*)?(?:[ ]+(?i:is|should be|must be|would be))?(?:\*\*)?[ ]*:?[ ]*"
    r"(?i:option|choice)?[ ]*(?P<not>(?i:not)[ ]+)?(?:\*\*|\$|\\boxed\{|\\text\{)*[(\[]?)([A-Z])(?![\w'])"
    r"(?! [a-z]+ [a-z])"
    r"|\b(?i:answer|option|choice)(?:[ ]+(?i:is))?:?[ ]*(?P<not2>(?i:not)[ ]+)?[(\[]([A-Za-z])[)\]]"
    r"|\b(?i:option|choice)[ ]+(?:\*\*)?[(\[]?([A-Z])\b"
)
_LETTER = re.compile(r"(?<![\w'.])([A-Z])(?![\w'])(?!\.[A-Z])")
# "I" and "A" as English words, and letters that are ruled out ("not B", "rather than C").
_WORDS = re.compile(r"(?<![\w'])(?:I|A)(?= [a-z])|\b(?i:not|than|except|rather than) \(?[A-Z]\b")
# Characters at the end of a text that are searched: answers come last, and the patterns above stay fast.
_LONGEST = 200_000


@dataclass(frozen=True, kw_only=True)
class Choice(TextReward):
    """Scores 1.0 if a completion chooses the right letter, as in MMLU-Pro.

        Choice()(task, "So the answer is (C).")  # Score(total=1.0) if task.truth is {"answer": "C"}

    The choice is the letter in <answer>...</answer> or \\boxed{...}, else the last letter after "the answer is",
    "Answer:" or "option", else the only capital letter that stands alone in the text or in its last sentence.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the right letter, as B, (B), B) or "B. text", or its index, or a list of
    right ones."""
    first: int = 0
    """Index of the first option, in data sets that give indices."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward choice:", minimum={"first": 0}, maximum={"first": 1})

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task whose true answer is not a letter or an index."""
        true_letters = {self._letter(truth, task) for truth in true_answers(task, self.key, "choice")}
        letter = chosen_letter(self.graded(text))
        return Score(total=float(letter in true_letters), answer=letter)

    def _letter(self, truth: str, task: Task) -> str:
        letter = letter_of(truth) or _letter_before_text(truth)
        if not letter and truth.removesuffix(".0").isdecimal() and len(truth) < 5:
            index = int(truth.removesuffix(".0")) - self.first
            letter = string.ascii_uppercase[index] if 0 <= index < 26 else ""
        if not letter:
            raise TaskError(
                f"--reward choice: the true answer of task {task.id!r} of {task.source!r} is {truth!r:.80}, which is "
                "not an option",
                hint="give a letter, such as B, (B) or B), or an index, with --reward choice:first=1 if the first "
                "option's is 1; for the text of an option, use --reward match",
            )
        return letter


def letter_of(text: str) -> str:
    """Return the option's letter, as a capital, of a text that is nothing else, such as "(b)"; "" for other texts."""
    form = _LETTER_ALONE.fullmatch(plain(text))
    is_whole = form is not None and ("(" not in text or text.count("(") == text.count(")"))
    return form[1].upper() if form is not None and is_whole else ""


def chosen_letter(text: str) -> str:
    """Return the letter that a text chooses; "" for none."""
    text = text[-_LONGEST:]
    if (answer := marked(text)) is not None:
        return letter_of(answer) or _letter_before_text(answer) or _stated(answer) or _only_letter(answer)
    lone_letter = letter_of(text) or _letter_before_text(text.strip().rpartition("\n")[2])
    return _stated(text) or lone_letter or _only_letter(text) or _only_letter(re.split(r"[.!\n]\s", text.strip())[-1])


def settled_letter(text: str) -> str:
    """Return the letter that a text chooses explicitly: marked, stated, or alone; "" for any other text."""
    text = text[-_LONGEST:]
    if (answer := marked(text)) is not None:
        return letter_of(answer) or _letter_before_text(answer) or _stated(answer)
    return _stated(text) or letter_of(text) or _letter_before_text(text) or letter_of(text.strip().rpartition("\n")[2])


def _letter_before_text(text: str) -> str:
    form = _WITH_TEXT.fullmatch(text)
    return (form[1] or form[2]).upper() if form else ""


def _stated(text: str) -> str:
    statements = [match for match in _STATED.finditer(text) if not (match["not"] or match["not2"])]
    return next(letter for letter in statements[-1].group(2, 4, 5) if letter).upper() if statements else ""


def _only_letter(text: str) -> str:
    letters = set(_LETTER.findall(_WORDS.sub("", text)))
    return letters.pop() if len(letters) == 1 else ""
