"""The end of a run, however it comes: its last evaluation, its checkpoint and its summary."""

from __future__ import annotations

from typing import Any

from forge_rl.errors import CheckpointError
from forge_rl.metrics.sinks import RunOutcome
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.records.monitor import RunEnd, RunMonitor
from forge_rl.run.run import Run
from forge_rl.run.service_set import Services


class Ending:
    """Saves a run's progress once its body has ended, and writes its summary."""

    def __init__(self, run: Run[Any], services: Services, checkpointer: Checkpointer, monitor: RunMonitor) -> None:
        self._run = run
        self._services = services
        self._checkpointer = checkpointer
        self._monitor = monitor

    async def finish(self) -> None:
        """Complete a run at the end of its body: its checkpoint, its summary and, after its last step, its pending
        evaluation. A body that ends before the last step stops the run."""
        if self._run.step < self._run.config.steps:
            await self.stop()
            return
        await self._run.finish_evaluation()
        await self._checkpointer.finish_save()
        self._summarise("finished", show=True)

    async def stop(self, *, show: bool = False) -> None:
        """Complete a run that was stopped before its last step: its checkpoint, if it writes any, and its summary.

        Args:
            show: also show the summary.

        Raises:
            Exception: the attempt to save it failed; the summary is written.
        """
        try:
            await self.save()
        except Exception as error:
            self._summarise("failed", f"step {self._run.step} could not be saved: {error}")
            raise
        self._summarise("stopped", show=show)

    async def fail(self, error: Exception, cause: str) -> None:
        """Complete a run that an error ends, as `stop` does, and add the saved step to the error as a note."""
        # The user needs the error that ended the run, and not one of the attempt to save it.
        try:
            await self.save()
        except Exception as save_error:
            error.add_note(f"step {self._run.step} could not be saved: {save_error}")
        if (saved_step := self._checkpointer.saved) is not None:
            folder = self._monitor.folder / "checkpoints"
            error.add_note(f"step {saved_step} is saved in {folder}; the same command resumes from there")
        self._summarise("failed", cause)

    async def save(self) -> None:
        """Save the steps since the last checkpoint, if the run writes checkpoints and its trainers are alive.

        Nothing is saved of a run that was rolling back, whose parts are then of different steps. A step of which only
        a part of the updates were taken, such as the trainer's without the critic's, is not saved; nor are the steps
        before it, whose state is gone.
        """
        run, trainers, log = self._run, self._services.trainers, self._monitor.log
        if run.config.checkpoint_every == 0:
            return
        if self._checkpointer.rolling_back:
            log.event(
                "nothing is saved, as the run was rolling back; the same command resumes from step "
                f"{self._checkpointer.saved or 0}"
            )
            return
        # Only a trainer's own processes hold its weights and optimizer state.
        if not all(trainer.alive for trainer in trainers):
            return
        for trainer in trainers:
            # The body may have been interrupted in a step that the ranks are still computing.
            await trainer.wait_idle()
        await self._checkpointer.close()
        if cause := self._checkpointer.half_trained:
            log.event(
                f"step {run.step + 1} is not saved, as {cause}; the same command resumes from step "
                f"{self._checkpointer.saved or 0}"
            )
            return
        # Stopped between the updates and the end of the step: the step is complete, and counts.
        if self._checkpointer.trained:
            run.log({}, run.batches.last)
        if run.step not in (0, self._checkpointer.saved):
            await self._checkpointer.begin_save()
            await self._checkpointer.finish_save()
            log.event(f"saved step {run.step}; the same command resumes from there")

    def _summarise(self, outcome: RunOutcome, cause: str = "", *, show: bool = False) -> None:
        checkpoints = self._checkpointer.checkpoints
        latest = best = None
        try:
            latest, best = checkpoints.latest(), checkpoints.best()
        except CheckpointError as error:  # an unreadable folder must not replace the cause of the end
            self._monitor.log.warn(f"the summary names no checkpoint: {error}")
        end = RunEnd(
            outcome=outcome,
            cause=cause,
            step=self._run.step,
            seconds=self._checkpointer.seconds,
            scores=self._run.scores,
            checkpoint=latest,
            best=best,
        )
        self._monitor.summarise(end, show=show)
