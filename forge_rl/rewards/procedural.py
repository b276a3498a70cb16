"""Scorers of reasoning-gym data sets whose own scorers execute the answer as code, or are solved by a constant.

They score like reasoning-gym 0.1.x, but parse answers with `expressions`, and give 1 only to right answers.
`python -m benchmarks.answers` tries every data set with constants, formulas and copies of the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forge_rl.rewards.expressions import arithmetic, formula, literal
from forge_rl.rewards.quantities import read_quantity

_INTEGER = re.compile(r"\b\d+\b")
_PLAIN = re.compile(r"[\d\s+*/()-]+")
"""Arithmetic with whole numbers in decimal digits, all of which `_integers` finds."""
_MOST_DIGITS = 1000
"""Maximum digits of a number in an answer."""

ProceduralScorer = Callable[[str, Mapping[str, Any], Mapping[str, Any]], float]
"""Scores an answer, given an entry of the data set and the data set's parameters; raises if the answer is malformed,
which then scores `LEAST`."""


def _lines(rows: Any) -> str:
    return "\n".join(" ".join(str(cell) for cell in row) for row in rows)


def n_queens(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    valid = entry["metadata"]["valid_answers"]
    if answer in valid:
        return 1.0
    return 0.5 * ("\n".join(" ".join(row) for row in literal(answer)) in valid)


def spiral_matrix(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    true_answer = entry["answer"].strip()
    if (answer := answer.strip()) == true_answer:
        return 1.0
    return 0.1 * bool(" ".join(str(number) for number in literal(answer)) == true_answer)


def binary_matrix(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    if answer == entry["answer"]:
        return 1.0
    return 0.1 * bool(_lines(literal(answer)) == entry["answer"])


def string_insertion(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    if answer == entry["answer"]:
        return 1.0
    return 0.1 * bool("".join(literal(answer)) == entry["answer"])


def countdown(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    value, target = arithmetic(answer), entry["metadata"]["target"]
    # 0.05 is reasoning-gym's own score of an answer that it can evaluate but that is wrong.
    if sorted(_integers(answer)) != sorted(entry["metadata"]["numbers"]):
        return 0.05
    is_right = _PLAIN.fullmatch(answer) and abs(value - target) <= 1e-6 + 1e-5 * abs(target)  # numpy.isclose
    return 1.0 if is_right else 0.05


def puzzle24(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    # reasoning-gym takes any four numbers, such as 6*4*1*1, and cuts decimals off.
    is_right = arithmetic(answer) == 24 and sorted(_integers(answer)) == sorted(entry["metadata"]["numbers"])
    return 1.0 if is_right and _PLAIN.fullmatch(answer.strip()) else 0.01


def polynomial_multiplication(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    return float(formula(answer, {}) == formula(entry["answer"], {}))


def integration(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    import sympy  # type: ignore[import-untyped]

    name = entry["metadata"]["variable"]
    variable = sympy.Symbol(name)
    # Any antiderivative is right, whatever its constant: its derivative must be the integrand.
    derivative = sympy.diff(formula(answer, {name: variable, "C": sympy.Symbol("C")}), variable)
    return float(sympy.simplify(derivative - formula(entry["metadata"]["integrand"], {name: variable})) == 0)


def _is_probability(answer: str, entry: Mapping[str, Any]) -> bool:
    """Check a probability relative to the true one: within 0.0001, 0 is right for most of ten coins."""
    quantity, true = read_quantity(answer), read_quantity(str(entry["answer"]))
    if quantity is None or true is None or quantity.unit:
        return False
    return abs(quantity.value - true.value) <= true.value / 1000


def _is_finite(answer: str, entry: Mapping[str, Any]) -> bool:
    """Refuse "nan", whose distance to any number counts as 0."""
    return not any(name in answer.lower() for name in ("nan", "inf"))


def _is_same_word(answer: str, entry: Mapping[str, Any]) -> bool:
    """Compare words: reasoning-gym compares their truth values, and any text is true, also "False"."""
    return answer.strip().rstrip(".").lower() == str(entry["answer"]).lower()


CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "coin_flip": _is_probability,
    "complex_arithmetic": _is_finite,
    "game_of_life_halting": _is_same_word,
}
"""Conditions, given an answer and the entry, without which a score of 1 by reasoning-gym becomes 0."""
OWN: Mapping[str, ProceduralScorer] = {
    "n_queens": n_queens,
    "spiral_matrix": spiral_matrix,
    "binary_matrix": binary_matrix,
    "string_insertion": string_insertion,
    "countdown": countdown,
    "puzzle24": puzzle24,
    "polynomial_multiplication": polynomial_multiplication,
    "simple_integration": integration,
    "intermediate_integration": integration,
}
LEAST = {"countdown": 0.01, "puzzle24": 0.01}
"""Score of a malformed answer by data set; 0 for the others."""


def _integers(text: str) -> list[int]:
    """Return the integers in a text, as reasoning-gym finds them."""
    return [int(digits) for digits in _INTEGER.findall(text) if len(digits) <= _MOST_DIGITS]
