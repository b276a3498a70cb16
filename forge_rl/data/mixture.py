"""The mixture: a weighted set of sources, whose weights can change while a run is live."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from forge_rl.data.sources import Source
from forge_rl.errors import TaskError
from forge_rl.types import Task


class Mixture:
    """Sources and their weights; a source's share of every batch is its weight over the sum of weights.

        mixture = Mixture({"math": math, "words": words}, {"math": 3, "words": 1})
        mixture["words"] = 2  # from the next batch on

    Weights are from 0 up and not all 0; all equal when not given.

    Raises:
        TaskError: no sources, unknown names, or weights out of range.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float] | None = None) -> None:
        if not sources:
            raise TaskError("a mixture needs at least one source", hint="name the tasks to train on")
        self._sources = dict(sources)
        given = dict.fromkeys(self._sources, 1.0) if weights is None else dict(weights)
        if set(given) != set(self._sources):
            raise TaskError(
                f"the weights are for {sorted(given)}, the sources are {sorted(self._sources)}",
                hint="give one weight for each source",
            )
        self._weights = self._checked({name: given[name] for name in self._sources})
        self._owed = dict.fromkeys(self._sources, 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """Weights scaled so that they add up to 1."""
        total = math.fsum(self._weights.values())
        return {name: weight / total for name, weight in self._weights.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __getitem__(self, name: str) -> float:
        return self._weights[self._known(name)]

    def __setitem__(self, name: str, weight: float) -> None:
        """Change a weight from the next batch on."""
        self._weights = self._checked(self._weights | {self._known(name): weight})
        self._owed = dict.fromkeys(self._sources, 0.0)  # remainders of the old shares

    def __repr__(self) -> str:
        width = max(len(name) for name in ("source", *self._weights))
        rows = (f"{name:<{width}}  {self._weights[name]:6g}  {share:6.1%}" for name, share in self.shares.items())
        return "\n".join([f"{'source':<{width}}  weight   share", *rows])

    def source_order(self, groups: int) -> list[str]:
        """Allot the next batch's P groups to sources, interleaved.

        Rounds by largest remainder and carries the remainders to the next batch: while weights stay, the difference
        from the exact shares does not grow with the number of batches.
        """
        return _largest_remainder(self._owed, self.shares, groups)

    def draw_from(self, source: str) -> Task:
        """Return the next task of a source; its share is not touched."""
        return self._sources[self._known(source)].draw()

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return held-out tasks by the current shares: the same for every seed; fewer where a source has fewer."""
        counts = Counter(_largest_remainder(dict.fromkeys(self._sources, 0.0), self.shares, tasks))
        return tuple(task for name, source in self._sources.items() for task in source.held_out(counts[name]))

    def state(self) -> dict[str, object]:
        """Weights, remainders, and the position of each source, as JSON."""
        return {
            "weights": dict(self._weights),
            "owed": dict(self._owed),
            "sources": {name: source.state() for name, source in self._sources.items()},
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved state, with the weights that were set then.

        Raises:
            TaskError: the state is of a mixture of other sources.
        """
        match state:
            case {"weights": dict(weights), "owed": dict(owed), "sources": dict(sources)} if (
                weights.keys() == owed.keys() == sources.keys() == self._sources.keys()
                and all(isinstance(number, int | float) for number in (*weights.values(), *owed.values()))
                and all(isinstance(source, Mapping) for source in sources.values())
            ):
                for name, source in self._sources.items():
                    source.restore(sources[name])
                self._weights = self._checked({name: weights[name] for name in self._sources})
                self._owed = {name: float(owed[name]) for name in self._sources}
            case _:
                saved = state.get("sources")
                saved = sorted(saved) if isinstance(saved, Mapping) else saved
                raise TaskError(
                    f"the saved mixture has the sources {saved}, this one {sorted(self._sources)}",
                    hint="resume with the tasks of the first start, or start a new run",
                )

    def _known(self, name: str) -> str:
        if name not in self._sources:
            raise TaskError(f"no source named {name!r}", hint=f"the mixture has: {', '.join(self._sources)}")
        return name

    def _checked(self, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise TaskError(f"the weight of {name!r} is {weight}", hint="choose a number from 0 up")
        if not any(weights.values()):
            raise TaskError(f"all weights are 0: {weights}", hint="give at least one source a weight above 0")
        return weights


def _largest_remainder(owed: dict[str, float], shares: Mapping[str, float], groups: int) -> list[str]:
    """Give each group to the source that is owed the most; leave in `owed` what rounding left."""
    for name, share in shares.items():
        owed[name] += share * groups
    order = []
    for _ in range(groups):
        # Rounded, so that sums that differ by float error tie, and the first of the sources wins.
        name = max((name for name, share in shares.items() if share > 0), key=lambda name: round(owed[name], 9))
        owed[name] -= 1
        order.append(name)
    return order
