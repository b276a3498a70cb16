"""Values that ranks, replicas and microbatches report apart and that merge to what one process would have seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forge_rl.metrics.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Sum:
    """A total, such as tokens or skipped groups."""

    total: float


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that keeps its weight, so that parts of unequal size merge to the mean of the whole."""

    total: float
    """Sum of what is averaged."""
    count: float
    """Weight of that sum: tokens, episodes, or whatever the mean is taken over."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of some values, each with weight 1."""
        listed = list(values)
        return cls(sum(listed), len(listed))


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen; NaN if any was NaN, so that a merge hides no fault."""

    value: float


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value seen; NaN if any was NaN, so that a merge hides no fault."""

    value: float


Value = Sum | Mean | Max | Min | Histogram


def merge(a: Value, b: Value) -> Value:
    """What one process would hold had it seen what both have seen; both must be of one kind."""
    match a, b:
        case Sum(x), Sum(y):
            return Sum(x + y)
        case Mean(x, m), Mean(y, n):
            return Mean(x + y, m + n)
        case Max(x), Max(y):
            return Max(x if x != x or x > y else y)
        case Min(x), Min(y):
            return Min(x if x != x or x < y else y)
        case Histogram(x), Histogram(y):
            return Histogram({value: x.get(value, 0) + y.get(value, 0) for value in sorted({*x, *y})})
    raise AssertionError(f"one name has values of two kinds: {a} and {b}")


def merge_all(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Merge by name, in the order given; a name that only some parts have is merged from those."""
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            try:
                merged[name] = merge(merged[name], value) if name in merged else value
            except AssertionError as error:
                error.add_note(f"metric {name!r}")
                raise
    return merged


def reduce(values: Mapping[str, Value]) -> dict[str, float]:
    """One float for each name; a mean over nothing is NaN, and a histogram is its mean."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: Value) -> float:
    match value:
        case Sum(total):
            return float(total)
        case Mean(total, count):
            return total / count if count else float("nan")
        case Max(number) | Min(number):
            return float(number)
        case Histogram():
            return value.mean
