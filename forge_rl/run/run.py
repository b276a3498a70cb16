"""Run: the object that a recipe works with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.errors import ConfigError, ReplicaError, RunStopped
from forge_rl.metrics import Metric
from forge_rl.metrics.display.format import duration
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import PackedBatch
from forge_rl.rollout.examples import Examples
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.adapters import RunAdapter, RunAdapters
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.checkpoints.files import Checkpoint
from forge_rl.run.checkpoints.kept import Stateful
from forge_rl.run.checkpoints.parts import RunParts
from forge_rl.run.live.after_step import AfterStepQueue
from forge_rl.run.live.knobs import LiveSchedule
from forge_rl.run.records.gap import GapReport, explain_gap
from forge_rl.run.records.monitor import RunMonitor
from forge_rl.run.records.recording import evaluated_episodes, trained_episodes
from forge_rl.run.records.step_metrics import StepMetrics
from forge_rl.run.run_config import RunConfig
from forge_rl.run.service_set import RolloutServices, nothing_generated
from forge_rl.runtime.hold import Hold
from forge_rl.runtime.processes import idle_collection
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import RewardService
from forge_rl.services.teachers import Teachers
from forge_rl.services.trainer import Trainer
from forge_rl.services.weight_store import WeightStore
from forge_rl.system.tasks import interrupted_by
from forge_rl.types import Advantages, Batch

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


class Run(Generic[C]):
    """Everything that a recipe works with; created by `start`.

    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    """

    def __init__(
        self,
        config: C,
        parts: RunParts,
        checkpointer: Checkpointer,
        monitor: RunMonitor,
        loss: Loss,
        *,
        close: Callable[[], Awaitable[object]],
    ) -> None:
        self.config = config
        self.loss = loss
        self.folder = monitor.folder
        self.trainer = parts.services.trainer
        self.mixture = parts.live.mixture
        self.last_batch: Batch | None = None
        """The last step's batch, for inspection."""
        self.close = close
        """Closes a run that was opened with `open`: saves its steps, stops the services and flushes the logs."""
        # Recorded episodes show the trainer's logprobs and entropies, which ranks send only on request.
        self.trainer.keeps_logprobs = config.recording.share > 0
        self._services = parts.services
        self.batches = parts.batches
        """Source of the run's batches: `rollouts` or `examples`."""
        self._live = parts.live
        self._evaluator = parts.evaluator
        self._checkpointer = checkpointer
        self._monitor = monitor
        for kernel, failure in self.trainer.failed_kernels.items():
            monitor.log.warn(f"the trainer computes without its GPU kernel {kernel!r}, more slowly: {failure}")
        self._clock = monitor.clock
        self._log = monitor.log
        self._seed = config.seed
        self._metrics = StepMetrics(config, parts.services, parts.batches, self.mixture, monitor)
        self._adapters: RunAdapters | None = None
        self._after_step = AfterStepQueue()
        self._stopping = False

    @property
    def critic(self) -> Trainer:
        """The critic.

        Raises:
            ConfigError: there is none.
        """
        if self._services.critic is None:
            raise ConfigError("the run has no critic", hint="pass start() its settings: critic=config.critic")
        return self._services.critic

    @property
    def teachers(self) -> Teachers:
        """The teachers.

        Raises:
            ConfigError: there are none.
        """
        if self._rollout.teachers is None:
            raise ConfigError("the run has no teachers", hint="pass start() their settings: teachers=config.teachers")
        return self._rollout.teachers

    @property
    def rollouts(self) -> RolloutExecutor:
        """The rollouts, which generate batches.

        Raises:
            ConfigError: the run trains on given examples.
        """
        if isinstance(self.batches, Examples):
            raise nothing_generated()
        return self.batches

    @property
    def examples(self) -> Examples:
        """The given examples to train on.

        Raises:
            ConfigError: batches are generated.
        """
        if not isinstance(self.batches, Examples):
            raise ConfigError("the run generates its batches", hint="take them from run.rollouts")
        return self.batches

    @property
    def generator(self) -> Generator:
        """The engines; raises ConfigError in a run on given examples, as do `weights`, `reward` and `environment`."""
        return self._rollout.generator

    @property
    def weights(self) -> WeightStore:
        """The store of published weights."""
        return self._rollout.weights

    @property
    def reward(self) -> RewardService:
        """The reward."""
        return self._rollout.reward

    @property
    def environment(self) -> Environment | None:
        """The environments; None if an agent plays the episodes."""
        return self._rollout.environment

    @property
    def adapters(self) -> RunAdapters:
        """Adapters by name, trained separately over one base model; see `generator` for errors.

        await run.adapters.open("math", "code")  # before the first step
        """
        if self._adapters is None:
            self._adapters = RunAdapters(
                self.config,
                self.trainer,
                self.generator,
                self.rollouts,
                folder=self.folder,
                checkpoint=self._last_checkpoint,
                warn=self._log.warn,
            )
            # Their counts are saved with the controller's state, their weights in folders of the checkpoint: two
            # places, which a restore compares.
            self._checkpointer.add_part("adapters", self._adapters)
        return self._adapters

    def adapter(self, name: str) -> RunAdapter:
        """An open adapter: `run.adapter("math").version`.

        Raises:
            ConfigError: there is none of this name.
        """
        return self.adapters[name]

    @property
    def schedule(self) -> LiveSchedule:
        """The schedule; its bounds can be set."""
        return self._live.schedule

    @property
    def lr(self) -> float:
        """The peak learning rate. Set it, and it applies from the next step on."""
        return self.trainer.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._live.optimizer.put({"lr": lr})

    def scale(self, *, engines: int | None = None, environments: int | None = None) -> None:
        """Start or stop engines, or processes of environments, in the background; stopped ones hand their work over.

            run.scale(engines=3)

        Raises:
            ConfigError: the hosts lack room for so many, or the run has none.
        """
        counts = {"engines": engines, "environments": environments}
        self._live.replicas.put({name: count for name, count in counts.items() if count is not None})

    @property
    def paused(self) -> bool:
        """Whether the run is paused, or will be at its next boundary."""
        return self._hold.paused

    @property
    def _hold(self) -> Hold:
        return self._monitor.faults.hold

    @property
    def _generates(self) -> bool:
        """Whether batches are generated."""
        return not isinstance(self.batches, Examples)

    @property
    def _rollout(self) -> RolloutServices:
        if self._services.rollout is None:
            raise nothing_generated()
        return self._services.rollout

    def keep(self, name: str, thing: Stateful) -> None:
        """Save and restore an object's state with the run's: in checkpoints, on resuming, and in rollbacks.

        baselines = rl.RoleBaselines()
        run.keep("baselines", baselines)  # before the first step; loads its state if the run is resumed
        """
        self._checkpointer.kept.add(name, thing)

    @property
    def step(self) -> int:
        """Number of finished steps, that is, trained batches, of one or more updates each."""
        return self._checkpointer.step

    @property
    def current_phase(self) -> str:
        """Current phase; "" between phases."""
        return self._clock.current

    @property
    def scores(self) -> dict[int, float]:
        """Score of the first set, such as the held-out tasks, by step: avg@k with k = --evaluation.episodes."""
        return self._evaluator.scores

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and enforce its deadline; in the phase "train", also collect garbage.

        Raises:
            DeadlineError: the phase takes longer than phase_deadline_s.
        """
        # While ranks train, this process only waits: a collection delays nobody. See `responsive_loop`.
        collection = idle_collection() if name == "train" else contextlib.nullcontext()
        deadline = self._monitor.faults.deadline(name, self.config.phase_deadline_s)
        with self._metrics.phase(name), deadline, collection:
            yield

    def log(
        self, stats: Mapping[str, float], batch: Batch | None = None, packed: PackedBatch | None = None
    ) -> dict[str, Metric]:
        """End a step and send its metrics to the display and every sink.

        Args:
            stats: the method's metrics, such as the result of Trainer.step.
            batch: the trained batch.
            packed: the packed batch.

        Returns:
            All metrics of the step.
        """
        if packed is not None and self.trainer.spares_uniform:
            # Counts are of the rows that were computed; the trainer keeps its scores by this same object.
            packed = packed.without_uniform
        values = self._metrics.end_step(stats, batch, packed)
        # From here on `self.step` counts this step, under whose number the rest is logged.
        self._checkpointer.end_step()
        self._metrics.warn(self.step, stats, packed)
        self._log.log(self.step, values, batch)
        if batch is not None:
            self.last_batch = batch
            # Scores are of one packed batch; a recipe may log another than it trained on last.
            scored, self.trainer.scored = self.trainer.scored, None
            logprobs = scored[1] if scored is not None and scored[0] is packed else None
            self._log.record(
                self.step, "trained", functools.partial(trained_episodes, self.step, batch, packed, logprobs)
            )
        self._pop_evaluation()
        return values

    async def train_on(self, batch: Batch, advantages: Advantages | None = None) -> None:
        """Train on a batch, publish the weights if batches are generated, and log the step: the phases of
        `recipes/grpo.py` after its rollout.

        with run.phase("rollout"):
            batch = await run.rollouts.next_batch()
        await run.train_on(batch, batch_advantages(batch, estimator="rloo"))

        Args:
            advantages: [P, G] float32, or [P][G] arrays with one per token; None for given examples. See `pack`.

        Raises:
            ConfigError: generated episodes came without advantages.
        """
        if advantages is None and not isinstance(self.batches, Examples):
            raise ConfigError(
                "train_on() got generated episodes without advantages",
                hint="pass them: run.train_on(batch, rl.batch_advantages(batch))",
            )
        with self.phase("train"):
            # Packing takes time that grows with the tokens. In a thread, it does not hold up the event loop, which
            # serves engines and environments meanwhile.
            packed = await asyncio.to_thread(pack, batch, advantages, self.trainer.layout)
            # Engines report logprobs at the sampling temperature; the trainer scales its logits alike, or ratios would
            # be off.
            temperature = self.generator.sampling.temperature if self._generates else 1.0
            stats = await self.trainer.step(packed, self.loss, temperature=temperature)
        if self._generates:
            with self.phase("publish"):
                version = await self.trainer.publish(self.weights, dtype=self.generator.dtype)
                await self.generator.load(self.weights, version)
        self.log(stats, batch, packed)

    @contextlib.asynccontextmanager
    async def recovering(self) -> AsyncIterator[None]:
        """If the trainer or the critic dies, skip the rest of the body and roll the run back to its last checkpoint.

        The recipe's loop then continues from there; at most max_restarts times for each of them. After the body, waits
        while the run is paused.

        Raises:
            ServiceError: no restart is left.
            RunStopped: `stop` was called; it ends the body of `start` and not the program.
        """
        trainers = self._services.trainers
        for trainer in trainers:
            # An interactive session may continue after an interrupt that came before a recovery or in the middle of it.
            if not trainer.alive or self._checkpointer.rolling_back:
                await self._recover(trainer.name)

        async def raise_death(trainer: Trainer) -> None:
            cause = await trainer.death()
            # A call in flight on the dead ranks may fail first, with a better message.
            await asyncio.sleep(0.5)
            if trainer.restarts_left:  # otherwise, that call's error ends the run
                raise ReplicaError(cause, service=trainer.name)

        try:
            with contextlib.ExitStack() as stack:
                for trainer in trainers:
                    stack.enter_context(interrupted_by(functools.partial(raise_death, trainer)))
                # A rollback or a resumed run has restarted a pending evaluation, which training must not overtake.
                if self._evaluator.blocking:
                    await self.finish_evaluation()
                yield
                # Attached clients' work waits for this point, where no phase is under way.
                await self._after_step.run()
                if self.paused:
                    async with self.rollouts.holding() if self._generates else contextlib.nullcontext():
                        await self._after_step.run_while(self._hold)
        except ReplicaError as error:
            # Only trainers are rolled back. Other services replace their own replicas before an error of theirs gets
            # here.
            if error.service not in {trainer.name for trainer in trainers}:
                raise
            await self._recover(str(error.service))
        stopping, self._stopping = self._stopping, False
        if stopping and self.step < self.config.steps:
            raise RunStopped(f"the run was stopped after step {self.step}", hint="the same command resumes it")

    async def train(self, step: Callable[[Run[C]], Awaitable[None]]) -> None:
        """Run all remaining steps; evaluate and checkpoint when due: the loop of `recipes/grpo.py`.

        async with start(config) as run:
            await run.train(step)
        """
        if not self.scores:
            # Evaluations of given examples are the trainer's work, and it may die in the first one too.
            async with self.recovering():
                await self.evaluate()
        while self.step < self.config.steps:
            async with self.recovering():
                await step(self)
                if self.due(self.config.evaluation.every):
                    await self.evaluate()
                if self.due(self.config.checkpoint_every):
                    await self.checkpoint()

    def pause(self) -> None:
        """Pause: engines hold their requests at a token boundary, and training stops after the current step.

        A rollout stands still at once, an update runs to its end. Metrics and deadlines exclude the time. Checkpoints,
        live changes, chats and `stop` work meanwhile; `resume` ends the pause. A run that is stopping does not pause.
        """
        if self._stopping:
            self._live.report("not paused, as the run stops after the current step")
        elif not self.paused:
            self._hold.pause()
            self._monitor.display.pause(self._hold)
            self._live.report("paused: engines hold their requests, and training stops after the current step")

    def resume(self) -> None:
        """Continue after `pause`."""
        if self.paused:
            lasted = duration(self._hold.lasts_s)
            self._hold.resume()
            self._live.report(f"resumed after {lasted}")

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint and its summary; the same command resumes it.

        A paused run resumes for the rest of its step.
        """
        if not self._stopping:
            self._stopping = True
            self._live.report("stopping after the current step")
        # A paused step would never end.
        self.resume()

    def due(self, every: int) -> bool:
        """Return whether something done every `every` steps, and after the last step, is due now."""
        return every > 0 and (self.step % every == 0 or self.step >= self.config.steps)

    async def evaluate(self, *, wait: bool | None = None) -> float | None:
        """Evaluate the current weights on all sets; returns the first set's score, or None if it does not wait.

        By default its episodes run alongside the next batches' episodes, and its results are logged under this step, at
        the end of the step in which they complete. A pending evaluation is finished first. On given examples, the score
        is the negative loss.

        Args:
            wait: True stops everything else until the evaluation is complete, the default after the last step, with
                --evaluation.blocking, and for given examples.

        Raises:
            ForgeError: all episodes of a set failed.
        """
        if not self._evaluator.sets or self.config.evaluation.every == 0:
            return None
        # Otherwise this step's evaluation is under way already, and a second call only waits for it.
        if self._evaluator.step != self.step:
            await self.finish_evaluation()
            self._evaluator.start(self.step, self.trainer.version)
        last = self.step >= self.config.steps
        return await self.finish_evaluation() if wait or (wait is None and (last or self._evaluator.blocking)) else None

    async def finish_evaluation(self) -> float | None:
        """Wait for the pending evaluation and log it; returns its score, or None if there is none."""
        if self._evaluator.step is None:
            return None
        with self.phase("evaluate"):
            await self._evaluator.finish()
        # The row of the evaluated step is written already if that step is the current one: its times then amend the
        # row.
        return self._pop_evaluation(ends_step=self._evaluator.step == self.step)

    async def explain_gap(self, prompts: int = 16) -> GapReport:
        """Find where the gap between the engines' and the trainer's logprobs comes from; between steps.

        The engines answer prompts of the last batch again, now from the trainer's own weights, and the trainer scores
        these answers and the last batch.

            await run.explain_gap()

        Args:
            prompts: number of prompts to answer.

        Raises:
            ConfigError: no step has been taken yet, the weights have changed since they were published, or no episode
                of the last batch begins with a prompt.
        """
        if self.last_batch is None:
            raise ConfigError("no step has been taken yet", hint="take one first")
        return await explain_gap(self.generator, self.trainer, self.last_batch, prompts)

    async def after_step(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work for another task, such as `checkpoint`, once the body of `recovering` has ended; waits for it.

        Raises:
            Exception: the work failed. The run continues unless a service failed.
        """
        return await self._after_step.add(work)

    async def checkpoint(self, *, wait: bool | None = None) -> Checkpoint | None:
        """Write a checkpoint of the last finished step; returns it if it waits until it is written, else None.

        By default it waits only after the last step. Otherwise it returns once the trainer's state is copied, which is
        written while the next steps run; failing to write is then a warning, and the run continues.

        Args:
            wait: whether to wait until the checkpoint is written.

        Raises:
            CheckpointError: this waits for the checkpoint, and it cannot be written.
        """
        with self.phase("checkpoint"):
            await self._checkpointer.begin_save()
            wait = self.step >= self.config.steps if wait is None else wait
            return await self._checkpointer.finish_save() if wait else None

    async def reset(self, *, seed: int | None = None, optimizer: OptimizerConfig | None = None) -> None:
        """Return to the state before the first step, without restarting any process; between steps.

            for seed in range(3):
                await run.reset(seed=seed)
                while run.step < 20:
                    await step(run)

        Trainer and critic reload the model's files and begin with a new optimizer and learning rate schedule; tasks,
        kept objects and `last_batch` are as at the start, episodes in flight are dropped, and the engines get the
        weights as a new version: versions continue to increase. Scores of step 0 stay, as they are of the same weights,
        and so do live changes of mixture, schedule and reward. The folder's metrics and episodes after step 0 are
        dropped. Between resets, `run.loss` may be replaced by one that needs nothing the run was started without, such
        as a frozen reference.

        Args:
            seed: seed of sampling, of the order of tasks, and of the split into minibatches; by default the last
                reset's, at first --seed. A source of your own keeps its order unless it has a method `reseed(seed)`.
            optimizer: settings of the policy's optimizer from now on; by default unchanged.

        Raises:
            ConfigError: the run writes checkpoints, or was resumed from one.
            TaskError: a source cannot begin again, such as a bare iterator; nothing has then changed.
        """
        if self.config.checkpoint_every:
            raise ConfigError(
                f"--checkpoint-every is {self.config.checkpoint_every}, and a reset would leave checkpoints without "
                "their steps",
                hint="set --checkpoint-every 0",
            )
        seed = self._seed if seed is None else seed
        with self.phase("reset"):
            self._pop_evaluation()
            await self._checkpointer.reset(seed, optimizer)
            if self._adapters is not None:
                await self._adapters.restore()
            self._log.rollback(0)
        self._seed = seed
        self.last_batch = None
        self._metrics.reset()

    def __repr__(self) -> str:
        parts: tuple[object, ...] = self._services.trainers
        if (rollout := self._services.rollout) is not None:
            parts += (rollout.generator, rollout.teachers, rollout.reward, rollout.environment)
        title = f"Run  step {self.step} of {self.config.steps}  {self.folder}"
        return "\n".join([title, *(f"  {part!r}" for part in parts if part)])

    def _pop_evaluation(self, *, ends_step: bool = False) -> float | None:
        """Log the pending evaluation under its own step if it is complete; returns its score."""
        result = self._evaluator.pop()
        if result is None:
            return None
        self._checkpointer.mark_best()
        self._clock.tokens("evaluate", result.tokens)
        self._log.log(result.step, result.metrics | (self._metrics.end_evaluation() if ends_step else {}))
        records = functools.partial(evaluated_episodes, result.step, result.episodes)
        self._log.record(result.step, "evaluated", records)
        return result.score

    def _last_checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint that the run wrote, or continued from; None if there is none."""
        saved = self._checkpointer.saved
        return None if saved is None else self._checkpointer.checkpoints.of_step(saved).folder

    async def _recover(self, name: str) -> None:
        """Roll back after the death of the trainer or the critic, by its name."""
        with self.phase("recover"):
            # An evaluation whose episodes are complete keeps its score; the rollback starts pending ones again.
            self._pop_evaluation()
            step = await self._checkpointer.rollback()
            while self._adapters is not None:
                try:
                    await self._adapters.restore()
                    break
                except ReplicaError as error:
                    # The trainer died again. Once no restart is left, `rollback` raises another error, which ends this.
                    if error.service != self.trainer.name:
                        raise
                    step = await self._checkpointer.rollback()
            self._log.rollback(step)
            self._log.warn(f"the {name} was restarted; the run continues from step {step}")
