"""A mixture's tasks in the order of batches, which can resume at the oldest batch that was not delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from forge_rl.data.mixture import Mixture
from forge_rl.errors import TaskError
from forge_rl.types import Group, Task

_OF_NOW = ("weights", "adaptive")
"""Parts of a mixture's state that no draw changes."""


class ResumableTaskStream:
    """Draws a mixture's tasks for batches that are planned ahead, and resumes without repeating or losing one.

    A saved state is a checkpoint of the mixture before the oldest undelivered batch, and the tasks drawn after it that
    are consumed already: a resumed stream draws from there and passes over those, each as often as it was consumed.
    """

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._checkpoints: list[tuple[dict[str, object], int]] = []
        """State of the mixture before each undelivered batch, and how many of `_drawn` precede it."""
        self._drawn: list[tuple[str, str]] = []
        """Source and id of each task drawn since the oldest checkpoint."""
        self._consumed: Counter[tuple[str, str]] = Counter()
        """Tasks that were consumed before the stream was restored and have not been passed over yet."""

    def source_order(self, groups: int) -> list[str]:
        """Allot the next batch's groups to sources."""
        self._checkpoints.append((self._mixture.state(), len(self._drawn)))
        return self._mixture.source_order(groups)

    def draw_from(self, source: str) -> Task:
        """Return the next task of a source that is not consumed yet."""
        while True:
            task = self._mixture.draw_from(source)
            self._drawn.append((task.source, task.id))
            if self._consumed[task.source, task.id] <= 0:
                return task
            self._consumed[task.source, task.id] -= 1

    def batch_delivered(self, groups: Sequence[Group] = (), *, pending: Iterable[Task] | None = None) -> None:
        """Drop the checkpoint of the oldest batch, which need not be drawn again; the mixture sees its groups.

        Args:
            groups: of the batch.
            pending: unconsumed tasks, where batches take groups in the order of completion: checkpoints before the
                oldest of these tasks are dropped.
        """
        self._mixture.observe(groups)
        if pending is None:
            del self._checkpoints[:1]
        else:
            oldest = self._oldest(pending)
            del self._checkpoints[: sum(drawn <= oldest for _, drawn in self._checkpoints) - 1]
        keep_from = self._checkpoints[0][1] if self._checkpoints else len(self._drawn)
        del self._drawn[:keep_from]
        self._checkpoints = [(state, drawn - keep_from) for state, drawn in self._checkpoints]

    def _oldest(self, pending: Iterable[Task]) -> int:
        """Return the place of the oldest pending task among those drawn; their number if none is pending."""
        left = Counter((task.source, task.id) for task in pending)
        oldest = len(self._drawn)
        for place in range(len(self._drawn) - 1, -1, -1):  # of tasks drawn twice, the pending ones are the latest
            if not left.total():
                break
            if left[self._drawn[place]] > 0:
                left[self._drawn[place]] -= 1
                oldest = place
        return oldest

    def state(self) -> dict[str, object]:
        """State of the mixture before the oldest undelivered batch, with its weights of now."""
        now = self._mixture.state()
        return self._checkpoints[0][0] | {name: now[name] for name in _OF_NOW} if self._checkpoints else now

    def consumed(self, pending: Sequence[Task]) -> list[list[str]]:
        """Source and id of each task drawn after `state()` that must not be drawn again: all but the pending ones."""
        consumed = Counter(self._drawn)
        consumed.subtract((task.source, task.id) for task in pending)
        consumed.update(self._consumed)
        return [list(task) for task in sorted(consumed.elements())]

    def restore(self, state: dict[str, object], consumed: Sequence[Sequence[str]]) -> None:
        """Continue from what `state` and `consumed` returned.

        Raises:
            TaskError: they are of other sources, or no such thing.
        """
        self._mixture.restore(state)
        self._checkpoints, self._drawn = [], []
        try:
            self._consumed = Counter((str(source), str(id_)) for source, id_ in consumed)
        except (TypeError, ValueError) as error:
            raise TaskError(f"the saved tasks are no pairs of texts: {error}", hint="start a new run") from error
