"""The parts of a run that are saved, restored and rolled back together."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.rollout.examples import Examples
from forge_rl.rollout.executor import RolloutExecutor
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
