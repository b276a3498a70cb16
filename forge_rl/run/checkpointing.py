"""Checkpoints of a run: the controller's state beside the trainer's, of the same step, and the way back to them."""

from __future__ import annotations

import time
from pathlib import Path

from forge_rl.checkpoint import Checkpoint, Checkpoints
from forge_rl.errors import CheckpointError, ReplicaError
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.services import Services


class Checkpointer:
    """Saves a run between two steps, and rolls it back to what was saved.

    Args:
        services: the trainer saves; after its restart, engines and weight store follow it.
        rollouts: saved and restored with the trainer.
        model: folder that the run started from.
    """

    def __init__(self, checkpoints: Checkpoints, services: Services, rollouts: RolloutExecutor, model: Path) -> None:
        self._checkpoints = checkpoints
        self._services = services
        self._rollouts = rollouts
        self._model = model
        self._began = time.monotonic()
        self._seconds_before = 0.0
        self.scores: dict[int, float] = {}
        """Held-out score by step."""
        self.saved: int | None = None
        """Step of the newest checkpoint; None where there is none."""
        self._first = rollouts.state()
        self.end_step()

    @property
    def seconds(self) -> float:
        """Wall time of the run, that before it was continued included."""
        return self._seconds_before + time.monotonic() - self._began

    def end_step(self) -> None:
        """Notes where the rollouts stand: soon they are ahead, and a checkpoint needs both of the same step."""
        self._ended = self._services.trainer.version, self._rollouts.state()

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint of an earlier process, which the trainer has loaded.

        Raises:
            CheckpointError: it lacks something, or its parts are of different steps.
        """
        rollouts, self.scores, self._seconds_before = self._read(checkpoint)
        await self._rollouts.restore(rollouts)
        self._first = self._rollouts.state()
        self.saved = checkpoint.step
        self.end_step()

    async def save(self) -> Checkpoint:
        """Writes a checkpoint of the last finished step.

        Raises:
            CheckpointError: no space, or the folder cannot be written.
        """
        trainer = self._services.trainer
        if trainer.version != self._ended[0]:
            self.end_step()
        step, rollouts = self._ended
        scores = {str(at): score for at, score in self.scores.items()}
        state = {"step": step, "rollouts": rollouts, "scores": scores, "seconds": self.seconds}
        await self._services.devices.hand_to_trainer(idle=True)  # an evaluation left shared ones to the engines
        async with self._checkpoints.writing(step, state, bytes_needed=trainer.parameters * 16) as folder:
            await trainer.save(folder, model=self._model)
        self.saved = step
        latest = self._checkpoints.latest()
        assert latest is not None, "a checkpoint was just written"
        return latest

    async def rollback(self) -> int:
        """Restarts the trainer from the last checkpoint, and rolls everything else back to it.

        Returns:
            The step that the run goes on from.

        Raises:
            ServiceError: the trainer died once too often.
        """
        while True:
            checkpoint = self._checkpoints.latest()
            try:
                await self._services.devices.free_devices()
                await self._services.trainer.restart(checkpoint.training.resolve() if checkpoint else None)
                await self._follow(checkpoint)
            except ReplicaError as error:  # it died again; where no restart is left, another error is raised
                if error.service != "trainer":
                    raise
            else:
                return self._services.trainer.version

    async def _follow(self, checkpoint: Checkpoint | None) -> None:
        """Brings everything but the trainer to the step that the trainer is at."""
        trainer, generator, weights = self._services.trainer, self._services.generator, self._services.weights
        step = trainer.version
        await self._rollouts.restore(self._read(checkpoint)[0] if checkpoint else self._first)
        await weights.rollback(step)
        if await weights.latest() != step:  # else it is kept, and holds the same weights
            await trainer.publish(weights, dtype=generator.dtype)
        await generator.load(weights, step)
        self.scores = {at: score for at, score in self.scores.items() if at <= step}
        self.saved = checkpoint.step if checkpoint else None
        self.end_step()

    def _read(self, checkpoint: Checkpoint) -> tuple[dict[str, object], dict[int, float], float]:
        """Reads the rollouts' state, the scores, and the seconds of the run until then."""
        state, step = checkpoint.controller_state(), self._services.trainer.version
        rollouts, scores, seconds = state.get("rollouts"), state.get("scores"), state.get("seconds")
        hint = f"delete {checkpoint.folder} to continue from the checkpoint before it"
        if not isinstance(rollouts, dict) or not isinstance(scores, dict) or not isinstance(seconds, int | float):
            raise CheckpointError(f"{checkpoint.folder}/controller.json lacks what a run continues from", hint=hint)
        if step != checkpoint.step:
            raise CheckpointError(f"{checkpoint.folder} holds the training state of step {step}", hint=hint)
        return rollouts, {int(at): float(score) for at, score in scores.items()}, float(seconds)
