"""Tasks as batches draw them, so that what was not delivered can be drawn again."""

from __future__ import annotations

from collections.abc import Sequence

from forge_rl.data.mixture import Mixture
from forge_rl.types import Task


class ResumableTaskStream:
    """A mixture, and where it stood before each batch that is not delivered, so that such can be drawn again."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._before: list[tuple[dict[str, object], int]] = []
        self._drawn: list[tuple[str, str]] = []
        self._skip: set[tuple[str, str]] = set()

    def source_order(self, groups: int) -> list[str]:
        """Sources of the next batch's groups."""
        self._before.append((self._mixture.state(), len(self._drawn)))
        return self._mixture.source_order(groups)

    def draw_from(self, source: str) -> Task:
        """The next task of a source that was not used before."""
        while True:
            task = self._mixture.draw_from(source)
            self._drawn.append((task.source, task.id))
            if (task.source, task.id) not in self._skip:
                return task
            self._skip.discard((task.source, task.id))

    def delivered(self) -> None:
        """A batch was delivered: the oldest."""
        if self._before:
            self._before.pop(0)
        kept = self._before[0][1] if self._before else len(self._drawn)
        self._drawn = self._drawn[kept:]
        self._before = [(state, count - kept) for state, count in self._before]

    def state(self) -> dict[str, object]:
        """Of the mixture, before the oldest batch that is not delivered; with the weights of now."""
        now = self._mixture.state()
        return {**self._before[0][0], "weights": now["weights"]} if self._before else now

    def used(self, planned: Sequence[Task]) -> list[list[str]]:
        """Tasks drawn since then that are not to be drawn again: source and id of each."""
        open_ones = {(task.source, task.id) for task in planned}
        return [list(drawn) for drawn in dict.fromkeys(self._drawn) if drawn not in open_ones] + [
            list(drawn) for drawn in sorted(self._skip)
        ]

    def restore(self, state: dict[str, object], used: Sequence[Sequence[str]]) -> None:
        """Go on from what `state` and `used` said."""
        self._mixture.restore(state)
        self._before, self._drawn = [], []
        self._skip = {(source, id_) for source, id_ in used}
