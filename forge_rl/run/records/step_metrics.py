"""The metrics of each step, from batch, services and clock, with warnings about the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from forge_rl.data.mixture import Mixture
from forge_rl.engines.platform import resolve_dtype
from forge_rl.metrics import Metric, batch_metrics
from forge_rl.packing.rows import PackedBatch
from forge_rl.packing.trees import decoded_tokens
from forge_rl.rollout.examples import Examples
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.records.gap import describe_gap
from forge_rl.run.records.monitor import RunMonitor
from forge_rl.run.run_config import RunConfig
from forge_rl.run.service_set import Services
from forge_rl.types import Batch


class StepMetrics:
    """Collects the metrics of a run's steps.

    with metrics.phase("rollout"):
        batch = await rollouts.next_batch()
    values = metrics.end_step(stats, batch, packed)
    """

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        batches: RolloutExecutor | Examples,
        mixture: Mixture,
        monitor: RunMonitor,
    ) -> None:
        self._decodes_while_training = config.schedule.decodes_while_training
        self._trains_in = str(resolve_dtype(config.trainer.dtype)).removeprefix("torch.")
        self._trainers = services.trainers
        self._rollout = services.rollout
        self._batches = batches
        self._generates = isinstance(batches, RolloutExecutor)
        self._taught_nothing = False
        """Whether all advantages of the last step were 0; the warning is not repeated while that lasts."""
        self._mixture = mixture
        self._epochs = mixture.epochs
        self._monitor = monitor
        self._clock = monitor.clock
        # The seconds of the start do not count towards the first step.
        self.end_times()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and the engines' work in it."""
        decodes = name in ("rollout", "evaluate")
        # Requests that were paused outside of these phases do not count as work.
        if decodes and not self._decodes_while_training:
            self._drain_busy_s()
        with self._clock.phase(name):
            yield
        if decodes:
            self._count_busy(name)

    def end_step(
        self, stats: Mapping[str, float], batch: Batch | None, packed: PackedBatch | None
    ) -> dict[str, Metric]:
        """End a step and return its metrics.

        Args:
            stats: the method's metrics, such as the result of Trainer.step.
        """
        values: dict[str, Metric] = dict(stats)
        if batch is not None:
            values |= batch_metrics(batch)
            if self._generates:
                self._clock.tokens("rollout", decoded_tokens(group.episodes for group in batch.groups))
        if packed is not None:
            values["tokens/packed"] = float(packed.packed_tokens)
            if self._generates:
                values["tokens/unscored"] = float(packed.unscored_tokens)
                values["groups/uniform"] = packed.uniform_share
            self._clock.tokens("train", packed.sequence_tokens)
        if self._rollout is not None:
            values |= self._rollout.metrics()
            trainer = self._trainers[0]
            values |= {f"publish/{part}_s": seconds for part, seconds in trainer.publish_s.items()}
            trainer.publish_s = {}  # a step that publishes nothing must not show the last one's seconds
        values |= self._mixture.metrics()
        self._tell_epochs()
        # The times come last, as taking them ends the step on the clock.
        values |= self._batches.metrics() | self._monitor.pop_depths() | self.end_times()
        if (tokens := values.get("completed/tokens")) is not None:
            # Engines that decode while the trainer trains have the whole step for these tokens.
            seconds = values.get("seconds/step" if self._decodes_while_training else "seconds/rollout")
            if isinstance(tokens, float) and isinstance(seconds, float) and seconds > 0:
                values["completed/tokens_per_s"] = tokens / seconds
        return values

    def warn(self, step: int, stats: Mapping[str, float], packed: PackedBatch | None) -> None:
        """Warn of skipped updates, of a gap between the logprobs of engines and trainer, and of advantages that are 0.

        The last warning looks at advantages, since a method may learn even from a group of equal rewards.
        """
        # By advantages and not by rewards, whose meaning only the method knows.
        teaches_nothing = self._generates and packed is not None and packed.uniform_share == 1
        if teaches_nothing and not self._taught_nothing:
            self._monitor.log.warn(
                f"step {step}: all advantages are 0, so nothing is learned: tasks may be too easy or too hard for this "
                "model, or its answers not recognised; see episodes.jsonl"
            )
        self._taught_nothing = teaches_nothing
        for trainer in self._trainers:
            prefix = "" if trainer is self._trainers[0] else f"{trainer.name}/"
            if skipped := stats.get(f"{prefix}updates/skipped"):
                self._monitor.log.warn(
                    f"step {step}: {skipped:g} updates of the {trainer.name} were skipped, as their gradient is "
                    f"not finite; rows of the last one: {trainer.skipped[-1]}"
                )
        gap = stats.get("logprob_gap")
        if gap is None or self._rollout is None:
            return
        if problem := describe_gap(gap, engines=self._rollout.generator.dtype, trainer=self._trains_in):
            self._monitor.log.warn(f"step {step}: {problem}")

    def end_times(self) -> dict[str, float]:
        """Return the times of phases, trainers and engines since the last call of this."""
        for trainer in self._trainers:
            self._clock.busy(trainer.name, trainer.busy_s)
            trainer.busy_s = 0.0
        self._count_busy("")
        return self._clock.finish_step()

    def end_evaluation(self) -> dict[str, float]:
        """Return the times of an evaluation that the run waited for, and begin the next step after it.

        They amend the row of a step that has ended. The step's seconds and its devices' shares stay unchanged.
        """
        times = self.end_times()
        return {name: value for name, value in times.items() if not name.startswith(("seconds/step", "busy/"))}

    def reset(self) -> None:
        """Discard metrics that belong to no step, after a reset of the run."""
        self._epochs = self._mixture.epochs
        self._batches.metrics()
        self.end_times()

    def _tell_epochs(self) -> None:
        """Log sources that begin another epoch."""
        before, self._epochs = self._epochs, self._mixture.epochs
        for name, epoch in self._epochs.items():
            if int(epoch) > int(before.get(name, epoch)):
                self._monitor.log.event(f"{name}: all tasks were drawn; epoch {int(epoch) + 1} begins")

    def _count_busy(self, phase: str) -> None:
        """Count the engines' busy time since the last call, for the step and for the phase."""
        # Between phases, such engines hold their requests: what they report as busy is waiting.
        paused = phase == "" and not self._decodes_while_training
        for index, seconds in enumerate(self._drain_busy_s()):
            if not paused:
                self._clock.busy(f"generator/{index}", seconds)
            if phase:
                self._clock.busy(f"generator/{index}", seconds, phase=phase)

    def _drain_busy_s(self) -> list[float]:
        """Return each engine's busy seconds since the last call."""
        return [] if self._rollout is None else self._rollout.generator.drain_busy_s()
