"""Interface of a run's source of batches: rollouts, or given examples."""

from __future__ import annotations

from typing import Protocol

from forge_rl.metrics import RolloutStatus
from forge_rl.types import Batch


class BatchSource(Protocol):
    """Delivers batches of the mixture, and resumes after the last one that was trained on.

    batch = await source.next_batch()
    """

    last: Batch | None
    """The last delivered batch."""

    async def next_batch(self) -> Batch:
        """Return the next batch: P groups in the mixture's proportions."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""

    def status(self) -> RolloutStatus:
        """Return the progress of the next batch."""

    def state(self) -> dict[str, object]:
        """Return the state as JSON; tasks of batches that were not delivered will be drawn again."""

    async def restore(self, state: dict[str, object]) -> None:
        """Continue from a result of `state`.

        Raises:
            TaskError: the state was not made by `state`.
        """

    async def reset(self, state: dict[str, object], *, seed: int) -> None:
        """Begin again from the state before the first batch, with a seed for the order of tasks.

        Raises:
            TaskError: a source cannot begin again, or has no other order.
        """
