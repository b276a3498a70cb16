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
        self.step = 0
        """Number of finished steps, which are batches that were trained on."""
        self.scores: dict[int, float] = {}
        """Held-out score by step."""
        self.saved: int | None = None
        """Step of the newest checkpoint; None where there is none."""
        self._first = rollouts.state()
        self._note()

    @property
    def seconds(self) -> float:
        """Wall time of the run, that before it was continued included."""
        return self._seconds_before + time.monotonic() - self._began

    @property
    def trained(self) -> bool:
        """True if the trainer took updates since the last step ended."""
        return self._services.trainer.updates != self._ended[0]

    def end_step(self) -> None:
        """Counts a step that is finished."""
        self.step += 1
        self._note()

    def _note(self) -> None:
        """Notes where the rollouts stand: soon they are ahead, and a checkpoint needs both of the same step."""
        self._ended = self._services.trainer.updates, self._rollouts.state()

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint of an earlier process, which the trainer has loaded.

        Raises:
            CheckpointError: it lacks something, or its parts are of different steps.
        """
        rollouts, self.scores, self._seconds_before = self._read(checkpoint)
        await self._rollouts.restore(rollouts)
        self._first = self._rollouts.state()
        self.step = self.saved = checkpoint.step
        self._note()

    async def save(self) -> Checkpoint:
        """Writes a checkpoint of the last finished step.

        Raises:
            CheckpointError: no space, or the folder cannot be written.
        """
        trainer, step = self._services.trainer, self.step
        if self.trained:
            self._note()
        updates, rollouts = self._ended
        scores = {str(at): score for at, score in self.scores.items()}
        state = {"step": step, "updates": updates, "rollouts": rollouts, "scores": scores, "seconds": self.seconds}
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
                return self.step

    async def _follow(self, checkpoint: Checkpoint | None) -> None:
        """Brings everything but the trainer to the step of the checkpoint."""
        trainer, generator, weights = self._services.trainer, self._services.generator, self._services.weights
        await self._rollouts.restore(self._read(checkpoint)[0] if checkpoint else self._first)
        await weights.rollback(trainer.version - 1)
        version = await trainer.publish(weights, dtype=generator.dtype)
        await generator.load(weights, version)
        self.saved = checkpoint.step if checkpoint else None
        self.step = self.saved or 0
        self.scores = {at: score for at, score in self.scores.items() if at <= self.step}
        self._note()

    def _read(self, checkpoint: Checkpoint) -> tuple[dict[str, object], dict[int, float], float]:
        """Reads the rollouts' state, the scores, and the seconds of the run until then."""
        state, updates = checkpoint.controller_state(), self._services.trainer.updates
        rollouts, scores, seconds = state.get("rollouts"), state.get("scores"), state.get("seconds")
        hint = f"delete {checkpoint.folder} to continue from the checkpoint before it"
        if not isinstance(rollouts, dict) or not isinstance(scores, dict) or not isinstance(seconds, int | float):
            raise CheckpointError(f"{checkpoint.folder}/controller.json lacks what a run continues from", hint=hint)
        if updates != state.get("updates"):
            raise CheckpointError(
                f"{checkpoint.folder} holds a training state of {updates} updates, and the state of a run of "
                f"{state.get('updates')}",
                hint=hint,
            )
        try:
            return rollouts, {int(at): float(score) for at, score in scores.items()}, float(seconds)
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{checkpoint.folder}/controller.json holds a score: {error}", hint=hint) from error
