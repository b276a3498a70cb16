"""Values reported by ranks, replicas and microbatches, which merge to what a single process would have seen."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import ClassVar

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

    def bins(self, max_bins: int = 512) -> tuple[list[int], list[float]]:
        """Return counts in bins of equal width, in increasing order, and the edges of the bins.

        A bin covers one integer, or several if there would otherwise be more than `max_bins` bins.
        """
        if not self.counts:
            return [], []
        low, high = min(self.counts), max(self.counts)
        # The smallest width with which at most `max_bins` bins reach from low to high.
        width = (high - low) // max_bins + 1
        counts = [0] * ((high - low) // width + 1)
        for value, count in self.counts.items():
            counts[(value - low) // width] += count
        return counts, [low - 0.5 + width * i for i in range(len(counts) + 1)]


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Effective sample size of importance weights as a share of the samples, (sum w)^2 / (n * sum w^2)."""

    total: float
    squares: float
    count: float


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """Share of the variance of targets that predictions explain, 1 - Var(target - prediction) / Var(target)."""

    targets: float
    """Sum of the targets."""
    squares: float
    """Sum of their squares."""
    errors: float
    """Sum of targets minus predictions."""
    error_squares: float
    count: float

    @property
    def share(self) -> float:
        """The share; NaN if the targets are equal, or there are none."""
        if not self.count:
            return math.nan
        # n Var(target), from the sums of the values and of their squares; below, n Var(target - prediction). n cancels.
        spread = self.squares - self.targets**2 / self.count
        if spread <= 1e-9 * self.squares:  # equal but for rounding
            return math.nan
        return 1 - (self.error_squares - self.errors**2 / self.count) / spread


@dataclass(frozen=True, slots=True)
class Tail:
    """The 99th percentile of exp(x), for distances x of at least 0, x within 14%; from counts in geometric bins."""

    BINS: ClassVar[int] = 128
    LEAST: ClassVar[float] = 1e-6
    """Distances below this are in the first bin."""
    STEP: ClassVar[float] = math.log(20 / 1e-6) / 128
    """Logarithm of the ratio of a bin's ends: the last bin ends at a distance of 20."""
    counts: tuple[float, ...]

    @property
    def percentile(self) -> float:
        """exp of the upper end of the bin that holds the 99th percentile; NaN if nothing was counted."""
        threshold, num_seen = 0.99 * sum(self.counts), 0.0
        for number, count in enumerate(self.counts):
            num_seen += count
            if count and num_seen >= threshold:
                return math.exp(self.LEAST * math.exp(self.STEP * (number + 1)))
        return math.nan


Value = Sum | Mean | Max | EffectiveShare | ExplainedVariance | Tail


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
                case EffectiveShare(x, s, m), EffectiveShare(y, t, n):
                    merged[name] = EffectiveShare(x + y, s + t, m + n)
                case ExplainedVariance() as left, ExplainedVariance() as right:
                    merged[name] = ExplainedVariance(*map(operator.add, astuple(left), astuple(right)))
                case Tail(a), Tail(b):
                    merged[name] = Tail(tuple(x + y for x, y in zip(a, b, strict=True)))
                case Max(x), Max(y):
                    # `x != x` is true of NaN alone. A NaN y is taken too, as no comparison with it is true.
                    merged[name] = Max(x if x != x or x > y else y)
                case earlier, _:
                    raise AssertionError(f"metric {name!r} has values of two kinds: {earlier} and {value}")
    return merged


def reduce(values: Mapping[str, Value]) -> dict[str, float]:
    """Return one float for each name; a mean over nothing is NaN."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: Value) -> float:
    match value:
        case Sum(number) | Max(number):
            return float(number)
        case Mean(total, count):
            return total / count if count else math.nan
        case EffectiveShare(total, squares, count):
            return total**2 / (count * squares) if squares else math.nan
        case ExplainedVariance():
            return value.share
        case Tail():
            return value.percentile


def lag_histogram(batch: Batch) -> Histogram:
    """Count the batch's sampled tokens by lag: how many versions older than the trainer's the weights were."""
    tokens_by_version = Counter[int]()
    for episode in batch.episodes:
        for turn in episode.turns:
            versions = turn.versions
            if len(versions):  # equal versions come in runs
                # Starts of the runs after the first; the loop below is over runs, not over tokens.
                cuts = (np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()
                for begin, end in zip([0, *cuts], [*cuts, len(versions)], strict=True):
                    tokens_by_version[int(versions[begin])] += end - begin
    # A negative version marks given tokens, which no model sampled.
    sampled = sorted((version for version in tokens_by_version if version >= 0), reverse=True)
    return Histogram({batch.version - version: tokens_by_version[version] for version in sampled})
