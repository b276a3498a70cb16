"""Sources: resumable task streams, one file per kind, each with a held-out part that is never trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from forge_rl.data.sources.iterable import IterableSource
from forge_rl.data.sources.reasoning_gym import ReasoningGymSource
from forge_rl.data.sources.rows import Columns
from forge_rl.data.sources.table_source import TableSource
from forge_rl.types import Task

__all__ = [
    "Columns",
    "IterableSource",
    "ReasoningGymSource",
    "Reseedable",
    "Source",
    "TableSource",
]


@runtime_checkable
class Source(Protocol):
    """Resumable stream of tasks, deterministic for a seed.

    source = ReasoningGymSource("chain_sum", {"max_terms": 3}, seed=0, held_out_share=0.1)
    task = source.draw()
    source.restore(json.loads(json.dumps(source.state())))

    A source that repeats its tasks also has a number `epoch`: passes over them so far. One whose tasks never come again
    has `is_endless`, which is True.
    """

    @property
    def name(self) -> str:
        """Name of the source in logs and in the mixture."""

    def draw(self) -> Task:
        """Return the next task to train on; never a held-out one."""

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return the first `tasks` held-out tasks, or all if fewer: distinct questions, the same for every seed,
        whose problems are never drawn in any wording."""

    def state(self) -> dict[str, object]:
        """Return the position of the stream, as JSON."""

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from a saved position."""


@runtime_checkable
class Reseedable(Protocol):
    """A source whose order depends on a seed that can change."""

    def reseed(self, seed: int) -> None:
        """Begin again, in the order of another seed."""
