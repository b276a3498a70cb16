"""Saves and restores the states of controller and trainer at the same step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.errors import CheckpointError, ConfigError, ReplicaError
from forge_rl.models.adapters import name_base
from forge_rl.rollout.batches import BatchSource
from forge_rl.run.checkpoints.files import Checkpoint, Checkpoints
from forge_rl.run.checkpoints.kept import KeptObjects
from forge_rl.run.checkpoints.parts import RunParts, StepState, TrainedPart
from forge_rl.run.live.knobs import is_live_state
from forge_rl.run.lora_settings import checkpoint_bytes
from forge_rl.run.records.json_files import read_object, write_json
from forge_rl.run.records.model_card import write_card
from forge_rl.system.folders import is_there, reading
from forge_rl.system.tasks import ended


class Checkpointer:
    """Counts the steps of a run, saves it between steps, and rolls it back to a checkpoint.

        await checkpointer.begin_save()  # the trainer's state is copied
        ...  # steps, while the copy is written
        checkpoint = await checkpointer.finish_save()

    Live changes are written to `live.json` immediately, and into each checkpoint; a resumed run restores all of them,
    including those after its checkpoint, and a rollback keeps them.

    Args:
        checkpoints: the run folder's checkpoints.
        parts: the parts to save and restore. Engines and weight store, if any, follow the trainer after a restart; the
            evaluator's scores decide which checkpoint is the best.
        models: folders of the models that the trainer and, if there is one, the critic began with.
        warn: called with each problem that does not stop the run.
        choices: values of flags that the user left open, which the run keeps when it is resumed.
        saved: called after each checkpoint.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        parts: RunParts,
        *,
        models: Sequence[Path],
        warn: Callable[[str], None],
        choices: Mapping[str, Any] | None = None,
        saved: Callable[[], None] | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self._services = parts.services
        self._batches: BatchSource = parts.batches
        self._evaluator = parts.evaluator
        self._live = parts.live
        self._models = models
        self._choices = dict(choices or {})
        self._warn = warn
        self._saved = saved
        self._changes = checkpoints.folder.with_name("live.json")
        """File of the changes since the last checkpoint."""
        self._saving: asyncio.Task[Checkpoint | CheckpointError] | None = None
        self._began = time.monotonic()
        self._seconds_before = 0.0
        self.step = 0
        """Number of finished steps, that is, trained batches."""
        self.saved: int | None = None
        """Step of the newest complete checkpoint; None if there is none."""
        self.rolling_back = False
        """Whether a rollback has begun and not ended: until then, the run's parts are of different steps."""
        # A rollback without a checkpoint, and a reset, return to this state.
        self._first = parts.batches.state()
        self.kept = KeptObjects()
        """The recipe's own objects."""
        self._parts: dict[str, TrainedPart] = {}
        self._ended: StepState
        self._note()
        parts.live.changed.add(self._save_changes)

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, including the time before it was resumed."""
        return self._seconds_before + time.monotonic() - self._began

    @property
    def trained(self) -> list[str]:
        """Names of the trainers (policy's, critic's) and parts that took updates since the end of the last step."""
        return self._trained_since(self._ended)

    def _trained_since(self, state: StepState) -> list[str]:
        pairs = zip(self._services.trainers, state.updates, strict=True)
        names = [trainer.name for trainer, updates in pairs if trainer.updates != updates]
        parts = self._parts.items()
        return names + [name for name, part in parts if part.stepping or part.updates != state.parts.get(name)]

    @property
    def half_trained(self) -> str:
        """Describe an interrupted step of which only a part of the updates were taken; "" if there is none."""
        trained, num_trainers = self.trained, len(self._services.trainers)
        if stepping := [name for name, part in self._parts.items() if part.stepping]:
            return f"the {stepping[0]} took only a part of the updates in it"
        return f"only the {trained[0]} took updates in it" if 0 < len(trained) < num_trainers else ""

    def add_part(self, name: str, part: TrainedPart) -> None:
        """Save a part's state and files with each checkpoint, and load its state if there is one."""
        self.kept.add(name, part)
        self._parts[name] = part
        self._ended = replace(self._ended, parts={**self._ended.parts, name: part.updates})

    def _updates(self) -> tuple[int, ...]:
        """Return the updates taken by the trainer and, if there is one, the critic."""
        return tuple(trainer.updates for trainer in self._services.trainers)

    def end_step(self) -> None:
        """Count a finished step."""
        self.step += 1
        self._note()

    def _note(self) -> None:
        """Record the state that a checkpoint of this step holds."""
        # Copied now: by the time a checkpoint is written, the batches of later steps are being drawn.
        self._ended = StepState(
            step=self.step,
            updates=self._updates(),
            rollouts=self._batches.state(),
            objects=self.kept.state(),
            parts={name: part.updates for name, part in self._parts.items()},
        )

    async def resume(self, checkpoint: Checkpoint | None) -> None:
        """Resume from a checkpoint of an earlier process, if any, which the trainer has loaded, and apply later live
        changes.

        Raises:
            CheckpointError: it is incomplete, or its parts are from different steps.
        """
        rollouts, live = self._first, None
        if checkpoint is not None:
            state = self._read(checkpoint)
            rollouts, live = state["rollouts"], state["live"]
            self._seconds_before = float(state["seconds"])
            self.kept.restore(state.get("kept", {}))
            try:
                self._evaluator.restore(state)
            except ValueError as error:
                message = f"{checkpoint.folder}/controller.json is invalid: {error}"
                raise CheckpointError(message, hint=checkpoint.hint) from error
            self.step = self.saved = checkpoint.step
        with reading(self._changes):
            has_changes = is_there(self._changes)
        # `live.json` holds all live changes and not only new ones, so the later of the two replaces the other.
        live = (self._unsaved_changes() if has_changes else None) or live
        if live is not None:
            await self._batches.restore(_with_changes(rollouts, live))
            await self._live.resume(live)
        if has_changes:
            self._save_changes()  # with this command's flags, against which the next one compares its own
        self._first = self._batches.state()
        self._note()
        self.mark_best()

    async def publish(self) -> int:
        """Publish the trainer's weights to the engines, if there are any, and restart an evaluation that was in
        progress; returns the trainer's version."""
        trainer, rollout = self._services.trainer, self._services.rollout
        if rollout is not None:
            await rollout.publish(trainer)
        self._evaluator.restart(self.step, trainer.version)
        return trainer.version

    async def begin_save(self) -> None:
        """Begin to write a checkpoint of the last finished step; returns once the trainer's state is copied.

        Waits for the previous checkpoint first. If one cannot be written, that is a warning and the run continues.

        Raises:
            ConfigError: a trainer has taken updates since the end of the last step.
            CheckpointError: a rollback was interrupted.
            ReplicaError: the trainer died.
        """
        if self._saving is not None:
            # `wait` and not `await self._saving`: a caller that is interrupted must not cancel the write.
            await asyncio.wait([self._saving])
            self._saving.result()
        if self.rolling_back:
            raise CheckpointError(
                "the run cannot be saved: its rollback was interrupted, so that its parts are of different steps",
                hint=f"repeat the command: it resumes from step {self.saved or 0}",
            )
        if self.trained:
            raise ConfigError(
                f"a checkpoint was asked for within step {self.step + 1}, after updates of the {self.trained[0]}",
                hint="call run.checkpoint() after run.log(), which ends the step",
            )
        # Training may go on as soon as the ranks have copied their state; files are written from the copy.
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
        outcome = self._saving.result()
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Wait until nothing is being written, ignoring failures."""
        if self._saving is not None:
            await ended(self._saving)

    async def _save(self, copied: asyncio.Future[None]) -> Checkpoint | CheckpointError:
        """Write a checkpoint of the last finished step; returns the error if it cannot be written."""
        step = self.step
        try:
            return await self._write(copied)
        except CheckpointError as error:
            self._warn(f"step {step} has no checkpoint: {error}")
            return error

    async def _write(self, copied: asyncio.Future[None]) -> Checkpoint:
        # Taken before the first await: changes and scores that come during the write belong to the next checkpoint.
        trainers, step_state = self._services.trainers, self._ended
        (updates, *critic_updates), step = step_state.updates, step_state.step
        state = {"step": step, "updates": updates, "batches": step_state.rollouts.get("batches")}
        state |= {"rollouts": step_state.rollouts, "seconds": self.seconds, "live": self._live.state()}
        state |= self._evaluator.state() | ({"critic_updates": critic_updates[0]} if critic_updates else {})
        state |= {"kept": step_state.objects} if step_state.objects else {}
        state |= {"choices": self._choices} if self._choices else {}
        await self._hand_to_trainer()
        writing = self.checkpoints.writing(
            step,
            state,
            bytes_needed=sum(
                checkpoint_bytes(trainer.lora, trainer.parameters, model)
                for trainer, model in zip(trainers, self._models, strict=False)
            ),
            unscored=self._evaluator.step,
        )
        async with writing as folder:
            places = [folder, folder / "critic"][: len(trainers)]
            # `writing` makes the policy's folders; a critic has the same two in one of its own.
            for place in places[1:]:
                for part in ("model", "training"):
                    (place / part).mkdir(parents=True)
            for trainer, place, model in zip(trainers, places, self._models, strict=False):
                await trainer.save(place, model=model)
            for trained_part in self._parts.values():
                await trained_part.save(folder)
            # Weights would be of another step than the controller's state, which no reader could tell from the files.
            if trained := self._trained_since(step_state):
                raise CheckpointError(f"the {trained[0]} took updates while it was saved")
            copied.set_result(None)
            for trainer, place, model in zip(trainers, places, self._models, strict=False):
                await trainer.finish_save()
                if trainer.lora.rank:
                    await asyncio.to_thread(name_base, place / "model", model)
            # In a thread, as all disk work here: a file server that is away would stop the event loop.
            run, scores = self.checkpoints.folder.parent, dict(self._evaluator.scores)
            await asyncio.to_thread(write_card, folder / "model", run, step=step, scores=scores)
        self.saved = step
        if self.checkpoints.unremoved:
            self._warn(f"an old checkpoint cannot be removed: {self.checkpoints.unremoved}")
        self.mark_best()
        if self._saved is not None:
            self._saved()
        return self.checkpoints.of_step(step)

    async def _hand_to_trainer(self) -> None:
        """Take back shared devices, which the engines hold after an evaluation."""
        if self._services.rollout is not None:
            await self._services.rollout.devices.hand_to_trainer(idle=True)

    async def rollback(self) -> int:
        """Restart trainer and critic from the last intact checkpoint, and roll everything else back to it.

        Returns:
            The step from which the run continues.

        Raises:
            CheckpointError: a checkpoint cannot be read at the moment, or none is left undamaged.
            ServiceError: no trainer restart is left.
        """
        # Stays set if this is interrupted: nothing may be saved from parts of different steps.
        self.rolling_back = True
        if self._saving is not None:  # its writers are gone; wait for any remaining disk operations
            self._saving.cancel()
            await asyncio.wait([self._saving])
            self._saving = None
        while True:
            checkpoint = await asyncio.to_thread(self.checkpoints.set_damaged_aside, self._warn)
            if checkpoint is None:
                # Checkpoints were written, and all are damaged or gone: starting over silently would lose the run.
                self.checkpoints.check_new()
            self.saved = checkpoint.step if checkpoint else None
            try:
                if self._services.rollout is not None:
                    # Trainers restart with all their state on the devices, which engines may hold at the moment.
                    await self._services.rollout.devices.free_devices()
                states = [checkpoint.training, checkpoint.critic] if checkpoint else [None, None]
                for trainer, state in zip(self._services.trainers, states, strict=False):
                    # Only a trainer that died uses up one of its restarts; the other one goes back with it.
                    await trainer.restart(
                        state.resolve() if state else None, cause="it is rolled back to the checkpoint"
                    )
                await self._follow(checkpoint)
            except ReplicaError as error:  # a trainer died again; with no restart left, it raises another error
                if error.service not in {trainer.name for trainer in self._services.trainers}:
                    raise
            else:
                self.rolling_back = False
                return self.step

    async def _follow(self, checkpoint: Checkpoint | None) -> None:
        """Bring everything except trainer and critic to the checkpoint's step."""
        state: dict[str, Any] = self._read(checkpoint) if checkpoint else {"rollouts": self._first}
        # Live changes made since the checkpoint stay: the user has not taken them back.
        await self._batches.restore(_with_changes(state["rollouts"], self._live.state()))
        if checkpoint is not None:
            self._live.roll_back(state["live"])
        self.kept.restore(state.get("kept", {}))
        if self._services.rollout is not None:
            # The restarted trainer publishes its version again: the store forgets that one and all later ones.
            await self._services.rollout.weights.rollback(self._services.trainer.version - 1)
        self.step = checkpoint.step if checkpoint else 0
        self._evaluator.rollback(self.step)
        await self.publish()
        self._note()
        self.mark_best()

    async def reset(self, seed: int, optimizer: OptimizerConfig | None = None) -> None:
        """Bring everything to the state before the first step, in place, with another seed and perhaps optimizer.

        Raises:
            ConfigError: there are checkpoints, which would be of steps that the run has not taken.
            TaskError: a source cannot begin again; nothing has then changed.
        """
        if self._saving is not None or self.saved is not None:
            raise ConfigError(
                f"the run has checkpoints in {self.checkpoints.folder}, which a reset would leave without their steps",
                hint="reset a run that writes none: set --checkpoint-every 0, and another --out if it was resumed",
            )
        self._check_sources()
        self.rolling_back = True
        await self._batches.reset(_with_changes(self._first, self._live.state()), seed=seed)
        self._first = self._batches.state()
        await self._hand_to_trainer()
        for trainer in self._services.trainers:
            await trainer.reset(seed=seed, optimizer=optimizer if trainer is self._services.trainer else None)
        self.kept.restore({})
        self.step = 0
        self._evaluator.rollback(0)
        await self.publish()
        self._note()
        self.rolling_back = False

    def _check_sources(self) -> None:
        """Check that each source can return to its first position, and leave it there.

        Raises:
            TaskError: one cannot; all are then where they were.
        """
        mixture, first_position = self._live.mixture, self._first["mixture"]
        assert isinstance(first_position, Mapping), "the state of batches holds the mixture's"
        position = mixture.state()
        try:
            mixture.restore_sources(first_position)
        except BaseException:
            mixture.restore_sources(position)
            raise

    def mark_best(self) -> None:
        """Mark the checkpoint with the best score; if the disk is full, the next checkpoint tries again.

        After a change of the reward, the one marked before stays until a checkpoint has a score by the new reward.
        """
        scores = self._evaluator.comparable
        if not scores and self._evaluator.scores:
            return
        try:
            self.checkpoints.mark_best(scores)
        except CheckpointError as error:
            self._warn(str(error))

    def _read(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Read and check the controller's state."""
        state, (updates, *critic_updates) = checkpoint.controller_state(), self._updates()
        match state:
            # Written by an earlier process, perhaps by an earlier version of forge_rl: checked before anything uses it.
            case {"rollouts": dict(), "seconds": int() | float(), "live": live} if is_live_state(live) and isinstance(
                state.get("kept", {}), dict
            ):
                batches = state["rollouts"].get("batches")
            case _:
                message = f"{checkpoint.folder}/controller.json lacks state that resuming needs"
                raise CheckpointError(message, hint=checkpoint.hint)
        # Each part states its own number, so that folders that were mixed by hand or by a copy are refused.
        parts = {"step": ("the name of step {}", checkpoint.step), "batches": ("rollouts of {} batches", batches)}
        parts |= {"updates": ("a training state of {} updates", updates)}
        if critic_updates:
            parts |= {"critic_updates": ("a critic of {} updates", critic_updates[0])}
        for name, (part, number) in parts.items():
            if state.get(name) != number:
                raise CheckpointError(
                    f"{checkpoint.folder} holds {part.format(number)}, but a controller state of "
                    f"{state.get(name)!r:.40}",
                    hint=checkpoint.hint,
                )
        return state

    def _save_changes(self) -> None:
        try:
            write_json(self._changes, {"step": self.step, "live": self._live.state()})
        except OSError as error:
            self._warn(f"live changes are not saved until the next checkpoint: {error.strerror or error}")

    def _unsaved_changes(self) -> dict[str, Any] | None:
        """Read the live changes that an earlier process made; None if the checkpoint has them.

        Raises:
            CheckpointError: the file cannot be read.
        """
        hint = f"delete {self._changes} to resume without the changes since the last checkpoint"
        match read_object(self._changes, error=CheckpointError, hint=hint):
            case {"step": int(made_at), "live": dict(live)} if is_live_state(live):
                # A later checkpoint has them, or has seen them taken back.
                return live if made_at >= self.step else None
        raise CheckpointError(f"{self._changes} cannot be read: it lacks something", hint=hint)


def _with_changes(rollouts: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Put the mixture's live changes into a rollouts state; a state without a mixture is refused on restore."""
    mixture = rollouts.get("mixture")
    if not isinstance(mixture, dict):
        return rollouts
    return {**rollouts, "mixture": {**mixture, **live["mixture"]["changes"]}}
