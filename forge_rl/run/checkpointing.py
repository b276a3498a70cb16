"""Checkpoints of a run: saves and restores the states of controller and trainer at the same step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from forge_rl.errors import CheckpointError, ReplicaError
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.checkpoints import Checkpoint, Checkpoints
from forge_rl.run.live import LiveSettings, is_live_state
from forge_rl.run.services import Services


class Checkpointer:
    """Saves a run between steps, and rolls it back to a checkpoint.

        await checkpointer.begin_save()  # the trainer's state is copied
        ...  # steps, while the copy is written
        checkpoint = await checkpointer.finish_save()

    Args:
        services: the trainer, which is saved, and the engines and weight store, which follow it after a restart.
        rollouts: their state is saved and restored with the trainer's.
        model: folder of the initial model.
        live: changes made during the run: saved and resumed, but not rolled back.
        warn: called with each problem that does not stop the run.
        keep_best: mark the checkpoint with the best score, so that it is kept.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        services: Services,
        rollouts: RolloutExecutor,
        model: Path,
        live: LiveSettings,
        *,
        warn: Callable[[str], None],
        keep_best: bool = True,
    ) -> None:
        self._checkpoints = checkpoints
        self._services = services
        self._rollouts = rollouts
        self._model = model
        self._live = live
        self._warn = warn
        self._keep_best = keep_best
        self._saving: asyncio.Task[Checkpoint | CheckpointError] | None = None
        self._began = time.monotonic()
        self._seconds_before = 0.0
        self.step = 0
        """Number of finished steps, that is, trained batches."""
        self.scores: dict[int, float] = {}
        """Score of the first evaluation set, by step."""
        self.evaluation: tuple[int, int] | None = None
        """Step and version of the evaluation in progress, which is restarted on resume."""
        self.saved: int | None = None
        """Step of the newest complete checkpoint; None if there is none."""
        self._first = rollouts.state()
        self._note()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, including the time before it was resumed."""
        return self._seconds_before + time.monotonic() - self._began

    @property
    def trained(self) -> bool:
        """True if the trainer took updates since the end of the last step."""
        return self._services.trainer.updates != self._ended[0]

    def note_score(self, step: int, score: float) -> None:
        """Record the score of an evaluation that has finished."""
        self.evaluation = None
        self.scores[step] = score
        self._mark_best()

    def end_step(self) -> None:
        """Count a finished step."""
        self.step += 1
        self._note()

    def _note(self) -> None:
        """Record the rollouts' state, which soon runs ahead: a checkpoint needs it and the trainer's at the same
        step."""
        self._ended = self._services.trainer.updates, self._rollouts.state()

    async def resume(self, checkpoint: Checkpoint | None) -> None:
        """Resume from a checkpoint of an earlier process, if any, which the trainer has loaded, and apply later live
        changes.

        Raises:
            CheckpointError: it is incomplete, or its parts are from different steps.
        """
        rollouts, live = self._first, None
        if checkpoint is not None:
            rollouts, self.scores, self._seconds_before, self.evaluation = self._read(checkpoint)
            live = checkpoint.controller_state().get("live")
            self.step = self.saved = checkpoint.step
        live, mixture = self._live.unsaved(self.step) or (live, {})
        if checkpoint is not None or mixture:
            await self._rollouts.restore(_with_mixture(rollouts, mixture))
        await self._live.resume(live)
        self._first = self._rollouts.state()
        self._note()
        self._mark_best()

    async def begin_save(self) -> None:
        """Begin to write a checkpoint of the last finished step; returns once the trainer's state is copied.

        Waits for the previous checkpoint first. If one cannot be written, that is a warning and the run continues.

        Raises:
            ReplicaError: the trainer died.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
            self._saving.result()
        copied = asyncio.get_running_loop().create_future()
        self._saving = asyncio.create_task(self._save(copied))
        await asyncio.wait([self._saving, copied], return_when=asyncio.FIRST_COMPLETED)
        if self._saving.done():
            self._saving.result()

    async def finish_save(self) -> Checkpoint | None:
        """Wait until the last checkpoint begun is written; returns it, or None if there is none.

        Raises:
            CheckpointError: the disk is full, or the folder is not writable.
            ReplicaError: the trainer died first.
        """
        if self._saving is None:
            return None
        await asyncio.wait([self._saving])
        found = self._saving.result()
        if isinstance(found, CheckpointError):
            raise found
        return found

    async def close(self) -> None:
        """Wait until nothing is being written, ignoring failures."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    async def _save(self, copied: asyncio.Future[None]) -> Checkpoint | CheckpointError:
        """Write a checkpoint of the last finished step; returns the error if it cannot be written."""
        step = self.step
        try:
            return await self._write(copied)
        except CheckpointError as error:
            self._warn(f"step {step} has no checkpoint: {error}")
            return error

    async def _write(self, copied: asyncio.Future[None]) -> Checkpoint:
        trainer, step = self._services.trainer, self.step
        if self.trained:
            self._note()
        updates, rollouts = self._ended
        scores = {str(at): score for at, score in self.scores.items()}
        state = {"step": step, "updates": updates, "rollouts": rollouts, "scores": scores, "seconds": self.seconds}
        state["live"] = self._live.state()
        if self.evaluation is not None:
            state["evaluation"] = list(self.evaluation)
        spare = self.evaluation[0] if self.evaluation and self._keep_best else None
        await self._services.devices.hand_to_trainer(idle=True)  # after an evaluation, the engines hold shared devices
        needed = trainer.parameters * 16
        async with self._checkpoints.writing(step, state, bytes_needed=needed, spare=spare) as folder:
            await trainer.save(folder, model=self._model)
            copied.set_result(None)
            await trainer.finish_save()
        self.saved = step
        self._mark_best()
        latest = self._checkpoints.latest()
        assert latest is not None, "a checkpoint was just written"
        return latest

    async def rollback(self) -> int:
        """Restart the trainer from the last intact checkpoint, and roll everything else back to it.

        Returns:
            The step from which the run continues.

        Raises:
            ServiceError: no trainer restart is left.
        """
        if self._saving is not None:  # its writers are gone; wait for any remaining disk operations
            self._saving.cancel()
            await asyncio.wait([self._saving])
            self._saving = None
        while True:
            checkpoint = await asyncio.to_thread(self._checkpoints.set_damaged_aside, self._warn)
            try:
                await self._services.devices.free_devices()
                await self._services.trainer.restart(checkpoint.training.resolve() if checkpoint else None)
                await self._follow(checkpoint)
            except ReplicaError as error:  # it died again; with no restart left, the error is another one
                if error.service != "trainer":
                    raise
            else:
                return self.step

    async def _follow(self, checkpoint: Checkpoint | None) -> None:
        """Bring everything except the trainer to the checkpoint's step."""
        trainer, generator, weights = self._services.trainer, self._services.generator, self._services.weights
        rollouts = self._read(checkpoint)[0] if checkpoint else self._first
        await self._rollouts.restore(_with_mixture(rollouts, self._live.mixture_now()))
        await weights.rollback(trainer.version - 1)
        version = await trainer.publish(weights, dtype=generator.dtype)
        await generator.load(weights, version)
        self.saved = checkpoint.step if checkpoint else None
        self.step = self.saved or 0
        self.scores = {at: score for at, score in self.scores.items() if at <= self.step}
        if self.evaluation is not None and self.evaluation[0] > self.step:
            self.evaluation = None
        self._note()
        self._mark_best()

    def _mark_best(self) -> None:
        """Mark the checkpoint with the highest known score, the earliest on a tie.

        If the disk is full, the next checkpoint tries again.
        """
        if self._keep_best:
            scored = [checkpoint.step for checkpoint in self._checkpoints.all() if checkpoint.step in self.scores]
            try:
                self._checkpoints.mark_best(max(scored, key=lambda step: (self.scores[step], -step), default=None))
            except CheckpointError as error:
                self._warn(str(error))

    def _read(
        self, checkpoint: Checkpoint
    ) -> tuple[dict[str, object], dict[int, float], float, tuple[int, int] | None]:
        """Read the rollouts' state, the scores, the run's seconds so far, and the evaluation in progress."""
        state, updates = checkpoint.controller_state(), self._services.trainer.updates
        rollouts, scores, seconds = state.get("rollouts"), state.get("scores"), state.get("seconds")
        hint = f"delete {checkpoint.folder} to resume from the previous checkpoint"
        lacks = CheckpointError(f"{checkpoint.folder}/controller.json lacks state that resuming needs", hint=hint)
        if not isinstance(rollouts, dict) or not isinstance(scores, dict) or not isinstance(seconds, int | float):
            raise lacks
        if (live := state.get("live")) is not None and not is_live_state(live):  # None: saved by an older version
            raise lacks
        if updates != state.get("updates"):
            raise CheckpointError(
                f"{checkpoint.folder} holds a training state of {updates} updates, but a controller state of "
                f"{state.get('updates')}",
                hint=hint,
            )
        try:
            known = {int(at): float(score) for at, score in scores.items()}
            match state.get("evaluation"):
                case None:
                    evaluation = None
                case [int(step), int(version)]:
                    evaluation = step, version
                case other:
                    raise ValueError(f"an evaluation {other!r:.80}")
            return rollouts, known, float(seconds), evaluation
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{checkpoint.folder}/controller.json is invalid: {error}", hint=hint) from error


def _with_mixture(rollouts: dict[str, object], changed: Mapping[str, object]) -> dict[str, object]:
    """Replace parts of the mixture in a rollouts state; a state without one is unchanged, and refused on restore."""
    mixture = rollouts.get("mixture")
    return {**rollouts, "mixture": {**mixture, **changed}} if isinstance(mixture, dict) else rollouts
