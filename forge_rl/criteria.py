"""A task's own rubric: criteria with weights, read from data that may be malformed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_CRITERIA = 64
_MOST_LETTERS = 4000
"""Maximum length of one criterion."""
_MOST_JSON = 500_000
"""Maximum length of a rubric that is JSON in a string."""
_MOST_WEIGHT = 1e6


@dataclass(frozen=True)
class Criterion:
    """One criterion of a rubric; a negative weight makes it a pitfall."""

    text: str
    weight: float


def read_criteria(value: object) -> tuple[Criterion, ...]:
    """Read a rubric: a list of {"criterion": text, "weight": number}, or a string with one as JSON.

        read_criteria([{"criterion": "Names the capital.", "weight": 2}, {"criterion": "Is rude.", "weight": -1}])

    Other entries of a criterion are ignored.

    Raises:
        ValueError: it is malformed or too long, or no weight is positive; starts with a predicate, such as "has ...".
    """
    if isinstance(value, str):
        if len(value) > _MOST_JSON:
            raise ValueError(f"has {len(value):,} letters, more than {_MOST_JSON:,}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is text, but not a list in JSON: {error}") from None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"is a {type(value).__name__}, not a list of criteria")
    if not 0 < len(value) <= _MOST_CRITERIA:
        raise ValueError(f"has {len(value)} criteria, not 1 to {_MOST_CRITERIA}")
    criteria = tuple(_criterion(number, entry) for number, entry in enumerate(value, 1))
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError("has no criterion with a weight above 0, so it has no best score")
    return criteria


def _criterion(number: int, entry: object) -> Criterion:
    """Read the criterion of this number, from 1."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"has a criterion {number} that is a {type(entry).__name__}, not a mapping")
    text, weight = entry.get("criterion"), entry.get("weight")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"has a criterion {number} without text in 'criterion'")
    if len(text) > _MOST_LETTERS:
        raise ValueError(f"has a criterion {number} of {len(text):,} letters, more than {_MOST_LETTERS:,}")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"has a criterion {number} without a number in 'weight'")
    if not 0 < abs(weight) <= _MOST_WEIGHT:  # false for NaN, too
        raise ValueError(f"has a criterion {number} whose weight is 0, or not from -1e6 to 1e6")
    return Criterion(text, float(weight))
