"""Safe scorers for the nine reasoning-gym data sets whose own scorers execute the answer as code.

They score like reasoning-gym 0.1.x, but parse answers with `expressions`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from forge_rl.rewards.expressions import arithmetic, formula, literal

_INTEGER = re.compile(r"\b\d+\b")
_MOST_DIGITS = 1000
"""Maximum digits of a number in an answer."""

ProceduralScorer = Callable[[str, Mapping[str, Any], Mapping[str, Any]], float]
"""Scores an answer, given an entry of the data set and the data set's parameters; raises if the answer is malformed,
which then scores `LEAST`."""


def _lines(rows: Any) -> str:
    return "\n".join(" ".join(str(each) for each in row) for row in rows)


def n_queens(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    valid = entry["metadata"]["valid_answers"]
    if answer in valid:
        return 1.0
    return 0.5 * ("\n".join(" ".join(row) for row in literal(answer)) in valid)


def spiral_matrix(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    right = entry["answer"].strip()
    if (answer := answer.strip()) == right:
        return 1.0
    return 0.1 * bool(" ".join(str(each) for each in literal(answer)) == right)


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
    if sorted(_integers(answer)) != sorted(entry["metadata"]["numbers"]):
        return 0.05
    return 1.0 if abs(value - target) <= 1e-6 + 1e-5 * abs(target) else 0.05  # numpy.isclose


def puzzle24(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    value, used = arithmetic(answer), _integers(answer)
    low, high = params.get("min_value", 1), params.get("max_value", 10)
    right = math.trunc(value) == 24 and len(used) == 4 and all(low <= each <= high for each in used)
    return 1.0 if right else 0.01


def polynomial_multiplication(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    return float(formula(answer, {}) == formula(entry["answer"], {}))


def integration(answer: str, entry: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    import sympy  # type: ignore[import-untyped]

    name = entry["metadata"]["variable"]
    variable = sympy.Symbol(name)
    derivative = sympy.diff(formula(answer, {name: variable, "C": sympy.Symbol("C")}), variable)
    return float(sympy.simplify(derivative - formula(entry["metadata"]["integrand"], {name: variable})) == 0)


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
    return [int(found) for found in _INTEGER.findall(text) if len(found) <= _MOST_DIGITS]
