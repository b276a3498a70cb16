"""The parts of a run that are saved, restored and rolled back together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge_rl.rollout.examples import Examples
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.checkpoints.kept import Stateful
from forge_rl.run.evaluation.evaluator import Evaluator
from forge_rl.run.live.settings import LiveSettings
from forge_rl.run.service_set import Services


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of a run that are always at the same step."""

    services: Services
    batches: RolloutExecutor | Examples
    """Source of the run's batches."""
    evaluator: Evaluator
    live: LiveSettings
    """Settings that can change during the run."""


class TrainedPart(Stateful, Protocol):
    """Weights that are trained next to the trainer's own, such as adapters by name, and saved in files of their own.

    Its state, which is saved with the controller's, says which updates the files have to be of.
    """

    @property
    def updates(self) -> int:
        """Number of updates that it has taken."""
        ...

    @property
    def stepping(self) -> bool:
        """True from the first update of a step to the last, and after a step that was interrupted between them."""
        ...

    async def save(self, folder: Path) -> None:
        """Write its weights into a checkpoint's folder."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepState:
    """State of a run at the end of a step, which is saved and restored as one."""

    step: int
    updates: tuple[int, ...]
    """Numbers of updates taken by the trainer and, if there is one, the critic."""
    rollouts: dict[str, Any]
    """State of the batches just after the step's own; the batches themselves soon run ahead of it."""
    objects: dict[str, Any]
    """States of the recipe's own objects."""
    parts: Mapping[str, int]
    """Numbers of updates of the trained parts, by name."""
