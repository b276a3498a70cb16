"""Values reported by ranks, replicas and microbatches, which merge to what a single process would have seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from forge_rl.types import Batch


@dataclass(frozen=True, slots=True)
class Sum:
    """A total, such as tokens or skipped groups."""

    total: float


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its weight, so that parts of unequal size merge to the overall mean."""

    total: float
    """Sum of the averaged values."""
    count: float
    """Weight of the sum, such as a number of tokens or episodes."""


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen; NaN if any was NaN."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of integers by value, such as the lags of a batch's tokens."""

    counts: Mapping[int, int]

    @property
    def total(self) -> int:
        """Number of counted values."""
        return sum(self.counts.values())

    def bins(self, most: int = 512) -> tuple[list[int], list[float]]:
        """Return counts in bins of equal width, in increasing order, and the edges of the bins.

        A bin covers one integer, or several where there would otherwise be more bins than `most`.
        """
        if not self.counts:
            return [], []
        low, high = min(self.counts), max(self.counts)
        width = (high - low) // most + 1
        counts = [0] * ((high - low) // width + 1)
        for value, count in self.counts.items():
            counts[(value - low) // width] += count
        return counts, [low - 0.5 + width * i for i in range(len(counts) + 1)]


Value = Sum | Mean | Max


def merge_all(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Merge by name to the values a single process would hold; a name may be missing in some parts.

    Example:
        reduce(merge_all([{"loss": Mean(3.0, 2)}, {"loss": Mean(1.0, 2)}])) == {"loss": 1.0}
    """
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            match merged.get(name), value:
                case None, _:
                    merged[name] = value
                case Sum(x), Sum(y):
                    merged[name] = Sum(x + y)
                case Mean(x, m), Mean(y, n):
                    merged[name] = Mean(x + y, m + n)
                case Max(x), Max(y):
                    merged[name] = Max(x if x != x or x > y else y)
                case held, _:
                    raise AssertionError(f"metric {name!r} has values of two kinds: {held} and {value}")
    return merged


def reduce(values: Mapping[str, Value]) -> dict[str, float]:
    """Return one float for each name; a mean over nothing is NaN."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: Value) -> float:
    match value:
        case Sum(number) | Max(number):
            return float(number)
        case Mean(total, count):
            return total / count if count else float("nan")


def lag_histogram(batch: Batch) -> Histogram:
    """Count the batch's tokens by lag: how many versions older than the trainer's the weights were."""
    versions = Counter[int]()
    for episode in batch.episodes:
        for turn in episode.turns:
            held = turn.versions
            if len(held):  # equal versions come in runs
                cuts = (np.flatnonzero(held[1:] != held[:-1]) + 1).tolist()
                for begin, end in zip([0, *cuts], [*cuts, len(held)], strict=True):
                    versions[int(held[begin])] += end - begin
    return Histogram({batch.version - version: versions[version] for version in sorted(versions, reverse=True)})
