"""A mixture's tasks in batch order, resumable at the oldest undelivered batch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, runtime_checkable

from forge_rl.data.curriculum import DifficultyPools
from forge_rl.data.mixture import Mixture
from forge_rl.errors import TaskError
from forge_rl.types import Group, Task

_OF_NOW = ("weights", "adaptive")
"""Keys of a mixture's state that draws do not change."""


@runtime_checkable
class ForesightSource(Protocol):
    """A task source that can tell its next tasks ahead of their draw."""

    def coming(self, tasks: int) -> list[Task]:
        """Return the next tasks, each once, without drawing them."""
        ...


class ResumableTaskStream:
    """Draws a mixture's tasks for batches that are planned ahead, and resumes without repeating or losing a task.

    A saved state is a checkpoint of the mixture before the oldest undelivered batch, and the already consumed tasks
    that were drawn after it. A resumed stream draws from the checkpoint and skips each consumed task as many times as
    it was consumed. Weights and solve rates are always the current ones.

    Args:
        pools: choose among the tasks of each source; without them, tasks are taken as they come.
    """

    def __init__(self, mixture: Mixture, pools: DifficultyPools | None = None) -> None:
        self._mixture = mixture
        self._pools = pools
        self._checkpoints: list[tuple[dict[str, object], int]] = []
        """State of the mixture before each undelivered batch, and the number of entries of `_drawn` before it."""
        self._drawn: list[tuple[str, str]] = []
        """Source and id of each task drawn since the oldest checkpoint."""
        self._consumed: Counter[tuple[str, str]] = Counter()
        """Tasks consumed before the stream was restored that have not been skipped yet."""

    def source_order(self, groups: int) -> list[str]:
        """Allot the next batch's groups to sources."""
        # Taken before the batch's first draw, and before `source_order` moves its remainders.
        self._checkpoints.append((self._position(), len(self._drawn)))
        return self._mixture.source_order(groups)

    def leave_out(self, sources: Collection[str]) -> None:
        """Draw nothing from some sources from the next batch on; see `Mixture.leave_out`."""
        self._mixture.leave_out(sources)

    def draw_from(self, source: str) -> Task:
        """Return the next unconsumed task of a source."""
        draw = functools.partial(self._mixture.draw_from, source)
        while True:
            task = draw() if self._pools is None else self._pools.choose(source, draw, chosen_before=self._is_consumed)
            self._drawn.append((task.source, task.id))
            # A count and not a set: a task that comes again in the next epoch is skipped only as often as it was
            # consumed.
            if self._consumed[task.source, task.id] <= 0:
                return task
            self._consumed[task.source, task.id] -= 1

    def coming(self, groups: int) -> list[Task]:
        """Return the tasks that a batch of P groups would probably draw next; nothing is drawn.

        A guess where pools choose among tasks, or shares change; sources that cannot tell are left out.
        """
        tasks: list[Task] = []
        for name, share in self._mixture.shares.items():
            source = self._mixture.sources[name]
            if isinstance(source, ForesightSource) and share > 0:
                tasks += source.coming(math.ceil(share * groups))
        return tasks

    def batch_delivered(self, groups: Sequence[Group] = (), *, pending: Iterable[Task] | None = None) -> None:
        """Drop the checkpoint of the oldest batch, which need not be drawn again; mixture and pools observe its groups.

        Args:
            groups: the batch's groups.
            pending: unconsumed tasks, if batches take groups in order of completion; checkpoints before the oldest of
                these tasks are dropped.
        """
        self.observe(groups)
        if pending is None:
            del self._checkpoints[:1]
        else:
            # Batches that take groups as they complete may leave tasks behind: the checkpoint before the oldest of them
            # stays.
            oldest = self._oldest(pending)
            del self._checkpoints[: sum(drawn <= oldest for _, drawn in self._checkpoints) - 1]
        # Draws before the first checkpoint are never replayed; what remains is counted from there.
        keep_from = self._checkpoints[0][1] if self._checkpoints else len(self._drawn)
        del self._drawn[:keep_from]
        self._checkpoints = [(state, drawn - keep_from) for state, drawn in self._checkpoints]

    def observe(self, groups: Sequence[Group]) -> None:
        """Update mixture and solve rates by scored groups, including those replaced because their rewards are equal.

        An adaptive mixture that saw only the groups that are left would take every source for one that teaches.

        Raises:
            ConfigError: a reward lacks the part that the curriculum measures.
        """
        self._mixture.observe(groups)
        if self._pools is not None:
            self._pools.observe(groups)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the curriculum since the last call, if there is one."""
        return {} if self._pools is None else self._pools.metrics()

    def _is_consumed(self, task: Task) -> bool:
        return self._consumed[task.source, task.id] > 0

    def _position(self) -> dict[str, object]:
        """Return the state of mixture and pools, without the solve rates, which are large."""
        state = self._mixture.state()
        return state if self._pools is None else {**state, "pools": self._pools.position()}

    def _oldest(self, pending: Iterable[Task]) -> int:
        """Return the index in `_drawn` of the oldest pending task, or len(_drawn) if none is pending."""
        pending_counts = Counter((task.source, task.id) for task in pending)
        oldest = len(self._drawn)
        for place in range(len(self._drawn) - 1, -1, -1):  # of a task drawn twice, the latest draw is the pending one
            if not pending_counts.total():
                break
            if pending_counts[self._drawn[place]] > 0:
                pending_counts[self._drawn[place]] -= 1
                oldest = place
        return oldest

    def state(self) -> dict[str, object]:
        """Return the state before the oldest undelivered batch, with the current weights and solve rates."""
        position = self._position()
        # An old position with the current weights: a resumed run must not undo what was changed or learned since.
        state = self._checkpoints[0][0] | {name: position[name] for name in _OF_NOW} if self._checkpoints else position
        return state if self._pools is None else {**state, "solve_rates": self._pools.rates()}

    def consumed(self, pending: Sequence[Task]) -> list[list[str]]:
        """Return source and id of each task drawn after `state()` that must not be drawn again: all except pending."""
        consumed = Counter(self._drawn)
        consumed.subtract((task.source, task.id) for task in pending)
        # Also tasks that this stream, itself resumed, has not reached yet.
        consumed.update(self._consumed)
        return [list(task) for task in sorted(consumed.elements())]

    def reseed(self, seed: int) -> None:
        """Begin each source again in another order, before the first draw; see `Mixture.reseed`."""
        assert not self._drawn, "restore comes first"
        self._mixture.reseed(seed)

    def restore(self, state: dict[str, object], consumed: Sequence[Sequence[str]]) -> None:
        """Resume from the results of `state` and `consumed`.

        Raises:
            TaskError: they have other sources, or are malformed.
        """
        pools = self._pools
        if pools is not None and ("pools" in state or "solve_rates" in state):
            pools = pools.restored(state.get("pools"), state.get("solve_rates"))
        elif pools is not None:  # saved before there was a curriculum
            pools = DifficultyPools(pools.config)
        self._mixture.restore(state)
        self._pools = pools
        self._checkpoints, self._drawn = [], []
        try:
            self._consumed = Counter((str(source), str(id_)) for source, id_ in consumed)
        except (TypeError, ValueError) as error:
            raise TaskError(f"the saved tasks are not pairs of strings: {error}", hint="start a new run") from error
