"""Rewards that compare an answer with the true answer (exactly, by words, as a number) or with its group's answers."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.extract import (
    Extract,
    answered_number,
    extract,
    marked,
    number_in,
    stated,
    true_answers,
)
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.quantities import canonical, plain, read_quantity
from forge_rl.types import Episode, Score, Task

_ROUNDING = 1e-6
"""Tolerance up to which whole numbers are compared exactly."""
_ARTICLES = re.compile(r"(?<![\w-])(a|an|the) +(?=\S)")
_QUOTES = str.maketrans({
    "\N{LEFT DOUBLE QUOTATION MARK}": '"', "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "\N{LEFT SINGLE QUOTATION MARK}": "'", "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{MINUS SIGN}": "-", "\N{NO-BREAK SPACE}": " ",
})  # fmt: skip
# Commas that group thousands. In brackets, ratios and codes such as a-1,234 a comma may separate items, and stays.
_THOUSANDS = re.compile(r"(?<![\d,.(\[{:/])(?<!\w-)[1-9]\d{0,2}(?:,\d{3})+(?![\d,)\]}:/-])")
# Initials lose their dots: "u.s." equals "us".
_INITIALS = re.compile(r"(?<!\S)(?:[a-z]\.){2,}(?=[,;:!?\"']*(?!\S))")
_AROUND_WORD = re.compile(
    r"(?<!\S)[\"'*_`]+(?=[^\W_])|(?<=[^\W_][^\W_])[.,;:!?\"'*_`]+(?!\S)|(?<=\w)[.,;:\"'*`]+(?!\S)"
)
"""Quotes, emphasis and punctuation between words; inside of a word, and of signs alone, each may matter."""
_OPENING_QUOTE = re.compile(r"(?<!\S)[\"']")
_PRIMES = re.compile(r"(?<=\d)(?:''|[\"'])(?!\S)")
"""Signs of feet and inches, minutes and seconds: quotes behind a number that close nothing."""


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
        truths = true_answers(task, self.key, "exact")
        answer = extract(self.extract, self.graded(text))
        return Score(total=float(answer in truths), answer=answer or "")


@dataclass(frozen=True, kw_only=True)
class Match(TextReward):
    """Scores 1.0 for the true answer, ignoring case, articles, quotes and punctuation between words, much as SQuAD's
    exact match (arXiv 1606.05250, section 6.1), which also ignores signs that carry a meaning.

        Match()(task, "The Eiffel Tower!")  # 1.0 if the answer is "Eiffel tower"

    Signs inside of a word and signs that stand alone count: 1/2 is not 12, and < is not >.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of true answers."""
    extract: Extract = "auto"
    """Method of extracting the answer from the completion."""
    partial: bool = False
    """Score by SQuAD's F1 over the words shared by answer and truth, instead of 1.0 or 0.0."""

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer."""
        truths = true_answers(task, self.key, "match")
        answer = normalised(self._answer(self.graded(text)))
        if not answer:
            return Score(total=0.0)
        if self.partial:
            return Score(total=max(_f1(answer, normalised(truth)) for truth in truths), answer=answer)
        return Score(total=float(answer in map(normalised, truths)), answer=answer)

    def _answer(self, text: str) -> str:
        """Return the answer by `extract`, or the stated answer of a text without marks."""
        answer = extract(self.extract, text) or ""
        if self.extract != "auto" or marked(text) is not None:
            return answer
        return stated(answer) or answer


@dataclass(frozen=True, kw_only=True)
class Number(TextReward):
    """Scores 1.0 if the answer is, or ends with, the true number, within a tolerance.

    Number(tolerance=0.01)(task, "about 3.14")  # 1.0 if the answer is "3.1416"
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true number, or a list of true numbers."""
    extract: Extract = "auto"
    """Method of extracting the answer from the completion."""
    tolerance: float = 1e-6
    """Maximum difference that counts as equal: relative to the true number, but absolute below 1. Up to 1e-6, whole
    numbers must be equal."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward number:", minimum={"tolerance": 0})

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task whose true answer has no number."""
        truths = [_number(truth) for truth in true_answers(task, self.key, "number")]
        if None in truths:
            raise TaskError(
                f"--reward number: the true answer of task {task.id!r} has no number: {task.truth[self.key]!r:.80}",
                hint="use --reward match or --reward math instead",
            )
        # The error above is the data's fault and raises; an answer without a number is the model's and scores 0.
        answer = _number(self._answer(self.graded(text)) or "")
        if answer is None:
            return Score(total=0.0)
        is_near = any(self._is_near(truth, answer) for truth in truths if truth is not None)
        return Score(total=float(is_near), answer=canonical(answer))

    def _answer(self, text: str) -> str | None:
        if self.extract == "auto":
            return answered_number(text)
        return extract(self.extract, text)

    def _is_near(self, truth: Fraction, answer: Fraction) -> bool:
        # At the default tolerance, 1000001 would otherwise pass for 1000000.
        if self.tolerance <= _ROUNDING and truth.denominator == answer.denominator == 1:
            return truth == answer
        # Fractions keep the comparison exact: floats would round both sides before they are compared.
        margin = Fraction(self.tolerance)
        return abs(truth - answer) <= max(margin * abs(truth), min(margin, Fraction(1)))


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Scores an episode by the share of its group's other episodes with a different answer; 1.0 if it is alone.

    Add it with a small weight to a reward for correctness: --reward math=1 diversity=0.1
    """

    extract: Extract = "auto"
    """Method of extracting the answers from the completions; they are compared as in `match`."""

    def __call__(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """Return a score from 0 to 1 for each episode."""
        answers = [normalised(extract(self.extract, episode.text) or "") for episode in episodes]
        counts, num_others = collections.Counter(answers), max(1, len(answers) - 1)
        return [Score(total=1 - (counts[answer] - 1) / num_others, answer=answer) for answer in answers]


def _number(text: str) -> Fraction | None:
    """Return the number that a text is or, in prose, ends with."""
    quantity = read_quantity(text) or read_quantity(number_in(text) or "")
    return quantity.value if quantity is not None else None


def normalised(text: str) -> str:
    """Lowercase and remove quotes, articles, punctuation between words and spaces, unless nothing else is left."""
    text = " ".join(plain(text).translate(_QUOTES).lower().split())
    text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    text = re.sub(r"(?<=\d), (?=\d)", ",", _INITIALS.sub(lambda name: name.group().replace(".", ""), text))
    # A quote after a number is a sign of inches or seconds, unless an opening quote is there for it to close.
    if not _OPENING_QUOTE.search(text):
        text = _PRIMES.sub(lambda sign: "\N{PRIME}" if sign.group() == "'" else "\N{DOUBLE PRIME}", text)
    words = " ".join(_AROUND_WORD.sub("", text).split())
    return _ARTICLES.sub("", words) or words or text


def _f1(answer: str, truth: str) -> float:
    answer_words, truth_words = answer.split(), truth.split()
    if not answer_words or not truth_words:
        return float(answer_words == truth_words)
    # The counters' intersection counts a repeated word only as often as both sides have it.
    num_shared = (collections.Counter(answer_words) & collections.Counter(truth_words)).total()
    return 2 * num_shared / (len(answer_words) + len(truth_words))
