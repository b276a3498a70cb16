"""Mixture: a weighted set of sources whose weights can change during a run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from forge_rl.data.adaptive import Adapting, AdaptiveShares
from forge_rl.data.sources import IterableSource, Reseedable, Source
from forge_rl.data.sources.iterable import Items
from forge_rl.errors import TaskError
from forge_rl.system.listeners import Listeners
from forge_rl.types import Group, Task

_MOST_WEIGHT = 1e9
_WEIGHT_HINT = f"set a number from 0 to {_MOST_WEIGHT:g}"


class Mixture:
    """Weighted sources; a source's share of every batch is its weight over the sum of weights.

        mixture = Mixture({"math": math, "words": words}, {"math": 3, "words": 1})
        mixture["words"] = 2  # from the next batch on
        mixture.adapt(Adapting(adapt="success"))  # shares follow each source's success rate, within bounds

    Weights are at least 0 and not all 0; by default all are equal. While adapting, weights are shares that sum to 1; a
    share set by hand then stays, even outside the bounds, until `adapt` is called again, and the others divide the
    rest.

    Args:
        evaluation: evaluation-only sources by set name.
        holds_out: also evaluate on the sources' held-out parts.
        overlap: handling of training tasks that are also in `evaluation`, see `scan.check_tasks`.

    Raises:
        TaskError: no sources, unknown names, or weights out of range.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float] | None = None,
        *,
        evaluation: Mapping[str, Source] | None = None,
        holds_out: bool = True,
        overlap: Literal["refuse", "leave-out"] = "refuse",
    ) -> None:
        if not sources:
            raise TaskError("the mixture has no sources", hint="give the tasks to train on")
        self._sources = dict(sources)
        source_weights = dict.fromkeys(self._sources, 1.0) if weights is None else dict(weights)
        if set(source_weights) != set(self._sources):
            raise TaskError(
                f"the weights are for {sorted(source_weights)}, the sources are {sorted(self._sources)}",
                hint="give one weight per source",
            )
        self._left_out: frozenset[str] = frozenset()
        self._weights = self._checked({name: source_weights[name] for name in self._sources})
        self._owed = dict.fromkeys(self._sources, 0.0)
        self.evaluation = dict(evaluation or {})
        self.holds_out = holds_out
        self.overlap = overlap
        self._adaptive: AdaptiveShares | None = None
        self.changed = Listeners[[str]]()
        """Callbacks that take a one-line description of each change."""

    @property
    def adapting(self) -> Adapting:
        """Settings of the adaptive weights; the default, off, if the weights are fixed."""
        return self._adaptive.config if self._adaptive else Adapting()

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources by name."""
        return self._sources

    @property
    def epochs(self) -> dict[str, float]:
        """Passes so far over each source that repeats its tasks."""
        epochs = {name: getattr(source, "epoch", None) for name, source in self._sources.items()}
        return {name: epoch for name, epoch in epochs.items() if isinstance(epoch, int | float)}

    @property
    def is_endless(self) -> bool:
        """Whether no task of any source comes again."""
        return all(getattr(source, "is_endless", False) for source in self._sources.values())

    def metrics(self) -> dict[str, float]:
        """Return each source's share if there are several, its epoch if it has one, the bad rows it skipped, and the
        share of a batch that adaptive weights move from some sources to others.
        """
        values = {f"data/{name}/epoch": epoch for name, epoch in self.epochs.items()}
        if len(self._sources) > 1:
            values |= {f"mixture/{name}": share for name, share in self.shares.items()}
        if self._adaptive is not None:
            values["data/mixture_shift"] = self._adaptive.shift()
        bad_rows = {name: getattr(source, "bad_rows", 0) for name, source in self._sources.items()}
        return values | {f"data/{name}/bad_rows": float(rows) for name, rows in bad_rows.items() if rows}

    @property
    def shares(self) -> dict[str, float]:
        """Weights scaled to sum to 1; 0 for sources that are left out."""
        weights = {name: 0.0 if name in self._left_out else weight for name, weight in self._weights.items()}
        total = math.fsum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __getitem__(self, name: str) -> float:
        return self._weights[self._known(name)]

    def __setitem__(self, name: str, weight: float) -> None:
        """Set a weight, or a share while weights adapt, from the next batch on."""
        self.update({name: weight})

    def update(self, weights: Mapping[str, float]) -> None:
        """Set several weights, or shares while weights adapt, from the next batch on.

        Raises:
            TaskError: a weight is refused; nothing has then changed.
        """
        old_weights = {name: self[name] for name in weights}
        weights = {name: _as_number(name, weight) for name, weight in weights.items()}
        if self._adaptive is not None:
            # All weights are set or none: several are pinned one by one, and a later one may be refused.
            old_pinned = dict(self._adaptive.pinned)
            try:
                for name, weight in weights.items():
                    self._adaptive.pin(name, weight)
                self._weights = self._checked(self._adaptive.shares())
            except TaskError:
                self._adaptive.pinned = old_pinned
                raise
        else:
            self._weights = self._checked({**self._weights, **weights})
        self._owed = dict.fromkeys(self._sources, 0.0)  # remainders of the old shares
        for name, weight in weights.items():
            self.changed.tell(f"mixture {name} {old_weights[name]:g} -> {weight:g}")

    def leave_out(self, sources: Collection[str]) -> None:
        """Draw nothing from these sources and again from all others, from the next batch on.

        Weights stay, and the other sources keep their proportions. Unknown names have no effect. Not part of the state.

        Raises:
            TaskError: no other source has a weight above 0.
        """
        old, left_out = self._left_out, frozenset(self._sources.keys() & set(sources))
        if left_out == old:
            return
        try:
            self._left_out = left_out
            # `_checked` reads the sources that are left out, so they are set first and taken back on an error.
            self._checked(self._weights)
        except TaskError:
            self._left_out = old
            raise
        self._owed = dict.fromkeys(self._sources, 0.0)
        names = ", ".join(sorted(left_out))
        self.changed.tell(f"mixture draws nothing from {names}" if names else "mixture draws from all sources")

    def adapt(self, config: Adapting) -> None:
        """Adapt all weights from the next batch on, even those set by hand; with "off", keep the current weights.

        Raises:
            ConfigError: the bounds cannot hold for this many sources.
            TaskError: the only sources with a share set by hand are left with none; nothing has then changed.
        """
        if config.adapt == "off":
            if self._adaptive is not None:
                self._adaptive = None
                self.changed.tell("mixture keeps its current weights")
            return
        # The weights of the first moment become the base by which success is multiplied.
        adaptive = AdaptiveShares(config, self._weights) if self._adaptive is None else self._adaptive.released(config)
        # A source of base weight 0 loses the share that was set by hand, and may be all that is not left out.
        self._weights, self._adaptive = self._checked(adaptive.shares()), adaptive
        bounds = f"between {config.least:g} and {config.most:g}"
        self.changed.tell(f"mixture adapts: shares by success, {bounds}, target {config.target:g}")

    def observe(self, groups: Iterable[Group]) -> None:
        """Update adaptive weights with the groups of a delivered batch, from the next batch on."""
        if self._adaptive is not None:
            self._adaptive.observe(groups)
            self._weights = self._adaptive.shares()

    def __repr__(self) -> str:
        width = max(len(name) for name in ("source", *self._weights))
        notes = {name: f"  {self._adaptive.describe(name)}" if self._adaptive else "" for name in self._weights}
        rows = (
            f"{name:<{width}}  {self._weights[name]:6.4g}  {share:6.1%}{notes[name]}"
            for name, share in self.shares.items()
        )
        return "\n".join([f"{'source':<{width}}  weight   share", *rows])

    def source_order(self, groups: int) -> list[str]:
        """Allot the next batch's P groups to sources, interleaved.

        Rounds by largest remainder and carries the remainders over to the next batch, so the deviation from the exact
        shares does not grow with the number of batches while the weights are constant.
        """
        return _largest_remainder(self._owed, self.shares, groups)

    def draw_from(self, source: str) -> Task:
        """Return the next task of a source, regardless of its share."""
        return self._sources[self._known(source)].draw()

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return held-out tasks by the current shares, the same for every seed; fewer if a source has too few."""
        # Remainders of its own: an evaluation must not shift the shares of training batches.
        counts = Counter(_largest_remainder(dict.fromkeys(self._sources, 0.0), self.shares, tasks))
        return tuple(task for name, source in self._sources.items() for task in source.held_out(counts[name]))

    def eval_sets(self, tasks: int) -> dict[str, tuple[Task, ...]]:
        """Return the evaluation tasks by set name, at most `tasks` per set, the same for every seed.

        The set "held_out" is the held-out part of the sources, if there is any; the other sets are `evaluation`.
        """
        if tasks == 0:
            return {}
        held_out = self.held_out(tasks) if self.holds_out else ()
        return ({"held_out": held_out} if held_out else {}) | {
            name: source.held_out(tasks) for name, source in self.evaluation.items()
        }

    def state(self) -> dict[str, object]:
        """Return weights, remainders, and the position of each source, as JSON.

        Raises:
            TaskError: the state of a source is not JSON.
        """
        return {
            "weights": dict(self._weights),
            "owed": dict(self._owed),
            "sources": {name: _copied(name, source.state()) for name, source in self._sources.items()},
            "adaptive": self._adaptive.state() if self._adaptive else None,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state, with the saved weights and no source left out.

        Raises:
            TaskError: the saved mixture has other sources.
        """
        match state:
            case {"weights": dict(weights), "owed": dict(owed), "sources": dict(sources), "adaptive": adaptive} if (
                weights.keys() == owed.keys() == sources.keys() == self._sources.keys()
                and all(isinstance(number, int | float) for number in (*weights.values(), *owed.values()))
                and all(isinstance(source, Mapping) for source in sources.values())
            ):
                # Read before anything changes: a malformed state must leave the mixture whole.
                adaptive_shares = (
                    AdaptiveShares.restored(adaptive, self._sources) if isinstance(adaptive, Mapping) else None
                )
                for name, source in self._sources.items():
                    source.restore(sources[name])
                self._adaptive, self._left_out = adaptive_shares, frozenset()
                self._weights = self._checked({name: weights[name] for name in self._sources})
                self._owed = {name: float(owed[name]) for name in self._sources}
            case _:
                saved_sources = state.get("sources")
                saved_sources = sorted(saved_sources) if isinstance(saved_sources, Mapping) else saved_sources
                raise TaskError(
                    f"the saved mixture has the sources {saved_sources}, this one {sorted(self._sources)}",
                    hint="resume with the original tasks, or start a new run",
                )

    def reseed(self, seed: int) -> None:
        """Begin each source again in the order of a seed. A source of another kind without `reseed` keeps its order."""
        for source in self._sources.values():
            if isinstance(source, Reseedable):
                source.reseed(seed)

    def restore_sources(self, state: Mapping[str, object]) -> None:
        """Restore the sources' positions but not the weights, so that an unusable state fails early.

        Raises:
            TaskError: a source cannot resume, for example because its files have changed.
        """
        saved_sources = state.get("sources")
        for name, source in self._sources.items():
            if isinstance(saved_sources, Mapping) and isinstance(position := saved_sources.get(name), Mapping):
                source.restore(position)

    def _known(self, name: str) -> str:
        if name not in self._sources:
            raise TaskError(f"no source named {name!r}", hint=f"the mixture has: {', '.join(self._sources)}")
        return name

    def _checked(self, weights: Mapping[str, float]) -> dict[str, float]:
        weights = {name: _as_number(name, weight) for name, weight in weights.items()}
        for name, weight in weights.items():
            if not 0 <= weight <= _MOST_WEIGHT:
                raise TaskError(f"the weight of {name!r} is {weight:g}", hint=_WEIGHT_HINT)
        if not any(weight for name, weight in weights.items() if name not in self._left_out):
            without = f" without {', '.join(sorted(self._left_out))}" if self._left_out else ""
            raise TaskError(f"all weights{without} are 0: {weights}", hint="give another source a weight above 0")
        return weights


AnySources = Mixture | Source | Mapping[str, Source | Items] | Items
"""Anything that can be turned into a mixture, see `as_mixture`."""


def as_mixture(sources: AnySources, *, seed: int) -> Mixture:
    """Make a mixture from a source, an iterable of tasks or rows, a function that returns one, or a mapping of these.

        as_mixture([{"question": "2+3?", "answer": "5"}], seed=0)
        as_mixture({"sums": sums, "words": generate_words}, seed=0)

    Args:
        seed: shuffles sequences.

    Raises:
        TaskError: `sources` is none of these.
    """
    if isinstance(sources, Mixture):
        return sources
    if isinstance(sources, Source):
        return Mixture({sources.name: sources})
    if not isinstance(sources, Mapping):
        sources = {"tasks": sources}
    named_sources: dict[str, Source] = {}
    for name, source in sources.items():
        named_sources[name] = source if isinstance(source, Source) else IterableSource(name, source, seed)
    return Mixture(named_sources)


def _as_number(name: str, weight: object) -> float:
    """Return a source's weight as a float, which JSON can hold; NumPy's and PyTorch's numbers are unknown to it.

    Raises:
        TaskError: it is not a number.
    """
    # A text is a number to `float`, and a truth value to both.
    if not isinstance(weight, str | bytes | bool):
        try:
            return float(weight)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise TaskError(f"the weight of {name!r} is {weight!r:.80}", hint=_WEIGHT_HINT)


def _largest_remainder(owed: dict[str, float], shares: Mapping[str, float], groups: int) -> list[str]:
    """Give each group to the source that is owed the most; leave the rounding remainders in `owed`."""
    for name, share in shares.items():
        owed[name] += share * groups
    order = []
    for _ in range(groups):
        # Rounded so that sums that differ only by float error tie; the first source then wins.
        name = max((name for name, share in shares.items() if share > 0), key=lambda name: round(owed[name], 9))
        owed[name] -= 1
        order.append(name)
    return order


def _copied(name: str, state: object) -> Any:
    """Copy a source's state, which the source may go on to change in place, as a checkpoint would.

    Raises:
        TaskError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"the state of source {name!r} is not JSON: {error}",
            hint="return numbers, strings, lists and dicts from its state(), such as int(i) for a NumPy integer",
        ) from error
