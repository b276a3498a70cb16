"""Checkpoints of a run: the controller's state beside the trainer's, of the same step, and the way back to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from forge_rl.checkpoint import Checkpoint, Checkpoints
from forge_rl.errors import CheckpointError, ReplicaError
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.live import LiveSettings, is_live_state
from forge_rl.run.services import Services


class Checkpointer:
    """Saves a run between two steps, and rolls it back to what was saved.

        await checkpointer.begin_save()  # the trainer's state is copied
        ...  # steps; what was copied is written meanwhile
        checkpoint = await checkpointer.finish_save()

    Args:
        services: the trainer saves; after its restart, engines and weight store follow it.
        rollouts: saved and restored with the trainer.
        model: folder that the run started from.
        live: what was changed while the run goes: saved, taken up again, and no part of a rollback.
        warn: is told what went wrong where the run goes on.
        keep_best: mark the checkpoint with the best score, which then stays.
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
        """Number of finished steps, which are batches that were trained on."""
        self.scores: dict[int, float] = {}
        """Score of the first set by step."""
        self.evaluation: tuple[int, int] | None = None
        """Step and version of the evaluation that is under way: what goes on from a checkpoint starts it again."""
        self.saved: int | None = None
        """Step of the newest checkpoint that is written; None where there is none."""
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

    def note_score(self, step: int, score: float) -> None:
        """Notes what an evaluation came to, which is under way no more."""
        self.evaluation = None
        self.scores[step] = score
        self._mark_best()

    def end_step(self) -> None:
        """Counts a step that is finished."""
        self.step += 1
        self._note()

    def _note(self) -> None:
        """Notes where the rollouts stand: soon they are ahead, and a checkpoint needs both of the same step."""
        self._ended = self._services.trainer.updates, self._rollouts.state()

    async def resume(self, checkpoint: Checkpoint | None) -> None:
        """Goes on from a checkpoint of an earlier process, which the trainer has loaded, if any, and with what was
        changed live after it.

        Raises:
            CheckpointError: it lacks something, or its parts are of different steps.
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
        """Begins to write a checkpoint of the last finished step; returns once the trainer's state is copied.

        What was begun before is finished first. One that cannot be written is told, and the run goes on.

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
        """Waits until the checkpoint that was begun last is written; returns it, or None if there is none.

        Raises:
            CheckpointError: no space, or the folder cannot be written.
            ReplicaError: the trainer died before.
        """
        if self._saving is None:
            return None
        await asyncio.wait([self._saving])
        found = self._saving.result()
        if isinstance(found, CheckpointError):
            raise found
        return found

    async def close(self) -> None:
        """Waits until nothing is written any more, whatever becomes of it."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    async def _save(self, copied: asyncio.Future[None]) -> Checkpoint | CheckpointError:
        """Writes a checkpoint of the last finished step; returns the error if it cannot be written."""
        step = self.step
        try:
            return await self._write(copied)
        except CheckpointError as error:
            self._warn(f"step {step}: there is no checkpoint of it: {error}")
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
        await self._services.devices.hand_to_trainer(idle=True)  # an evaluation left shared ones to the engines
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
        """Restarts the trainer from the last checkpoint that is whole, and rolls everything else back to it.

        Returns:
            The step that the run goes on from.

        Raises:
            ServiceError: the trainer died once too often.
        """
        if self._saving is not None:  # its writers are gone; what it still does to the disk is over when it ends
            self._saving.cancel()
            await asyncio.wait([self._saving])
            self._saving = None
        while True:
            checkpoint = await asyncio.to_thread(self._checkpoints.set_damaged_aside, self._warn)
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
        """Marks the checkpoint with the highest score, the earliest of several, among those whose score is known.

        Where the disk has no room for the mark, the next one has it.
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
        """Reads the rollouts' state, the scores, the seconds of the run until then, and the evaluation under way."""
        state, updates = checkpoint.controller_state(), self._services.trainer.updates
        rollouts, scores, seconds = state.get("rollouts"), state.get("scores"), state.get("seconds")
        hint = f"delete {checkpoint.folder} to continue from the checkpoint before it"
        lacks = CheckpointError(f"{checkpoint.folder}/controller.json lacks what a run continues from", hint=hint)
        if not isinstance(rollouts, dict) or not isinstance(scores, dict) or not isinstance(seconds, int | float):
            raise lacks
        if (live := state.get("live")) is not None and not is_live_state(live):  # None: of before there was one
            raise lacks
        if updates != state.get("updates"):
            raise CheckpointError(
                f"{checkpoint.folder} holds a training state of {updates} updates, and the state of a run of "
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
            raise CheckpointError(f"{checkpoint.folder}/controller.json holds a score: {error}", hint=hint) from error


def _with_mixture(rollouts: dict[str, object], changed: Mapping[str, object]) -> dict[str, object]:
    """Replaces parts of the mixture in a state of the rollouts, which refuse it if there is none."""
    mixture = rollouts.get("mixture")
    return {**rollouts, "mixture": {**mixture, **changed}} if isinstance(mixture, dict) else rollouts
