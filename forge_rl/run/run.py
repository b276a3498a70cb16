"""Run: the object that a recipe works with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from forge_rl.checkpoint import Checkpoint
from forge_rl.data.mixture import Mixture
from forge_rl.data.packing import Packed
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ReplicaError
from forge_rl.metrics import Metric, PhaseClock, RunLog, batch_metrics, rewards_by_source
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.checkpointing import Checkpointer, ControllerState
from forge_rl.run.config import RunConfig
from forge_rl.run.monitor import RunMonitor
from forge_rl.run.services import Services
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.tasks import interrupted_by
from forge_rl.types import Batch, Task

_GAP_BOUND = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean gap between the trainer's and the engines' logprobs past which a step warns, by the engines' format."""


C = TypeVar("C", bound=RunConfig)


class Run(Generic[C]):
    """Everything that a recipe works with; made by `start`, complete.

        with run.phase("rollout"):
            batch = await run.rollouts.next_batch()

    Args:
        config: of the recipe.
        folder: of the run.
        services: all handles; they serve the first weights.
        rollouts: makes batches.
        tokenizer: of the policy.
        mixture: where tasks come from; its weights can be changed while the run goes.
        held_out: tasks for evaluation.
        resumed: state that the run goes on from; None at its beginning.
        checkpointer: saves, and restarts the trainer.
        clock: of the phases.
        faults: bounds the phases.
        log: takes metrics and events.
        monitor: tells how deep the queues were.
        close: ends the run.
    """

    def __init__(
        self,
        config: C,
        folder: Path,
        *,
        services: Services,
        rollouts: RolloutExecutor,
        tokenizer: Tokenizer,
        mixture: Mixture,
        held_out: tuple[Task, ...],
        resumed: ControllerState | None,
        checkpointer: Checkpointer,
        clock: PhaseClock,
        faults: Faults,
        log: RunLog,
        monitor: RunMonitor,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self.config = config
        self.folder = folder
        self.trainer = services.trainer
        self.generator = services.generator
        self.weights = services.weights
        self.reward = services.reward
        self.environment = services.environment
        """None where an agent makes the episodes."""
        self.rollouts = rollouts
        self.tokenizer = tokenizer
        self.mixture = mixture
        self.held_out = held_out
        self.last_batch: Batch | None = None
        """The batch of the last step, to look at."""
        self.scores = dict(resumed.scores) if resumed else {}
        """Held-out score by step."""
        self._seconds_before = resumed.seconds if resumed else 0.0
        self._began = time.monotonic()
        self._checkpointer = checkpointer
        self._devices = services.devices
        self._clock = clock
        self._faults = faults
        self._log = log
        self._monitor = monitor
        self._close = close
        self._logged = self.step
        self._end_step()  # the start is no part of the first step

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.trainer.version

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all sittings."""
        return self._seconds_before + time.monotonic() - self._began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase and bounds it.

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
        """Ends a step: its metrics go to the display and to every sink.

        Args:
            stats: metrics of the method, such as what Trainer.step returns.
            batch: the batch that was trained on.
            packed: how it was packed.

        Returns:
            All metrics of the step.
        """
        values: dict[str, Metric] = dict(stats)
        if batch is not None:
            self.last_batch = batch
            values |= batch_metrics(batch)
            self._clock.tokens("rollout", sum(episode.response_tokens for episode in batch.episodes))
        if packed is not None:
            values |= {
                "tokens/packed": float(packed.packed_tokens),
                "tokens/sequences": float(packed.sequence_tokens),
                "tokens/unscored": float(packed.unscored_tokens),
            }
            self._clock.tokens("train", packed.sequence_tokens)
        values |= self.rollouts.metrics() | self._devices.take() | self._monitor.pop_depths() | self._end_step()
        bound, gap = _GAP_BOUND[self.generator.dtype], stats.get("logprob_gap", 0.0)
        if gap > bound:
            self._log.event(
                f"step {self.step}: trainer's and engines' logprobs differ by {gap:.2g} on average, "
                f"more than {bound:g}",
                "warning",
            )
        self._log.log(self.step, values, batch)
        self._logged = self.step
        self._checkpointer.end_step()
        return values

    @contextlib.asynccontextmanager
    async def recovering(self) -> AsyncIterator[None]:
        """Leaves out the rest of the body if the trainer dies, and takes the run back to its last checkpoint.

        The recipe's loop then goes on from there; at most trainer.max_restarts times.

        Raises:
            ServiceError: the trainer died once too often.
        """
        if not self.trainer.alive:
            await self._recover()

        async def raise_death() -> None:
            cause = await self.trainer.death()
            await asyncio.sleep(0.5)  # a call in flight fails by itself
            if self.trainer.restarts_left:  # else the run ends with it
                raise ReplicaError(cause, service="trainer")

        try:
            with interrupted_by(raise_death):
                yield
        except ReplicaError as error:
            if error.service != "trainer":
                raise
            await self._recover()

    def due(self, every: int) -> bool:
        """Tells whether it is time for something that is done every so many steps, and after the last one."""
        return every > 0 and (self.step % every == 0 or self.step >= self.config.steps)

    async def evaluate(self) -> float | None:
        """Decodes the held-out tasks greedily; returns the mean score, or None where there are no such tasks."""
        if not self.held_out or self.config.eval_every == 0:
            return None
        with self.phase("evaluate"):
            episodes = await self.rollouts.evaluate(self.held_out)
            self._clock.tokens("evaluate", sum(episode.response_tokens for episode in episodes))
        score = sum(episode.reward for episode in episodes) / len(episodes)
        self.scores[self.step] = score
        values = {"held_out": score, **rewards_by_source("held_out", episodes)}
        self._log.log(self.step, values | self._end_step())
        return score

    async def checkpoint(self) -> Checkpoint:
        """Writes a checkpoint of the last finished step."""
        with self.phase("checkpoint"):
            await self._checkpointer.save(self.scores, self.seconds)
        latest = self._checkpointer.latest()
        assert latest is not None, "a checkpoint was just written"
        return latest

    async def save_interrupted(self) -> None:
        """Saves what was trained since the last checkpoint, where the run writes any."""
        if self.config.checkpoint_every == 0 or not self.trainer.alive:
            return
        step = await self.trainer.settle()
        if step > self._logged:  # it was stopped in the optimizer step, which ended
            self.log({}, self.rollouts.last)
        if step not in (0, self._checkpointer.saved):
            await self._checkpointer.save(self.scores, self.seconds)
            self.event(f"saved step {step}; the same command continues from there")

    async def close(self) -> None:
        """Ends a run that was opened with `open`: stops the services, writes what is held back."""
        await self._close()

    def event(self, text: str) -> None:
        """Tells the user something."""
        self._log.event(text)

    def __repr__(self) -> str:
        lines = [
            f"Run  step {self.step} of {self.config.steps}  {self.folder}",
            *(f"  {part!r}" for part in (self.trainer, self.generator, self.reward, self.environment) if part),
        ]
        return "\n".join(lines)

    def _end_step(self) -> dict[str, float]:
        self._clock.busy("trainer", self.trainer.busy_s)
        self.trainer.busy_s = 0.0
        self._count_busy("")
        return self._clock.finish_step()

    def _count_busy(self, phase: str) -> None:
        """Counts the engines' work since the last call, for the step and for the phase."""
        paused = phase == "" and not self.config.schedule.decodes_while_training
        for index, seconds in enumerate(self.generator.take_busy_s()):
            if not paused:
                self._clock.busy(f"generator/{index}", seconds)
            if phase:
                self._clock.busy(f"generator/{index}", seconds, phase=phase)

    async def _recover(self) -> None:
        with self.phase("recover"):
            step = await self._checkpointer.rollback()
            self.scores = {at: score for at, score in self.scores.items() if at <= step}
            self._log.rollback(step)
            self._logged = step
            self._log.event(f"the trainer was restarted; the run goes on from step {step}", "warning")
