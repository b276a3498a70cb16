"""How often each of some small whole numbers was seen, such as the lags of a batch's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forge_rl.types import Batch


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by value. Merged by adding; as one float it is its mean."""

    counts: Mapping[int, int]

    @classmethod
    def of(cls, values: Iterable[int]) -> Histogram:
        return cls(dict(sorted(Counter(values).items())))

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """NaN where nothing was counted."""
        total = self.total
        return sum(value * count for value, count in self.counts.items()) / total if total else float("nan")

    def bins(self, most: int = 512) -> tuple[list[int], list[float]]:
        """Counts from the least value to the greatest in bins of equal width, and the edges of those.

        A bin holds one whole number, and more only where there would be more bins than `most`.
        """
        if not self.counts:
            return [], []
        low, high = min(self.counts), max(self.counts)
        width = (high - low) // most + 1
        counts = [0] * ((high - low) // width + 1)
        for value, count in self.counts.items():
            counts[(value - low) // width] += count
        return counts, [low - 0.5 + width * i for i in range(len(counts) + 1)]

    def as_json(self) -> dict[str, int]:
        """`{"0": 512, "1": 40}`."""
        return {str(value): count for value, count in sorted(self.counts.items())}


def lag_histogram(batch: Batch) -> dict[int, int]:
    """By lag: how many of the batch's tokens were decoded by weights so many versions older than the trainer's."""
    versions = Counter[int]()
    for episode in batch.episodes:
        for turn in episode.turns:
            versions.update(turn.versions)
    return {batch.version - version: versions[version] for version in sorted(versions, reverse=True)}
