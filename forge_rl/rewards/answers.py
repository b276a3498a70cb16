"""Rewards that compare an answer with the true one (exactly, by words, as a number) or with those of its group."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.extract import Extract, extract, last_number, true_answers
from forge_rl.rewards.protocol import TextReward
from forge_rl.types import Episode, Score, Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[-.](?!\d)|[^\w\s.-]|_")  # except a number's sign and point


@dataclass(frozen=True, kw_only=True)
class Exact(TextReward):
    """Scores 1.0 for exactly the true answer, except for surrounding space.

    Exact(extract="tagged")(task, "<answer>5</answer>")  # Score(total=1.0, answer="5")
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of true answers."""
    extract: Extract = "auto"
    """Method of extracting the answer from the completion."""

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer."""
        right = true_answers(task, self.key, "exact")
        answer = extract(self.extract, text)
        return Score(total=float(answer in right), answer=answer or "")


@dataclass(frozen=True, kw_only=True)
class Match(TextReward):
    """Scores 1.0 for the true answer, ignoring case, articles, punctuation and spaces, as SQuAD's exact match does
    (arXiv 1606.05250, section 6.1).

    Match()(task, "The Eiffel Tower!")  # 1.0 if the answer is "Eiffel tower"
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of true answers."""
    extract: Extract = "auto"
    """Method of extracting the answer from the completion."""
    partial: bool = False
    """Score by SQuAD's F1 over the words shared by answer and truth, instead of 1.0 or 0.0."""

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer."""
        right = true_answers(task, self.key, "match")
        answer = normalised(extract(self.extract, text, right[0]) or "")
        if self.partial:
            return Score(total=max(_f1(answer, normalised(each)) for each in right), answer=answer)
        return Score(total=float(answer in map(normalised, right)), answer=answer)


@dataclass(frozen=True, kw_only=True)
class Number(TextReward):
    """Scores 1.0 if the last number of the answer is the true one, within a tolerance.

    Number(tolerance=0.01)(task, "about 3.14")  # 1.0 if the answer is "3.1416"
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true number, or a list of true numbers."""
    extract: Extract = "auto"
    """Method of extracting the answer from the completion."""
    tolerance: float = 1e-6
    """Maximum difference that counts as equal: relative to the true number, but absolute below 1."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward number:", least={"tolerance": 0})

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task whose true answer has no number."""
        right = [last_number(each) for each in true_answers(task, self.key, "number")]
        if None in right:
            raise TaskError(
                f"--reward number: the true answer of task {task.id!r} has no number: {task.truth[self.key]!r:.80}",
                hint="use --reward match or --reward math instead",
            )
        answer = last_number(extract(self.extract, text, right[0]) or "")
        if answer is None:
            return Score(total=0.0)
        value, truths = float(answer), [float(each) for each in right if each is not None]
        near = (math.isclose(value, t, rel_tol=self.tolerance, abs_tol=min(self.tolerance, 1.0)) for t in truths)
        return Score(total=float(any(near)), answer=f"{value:.15g}")


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Scores an episode by the share of its group's other episodes with a different answer; 1.0 if it is alone.

    Add it with a small weight to a reward for correctness: --reward math=1 diversity=0.1
    """

    extract: Extract = "auto"
    """Method of extracting the answers from the completions; they are compared as in `match`."""

    def __call__(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """Return a score from 0 to 1 for each episode."""
        answers = [normalised(extract(self.extract, each.text) or "") for each in episodes]
        counts, others = collections.Counter(answers), max(1, len(answers) - 1)
        return [Score(total=1 - (counts[answer] - 1) / others, answer=answer) for answer in answers]


def normalised(text: str) -> str:
    """Lowercase and remove punctuation, articles and extra spaces, in SQuAD's order; numbers keep sign and point."""
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split())


def _f1(answer: str, truth: str) -> float:
    ours, theirs = answer.split(), truth.split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (collections.Counter(ours) & collections.Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))
