"""A run: what a recipe works with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from forge_rl.checkpoint import Checkpoint, Checkpoints
from forge_rl.data.mixture import Mixture
from forge_rl.data.packing import Packed
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import CheckpointError, ReplicaError
from forge_rl.metrics import Metric, PhaseClock, RunLog, lag_histogram
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.run.config import RunConfig
from forge_rl.run.monitor import RunMonitor
from forge_rl.runtime.faults import Faults
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import Reward
from forge_rl.services.trainer import Trainer
from forge_rl.services.weight_store import WeightStore
from forge_rl.types import Batch, Task

_GAP_BOUND = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean gap between the trainer's and the engines' logprobs past which a step warns, by the engines' format."""


C = TypeVar("C", bound=RunConfig)


class Run(Generic[C]):
    """What a recipe works with. Made by `start`."""

    def __init__(
        self, config: C, folder: Path, clock: PhaseClock, faults: Faults, log: RunLog, watch: RunMonitor
    ) -> None:
        self.config = config
        self.folder = folder
        self.last_batch: Batch | None = None
        """The batch of the last step, to look at."""
        self.scores: dict[int, float] = {}
        """Held-out score by step."""
        self.trainer: Trainer
        self.generator: Generator
        self.weights: WeightStore
        self.reward: Reward
        self.environment: Environment | None = None
        """None where an agent makes the episodes."""
        self.mixture: Mixture
        self.rollouts: RolloutExecutor
        self.tokenizer: Tokenizer
        self.held_out: tuple[Task, ...] = ()
        self.seconds_before = 0.0
        """Wall time of earlier sittings of this run."""
        self._clock = clock
        self._faults = faults
        self._log = log
        self._devices: DeviceHandover
        self._monitor = watch
        self._began = time.monotonic()
        self._model: Path
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
        self._resume_state: dict[str, object] = {}
        self._resume_step = self._logged = 0
        self._first_rollouts: dict[str, object] = {}
        self._saved_step: int | None = None
        self._close: Callable[[], Awaitable[object]] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.trainer.version

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all sittings."""
        return self.seconds_before + time.monotonic() - self._began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and bound it.

        Raises:
            DeadlineError: it takes longer than phase_deadline_s.
        """
        decodes = name in ("rollout", "evaluate")
        if decodes and not self.config.schedule.decodes_while_training:
            self.generator.take_busy_s()  # requests that were paused are no work
        with self._clock.phase(name), self._faults.deadline(name, self.config.phase_deadline_s):
            yield
        if decodes:
            self._count_busy(name)

    def log(
        self, stats: Mapping[str, float], batch: Batch | None = None, packed: Packed | None = None
    ) -> dict[str, Metric]:
        """End a step: its metrics go to the display and to every sink.

        Args:
            stats: of the method, such as what Trainer.step returns.
            batch: that was trained on.
            packed: how it was packed.

        Returns:
            All metrics of the step.
        """
        values: dict[str, Metric] = dict(stats)
        if batch is not None:
            self.last_batch = batch
            values |= batch_stats(batch)
            values["lag/hist"] = lag_histogram(batch)
            self._clock.tokens("rollout", sum(episode.response_tokens for episode in batch.episodes))
        if packed is not None:
            values |= {
                "tokens/packed": float(packed.packed_tokens),
                "tokens/sequences": float(packed.sequence_tokens),
                "tokens/unscored": float(packed.unscored_tokens),
            }
            self._clock.tokens("train", packed.sequence_tokens)
        values |= self.rollouts.metrics()
        values |= self._devices.take() | self._monitor.take()
        values |= self._finish_step()
        bound, gap = _GAP_BOUND[self.generator.dtype], stats.get("logprob_gap", 0.0)
        if gap > bound:
            self._log.event(
                f"step {self.step}: trainer's and engines' logprobs differ by {gap:.2g} on average, "
                f"more than {bound:g}",
                "warning",
            )
        self._log.log(self.step, values, batch)
        self._logged = self.step
        self._note_progress()
        return values

    @contextlib.asynccontextmanager
    async def recovering(self) -> AsyncIterator[None]:
        """If the trainer dies in the body, the rest of it is left out and the run is where its last checkpoint is.

        The recipe's loop then goes on from there; at most trainer.max_restarts times.

        Raises:
            ServiceError: the trainer died once too often.
        """
        if not self.trainer.alive:
            await self._recover()
        task = asyncio.current_task()
        assert task is not None
        died = False

        async def wait() -> None:
            nonlocal died
            await self.trainer.death()
            await asyncio.sleep(0.5)  # a call in flight fails by itself
            if self.trainer.restarts_left:  # else the run ends with it
                died = True
                task.cancel()

        waiting = asyncio.ensure_future(wait())
        try:
            yield
        except ReplicaError as error:
            if error.service != "trainer" or died:
                raise
        except asyncio.CancelledError:
            if not died:
                raise
            task.uncancel()
        else:
            return  # of a death after the body the next one hears
        finally:
            waiting.cancel()
        await self._recover()

    def due(self, every: int) -> bool:
        """Whether something that is done every so many steps, and after the last one, is due now."""
        return every > 0 and (self.step % every == 0 or self.step >= self.config.steps)

    async def evaluate(self) -> float | None:
        """Answer the held-out tasks greedily; returns the mean score, or None where there are no such tasks."""
        if not self.held_out or self.config.eval_every == 0:
            return None
        with self.phase("evaluate"):
            episodes = await self.rollouts.evaluate(self.held_out)
            self._clock.tokens("evaluate", sum(episode.response_tokens for episode in episodes))
        score = sum(episode.reward for episode in episodes) / len(episodes)
        by_source: dict[str, list[float]] = {}
        for episode in episodes:
            by_source.setdefault(episode.task.source, []).append(episode.reward)
        values = {"held_out": score}
        if len(by_source) > 1:
            values |= {f"held_out/{name}": sum(rewards) / len(rewards) for name, rewards in by_source.items()}
        self.scores[self.step] = score
        self._log.log(self.step, values | self._finish_step())
        return score

    async def checkpoint(self) -> Checkpoint:
        """Write a checkpoint of the last finished step."""
        with self.phase("checkpoint"):
            await self._save()
        latest = self._checkpoints.latest()
        assert latest is not None, "a checkpoint was just written"
        return latest

    async def close(self) -> None:
        """End a run that was opened with `open`: stop the services, write what is held back."""
        if self._close is not None:
            close, self._close = self._close, None
            await close()

    def event(self, text: str) -> None:
        """Tell the user something."""
        self._log.event(text)

    def __repr__(self) -> str:
        lines = [
            f"Run  step {self.step} of {self.config.steps}  {self.folder}",
            *(f"  {part!r}" for part in (self.trainer, self.generator, self.reward, self.environment) if part),
        ]
        return "\n".join(lines)

    def _finish_step(self) -> dict[str, float]:
        self._clock.busy("trainer", self.trainer.busy_s)
        self.trainer.busy_s = 0.0
        self._count_busy("")
        return self._clock.finish_step()

    def _count_busy(self, phase: str) -> None:
        """Count what the engines did since this was last asked, for the step and for the phase."""
        paused = phase == "" and not self.config.schedule.decodes_while_training
        for index, seconds in enumerate(self.generator.take_busy_s()):
            if not paused:
                self._clock.busy(f"generator/{index}", seconds)
            if phase:
                self._clock.busy(f"generator/{index}", seconds, phase=phase)

    def _note_progress(self) -> None:
        """What a checkpoint of the current step must hold of the controller."""
        self._resume_step = self.step
        self._resume_state = {
            "step": self.step,
            "rollouts": self.rollouts.state(),
            "scores": {str(step): score for step, score in self.scores.items()},
            "seconds": self.seconds,
        }

    async def _save(self) -> None:
        # Between steps nothing is in flight, so the trainer's state and the controller's are of the same step.
        self._resume_state["scores"] = {str(step): score for step, score in self.scores.items()}
        self._resume_state["seconds"] = self.seconds
        if self.step != self._resume_step:
            self._resume_state = {**self._resume_state, "step": self.step, "rollouts": self.rollouts.state()}
        bytes_needed = self.trainer.parameters * 16
        async with self._checkpoints.writing(self.step, self._resume_state, bytes_needed=bytes_needed) as folder:
            await self.trainer.save(folder, model=self._model)
        self._saved_step = self.step

    async def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Go on from a checkpoint of an earlier sitting."""
        if checkpoint is not None:
            rollouts, self.scores, self.seconds_before = self._state_in(checkpoint)
            await self.rollouts.restore(rollouts)
            self._saved_step = checkpoint.step
        self._first_rollouts = self.rollouts.state()
        self._logged = self.step
        self._note_progress()

    def _state_in(self, checkpoint: Checkpoint) -> tuple[dict[str, object], dict[int, float], float]:
        """The state of the rollouts, the scores, and the seconds that the run had taken."""
        state = checkpoint.controller_state()
        rollouts, scores, seconds = state.get("rollouts"), state.get("scores"), state.get("seconds")
        if not isinstance(rollouts, dict) or not isinstance(scores, dict) or not isinstance(seconds, int | float):
            raise CheckpointError(
                f"{checkpoint.folder}/controller.json lacks what a run continues from",
                hint=f"delete {checkpoint.folder} to continue from the checkpoint before it",
            )
        if self.step != checkpoint.step:
            raise CheckpointError(
                f"{checkpoint.folder} holds the training state of step {self.step}",
                hint=f"delete {checkpoint.folder} to continue from the checkpoint before it",
            )
        return rollouts, {int(step): float(score) for step, score in scores.items()}, float(seconds)

    async def _recover(self) -> None:
        """Restart the trainer from the last checkpoint, and take everything else back to there."""
        with self.phase("recover"):
            while True:
                checkpoint = self._checkpoints.latest()
                try:
                    await self._devices.clear()
                    await self.trainer.restart(checkpoint.training.resolve() if checkpoint else None)
                    await self._go_back(checkpoint)
                except ReplicaError as error:  # it died again; where no restart is left, another error is raised
                    if error.service != "trainer":
                        raise
                else:
                    return

    async def _go_back(self, checkpoint: Checkpoint | None) -> None:
        rollouts = self._state_in(checkpoint)[0] if checkpoint else self._first_rollouts
        await self.rollouts.restore(rollouts)
        await self.weights.rollback(self.step)
        if await self.weights.latest() != self.step:  # else it is kept, and holds the same weights
            await self.trainer.publish(self.weights, dtype=self.generator.dtype)
        await self.generator.load(self.weights, self.step)
        self.scores = {step: score for step, score in self.scores.items() if step <= self.step}
        self._saved_step = checkpoint.step if checkpoint else None
        self._log.rollback(self.step)
        self._logged = self.step
        self._note_progress()
        self._log.event(f"the trainer was restarted; the run goes on from step {self.step}", "warning")


def batch_stats(batch: Batch) -> dict[str, float]:
    """Metrics of a batch: rewards, lengths, outcomes, lag."""
    episodes = batch.episodes
    rewards = [episode.reward for episode in episodes]
    lengths = [episode.response_tokens for episode in episodes]
    lags = [batch.version - version for episode in episodes for turn in episode.turns for version in turn.versions]
    by_source: dict[str, list[float]] = {}
    for episode in episodes:
        by_source.setdefault(episode.task.source, []).append(episode.reward)
    values = {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "groups/uniform": sum(group.is_uniform for group in batch.groups) / len(batch.groups),
        "tokens/answer_mean": sum(lengths) / len(lengths),
        "tokens/answer_max": float(max(lengths)),
        "episodes/truncated": sum(episode.outcome == "truncated" for episode in episodes) / len(episodes),
        "lag/mean": sum(lags) / max(1, len(lags)),
        "lag/max": float(max(lags, default=0)),
    }
    if len(by_source) > 1:
        values |= {f"reward/{name}": sum(found) / len(found) for name, found in by_source.items()}
    return values
