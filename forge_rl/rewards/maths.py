"""Reward for mathematics: equal answers, in any notation."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from forge_rl.errors import ConfigError, check_flags
from forge_rl.rewards import extract
from forge_rl.rewards.answers import normalised
from forge_rl.rewards.choice import letter_of, settled_letter
from forge_rl.rewards.equality import equal
from forge_rl.rewards.kinds import is_copy, kind_of, notation
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.quantities import read_quantity, same_quantity
from forge_rl.rewards.workers import shared_workers
from forge_rl.types import Score, Task

_LONGEST = 1000
"""Maximum length of a reported answer, in characters."""
_MOST_CHARS = 5000
"""Maximum length of a formula that is compared."""
_SIGN = re.compile(r"\\[a-zA-Z]+|[^\s{}]")


@dataclass(frozen=True, kw_only=True)
class Maths(TextReward):
    r"""Scores 1.0 for an answer that is mathematically the true one, as 0.5 and \frac{1}{2} are.

    await Maths()(task, "so it is \\boxed{0.5}")  # Score(total=1.0, answer="0.5")

    If the true answer is a number, the answer must be one: a fraction, a decimal number or a power, but not a sum or
    an integral. A copy of the question's expression is not an answer. Brackets, order and relations count. Formulas are
    compared by value; others, such as integrals, by math-verify. That runs in separate processes; one that times out is
    killed, and its answer counts as wrong.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of them, with or without dollar signs."""
    timeout_s: float = 5.0
    """Timeout for comparing one answer."""
    processes: int = 2
    """Maximum worker processes per replica of the reward service."""
    percent_is_unit: bool = False
    """Let 50% answer a true 50 as well as 0.5."""
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward math:", minimum={"processes": 1}, above={"timeout_s": 0})
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("--reward math: math-verify is not installed", hint="pip install math-verify")

    async def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer, ForgeError if a worker process does not start."""
        truths, text = extract.true_answers(task, self.key, "math"), self.graded(text)
        # Each kind of true answer has its own rule, cheapest first; one that accepts the answer is enough.
        by_kind = {kind: [truth for truth in truths if kind_of(truth) == kind] for kind in map(kind_of, truths)}
        score = Score(total=0.0)
        if numbers := by_kind.get("number"):
            score = number_score(task, numbers, text, percent_is_unit=self.percent_is_unit)
        if score.total < 1 and (options := by_kind.get("choice")):
            letter = settled_letter(text)
            score = Score(total=float(letter in map(letter_of, options)), answer=letter or score.answer)
        if score.total < 1 and (texts := by_kind.get("text")):
            words = normalised(_answer_in(text))
            score = Score(total=float(bool(words) and words in map(normalised, texts)), answer=words)
        if score.total < 1 and (formulas := by_kind.get("expression")):
            score = await self._compared(task, formulas, text)
        return score

    async def _compared(self, task: Task, truths: Sequence[str], text: str) -> Score:
        answer = _answer_in(text)
        signs = notation(answer)
        if not signs or len(answer) > _MOST_CHARS or all(is_copy(answer, truth, task) for truth in truths):
            return Score(total=0.0, parts={"late": 0.0}, answer=signs[:_LONGEST])
        # The same notation needs no process; most right answers end here.
        if any(signs == notation(truth) for truth in truths):
            return Score(total=1.0, parts={"late": 0.0}, answer=signs[:_LONGEST])
        workers = shared_workers(__name__, "compare", self.processes, self.timeout_s, ("math_verify", "sympy"))
        result = await workers(list(truths), answer)
        if result is None:
            return Score(total=0.0, parts={"late": 1.0}, answer=signs[:_LONGEST])
        place = cast(int, result)
        # Equal answers have the true one's notation, so that a majority counts them together.
        reported_answer = signs if place < 0 else notation(truths[place])
        return Score(total=float(place >= 0), parts={"late": 0.0}, answer=reported_answer[:_LONGEST])


def number_score(task: Task, truths: Sequence[str], text: str, *, percent_is_unit: bool) -> Score:
    """Score a completion by true answers that are numbers, see `quantities.same_quantity`."""
    number = extract.answered_number(text)
    quantity = read_quantity(number) if number is not None else None
    if number is None or quantity is None:
        return Score(total=0.0)
    true_quantities = [truth for truth in map(read_quantity, truths) if truth is not None]
    is_right = any(same_quantity(truth, quantity, percent_is_unit=percent_is_unit) for truth in true_quantities)
    if is_right and all(is_copy(number, truth, task) for truth in truths):
        is_right = False
    return Score(total=float(is_right), answer=str(quantity))


def compare(truths: list[str], answer: str) -> int:
    """Return the index of the true answer that an answer equals, or -1. Runs in a separate process, with bounds on time
    and memory."""
    for place, truth in enumerate(truths):
        try:
            is_equal = equal(truth, answer)
        except ValueError:
            # `equal` raises only for a true answer that it cannot read; an answer that it cannot read is wrong.
            is_equal = _is_equal_by_math_verify(truth, answer)
        if is_equal:
            return place
    return -1


def _is_equal_by_math_verify(truth: str, answer: str) -> bool:
    """Compare formulas that `equality` cannot read, such as integrals and sums, if they differ at most in the order of
    their signs."""
    import math_verify

    # math-verify alone is too lenient for a reward of 1, so it may only reorder what the true answer is made of.
    if sorted(_SIGN.findall(notation(truth))) != sorted(_SIGN.findall(notation(answer))):
        return False
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are disabled
    try:
        # Its timeouts use SIGALRM, which limits this process already; `Workers` kills it when the time is up.
        sides = [math_verify.parse(_as_maths(side), parsing_timeout=None) for side in (truth, answer)]
        return all(sides) and bool(math_verify.verify(*sides, timeout_seconds=None))
    except Exception:  # model output can fail in any way
        return False


def _as_maths(text: str) -> str:
    return text if "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text else f"${text}$"


def _answer_in(text: str) -> str:
    """Return a completion's answer: marked, stated, or its last formula; "" without one."""
    answer = extract.marked(text)
    if answer is None:
        answer = extract.stated(text) or extract.in_mathematics(text) or text.strip()
    formula = extract.in_mathematics(answer)
    is_prose = formula is not None and re.search(r"[^\W\d_]{2}", answer.replace(formula, "")) is not None
    return formula if formula is not None and is_prose else answer
