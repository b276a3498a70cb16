"""Checkpoints of a run: the controller's state beside the trainer's, of the same step, and the way back to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_rl.checkpoint import Checkpoint, Checkpoints
from forge_rl.errors import CheckpointError, ReplicaError
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.services import Services


@dataclass(frozen=True, kw_only=True)
class ControllerState:
    """The controller's part of a checkpoint."""

    rollouts: dict[str, object]
    scores: Mapping[int, float]
    """Held-out score by step."""
    seconds: float
    """Wall time of the run until then."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, step: int) -> ControllerState:
        """Reads it from a checkpoint whose training state turned out to be of this step.

        Raises:
            CheckpointError: something is missing or broken, or the steps differ.
        """
        state = checkpoint.controller_state()
        hint = f"delete {checkpoint.folder} to continue from the checkpoint before it"
        rollouts, scores, seconds = state.get("rollouts"), state.get("scores"), state.get("seconds")
        if not isinstance(rollouts, dict) or not isinstance(scores, dict) or not isinstance(seconds, int | float):
            raise CheckpointError(f"{checkpoint.folder}/controller.json lacks what a run continues from", hint=hint)
        if step != checkpoint.step:
            raise CheckpointError(f"{checkpoint.folder} holds the training state of step {step}", hint=hint)
        scored = {int(at): float(score) for at, score in scores.items()}
        return cls(rollouts=rollouts, scores=scored, seconds=float(seconds))


class Checkpointer:
    """Saves a run between two steps, and takes it back to what was saved.

    Args:
        checkpoints: of this run.
        services: the trainer saves; after a restart, engines and weight store follow it.
        rollouts: restored to the same step.
        model: folder that the run started from.
        saved: step of the checkpoint that the run continues from.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        services: Services,
        rollouts: RolloutExecutor,
        *,
        model: Path,
        saved: int | None,
    ) -> None:
        self._checkpoints = checkpoints
        self._services = services
        self._rollouts = rollouts
        self._model = model
        self._first = rollouts.state()
        self.saved = saved
        """Step of the newest checkpoint; None where there is none."""
        self.end_step()

    def end_step(self) -> None:
        """Notes where the rollouts stand: soon they are ahead, and a checkpoint needs both of the same step."""
        self._ended = self._services.trainer.version, self._rollouts.state()

    async def save(self, scores: Mapping[int, float], seconds: float) -> None:
        """Writes a checkpoint of the last finished step.

        Raises:
            CheckpointError: no space, or the folder cannot be written.
        """
        trainer = self._services.trainer
        if trainer.version != self._ended[0]:
            self.end_step()
        step, rollouts = self._ended
        state = {
            "step": step,
            "rollouts": rollouts,
            "scores": {str(at): score for at, score in scores.items()},
            "seconds": seconds,
        }
        async with self._checkpoints.writing(step, state, bytes_needed=trainer.parameters * 16) as folder:
            await trainer.save(folder, model=self._model)
        self.saved = step

    def latest(self) -> Checkpoint | None:
        """Finds the newest checkpoint."""
        return self._checkpoints.latest()

    async def rollback(self) -> int:
        """Restarts the trainer from the last checkpoint, and takes rollouts, weight store and engines back to it.

        Returns:
            The step that the run goes on from.

        Raises:
            ServiceError: the trainer died once too often.
        """
        while True:
            checkpoint = self.latest()
            try:
                await self._services.devices.clear()
                await self._services.trainer.restart(checkpoint.training.resolve() if checkpoint else None)
                await self._follow(checkpoint)
            except ReplicaError as error:  # it died again; where no restart is left, another error is raised
                if error.service != "trainer":
                    raise
            else:
                self.saved = checkpoint.step if checkpoint else None
                self.end_step()
                return self._services.trainer.version

    async def _follow(self, checkpoint: Checkpoint | None) -> None:
        """Takes everything but the trainer to the trainer's step."""
        trainer, generator, weights = self._services.trainer, self._services.generator, self._services.weights
        step = trainer.version
        await self._rollouts.restore(ControllerState.load(checkpoint, step).rollouts if checkpoint else self._first)
        await weights.rollback(step)
        if await weights.latest() != step:  # else it is kept, and holds the same weights
            await trainer.publish(weights, dtype=generator.dtype)
        await generator.load(weights, step)
