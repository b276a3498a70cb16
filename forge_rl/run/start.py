"""Starts or resumes a run, and shuts it down in every case."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from forge_rl.algorithms.losses import Loss
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.data.mixture import AnySources, as_mixture
from forge_rl.data.scan import check_tasks
from forge_rl.engines.architecture import read_architecture, stored_bytes
from forge_rl.engines.context import check_context
from forge_rl.engines.decode_layout import check_decode_layout
from forge_rl.engines.degrees import check_model
from forge_rl.engines.platform import slow_format
from forge_rl.envs.protocol import AgentEnvironment, EnvFactory
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError
from forge_rl.gateway import GatewayConfig, GeneratorBackend
from forge_rl.gateway.tools import ToolParser, parser_for
from forge_rl.metrics import (
    Display,
    EpisodeSink,
    EventSink,
    JSONLSink,
    PhaseClock,
    RunInfo,
    RunLog,
    Sink,
    TensorBoardSink,
    WandbSink,
)
from forge_rl.models.dequantized import dequantized
from forge_rl.models.resolve import resolve_model
from forge_rl.rewards.confinement import missing_confinement
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.rollout.agents import Agent, serving_agents
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import RolloutExecutor, RunEpisode
from forge_rl.rollout.placement import shares_devices
from forge_rl.run.checkpointing import Checkpointer
from forge_rl.run.checkpoints import Checkpoints
from forge_rl.run.control import Control, serving_control
from forge_rl.run.defaults import with_defaults
from forge_rl.run.evaluator import HELD_OUT, Evaluator
from forge_rl.run.live import LiveSettings
from forge_rl.run.monitor import RunMonitor
from forge_rl.run.plan import check_state_fits
from forge_rl.run.policy_gateway import PolicyGateway
from forge_rl.run.run import Run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.run_dir import as_flat_json, check_space, choose_folder, code_digests, prepare_folder
from forge_rl.run.services import running_services
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.isolation import check_isolation
from forge_rl.runtime.pauses import clock_without_pauses
from forge_rl.runtime.processes import responsive_loop
from forge_rl.runtime.tasks import interrupted_by
from forge_rl.services.reward import RewardFunction, parts_of
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Task

C = TypeVar("C", bound=RunConfig)


@dataclass(eq=False)
class Starting(Generic[C]):
    """Starts everything that a recipe needs, or resumes where the same command stopped.

        async with start(config, loss=config.loss, sources=sources, reward=score) as run:
            batch = await run.rollouts.next_batch()

    Raises:
        ConfigError: settings contradict each other, the machine, or the run being resumed.
        LossError: the loss does not work, see `try_loss`.
        ForgeError: something did not start; says what and why.
    """

    config: C
    """Settings of the recipe."""
    _: KW_ONLY
    loss: Loss
    """Loss to train with; determines whether the trainer keeps a reference."""
    sources: AnySources
    """Sources of tasks: a weighted mixture, a source, a list or other iterable of tasks or rows such as {"question":
    "2+3?", "answer": "5"}, a function that returns one, or several by name. A tenth of a list's problems is held
    out."""
    reward: RewardFunction
    """Scores episodes; see `rewards/protocol.py`."""
    evaluation: Mapping[str, Sequence[Task]] | None = None
    """Sets of tasks to evaluate on, by name; the first set's score is the run's. By default the sources' held-out tasks
    as `held_out`, and the sets of --eval-tasks."""
    environment: EnvFactory | AgentEnvironment = SingleTurn
    """Creates each episode's environment; by default the model answers once. One that plays whole episodes itself
    replaces agent and reward."""
    agent: Agent | str | None = None
    """Plays the episodes instead of environments, calling the policy through a gateway. A string, MODULE:FUNCTION or
    FILE.py:FUNCTION, names one that runs in its own process."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """Settings of the gateway for the agent."""
    recipe: str = "run"
    """Name of the recipe, for the run folder."""

    def __post_init__(self) -> None:
        if not callable(self.environment):
            self.agent, self.reward = self.environment.agent, self.environment.reward
        self.mixture = as_mixture(self.sources, seed=self.config.seed)
        self._running = self._run()

    async def __aenter__(self) -> Run[C]:
        return await self._running.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._running.__aexit__(*error)

    async def open(self) -> Run[C]:
        """Start for an interactive session: the run stays open until `await run.close()` or until Python exits."""
        return await self._running.__aenter__()

    @contextlib.asynccontextmanager
    async def _run(self) -> AsyncIterator[Run[C]]:
        config = self.config
        open_to = check_isolation(config.isolation)
        try_loss(self.loss)
        clock = PhaseClock()
        faults = Faults(phase=lambda: clock.current)
        shared = shares_devices(
            config.placement,
            ranks=config.trainer.ranks,
            engines=config.generator.replicas * config.generator.devices,
            decodes_while_training=config.schedule.decodes_while_training,
        )
        generators = [getattr(source, "items", None) for source in self.mixture.sources.values()]
        rewards = parts_of(self.reward).values()
        code = code_digests(config, *rewards, self.environment, self.agent, self.loss, *generators)
        folder, notes = choose_folder(config, self.recipe, config.out, code)
        damaged: list[str] = []
        run: Run[C] | None = None
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(os.close, prepare_folder(folder, config, code))
            checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
            checkpoint = await asyncio.to_thread(checkpoints.set_damaged_aside, damaged.append)
            display = Display(config.display, phase_clock=clock)
            sinks: list[Sink] = [
                JSONLSink(folder / "metrics.jsonl"),
                EventSink(folder / "events.jsonl"),
                EpisodeSink(folder / "episodes.jsonl"),
            ]
            try:
                sinks.append(TensorBoardSink(folder / "tensorboard"))
            except ConfigError as error:
                notes.append(f"no TensorBoard curves: {error.message}; {error.hint}")
            if config.wandb:
                sinks.append(WandbSink(config.wandb))
            log = RunLog(display, *sinks)
            stack.callback(log.close)
            monitor = stack.enter_context(contextlib.closing(RunMonitor(folder, display, log, clock, faults)))
            stack.enter_context(responsive_loop())
            stack.enter_context(clock_without_pauses())
            log.start(
                RunInfo(
                    recipe=self.recipe,
                    model=config.model,
                    folder=folder,
                    steps=config.steps,
                    step=checkpoint.step if checkpoint else 0,
                    config=as_flat_json(config),
                )
            )
            for note in notes:
                log.event(note)
            for note in damaged:
                log.event(note, "warning")
            for warning in filter(None, (open_to, missing_confinement(), slow_format(config.trainer.dtype))):
                log.event(warning, "warning")
            faults.install()
            warn = partial(log.event, level="warning")
            watch = display.watch(waiting=monitor.waiting_for, status=monitor.poll, tell=warn)
            watching = asyncio.get_running_loop().create_task(watch)

            async def raise_fault() -> None:
                error = await faults.wait()
                await asyncio.sleep(0.5)  # a call in flight fails by itself, with a better message
                raise error

            try:
                if not callable(self.environment):
                    await stack.enter_async_context(self.environment.serving(folder / "logs"))
                model = (await asyncio.to_thread(resolve_model, config.model, config.cache, display.progress)).resolve()
                # Refuse models that cannot be trained, cannot use this layout, or do not fit, before anything starts.
                architecture = read_architecture(model)
                check_model(config.trainer, config.trainer.ranks, architecture)
                needs_reference = self.loss.needs_reference
                config, chosen = await asyncio.to_thread(with_defaults, config, model, reference=needs_reference)
                for line in chosen:
                    log.event(f"chosen: {line}")
                shared = shared or config.placement == "colocated"
                check_state_fits(config, architecture, reference=needs_reference)
                if architecture.quantized:
                    log.event(f"{config.model} is quantised: engines and trainer use its weights in bfloat16")
                    model = await asyncio.to_thread(dequantized, model, config.cache, display.progress)
                check_decode_layout(model, config.generator, engines=config.generator.replicas)
                check_context(architecture, config.generator)
                match checkpoint.controller_state() if checkpoint is not None else None:
                    case {"rollouts": {"mixture": dict(saved)}}:
                        self.mixture.restore_sources(saved)  # refuses files that have changed
                limit = config.generator.max_model_len - config.generator.max_tokens
                checking = partial(check_tasks, limit=limit, cache=config.cache, progress=display.progress)
                scans = await asyncio.to_thread(checking, self.mixture, partial(Tokenizer, model))
                for name, scan in scans.items():
                    log.event(f"{name}: {scan.describe(limit)}")
                sets = self._sets()
                if config.checkpoint_every:
                    bytes_each = 7 * stored_bytes(model)  # weights, two moments and the exported copy
                    check_space(folder, bytes_each * (config.keep_checkpoints + 1 + config.evaluation.keep_best))
                services = await stack.enter_async_context(
                    running_services(
                        config,
                        Cluster((folder / "logs").resolve(), may_be_public=config.isolation.public_ports),
                        faults,
                        display,
                        folder=folder,
                        model=model,
                        resume=checkpoint.training.resolve() if checkpoint else None,
                        reference=needs_reference,
                        shares_devices=shared,
                        reward=self.reward,
                        environment=self.environment if self.agent is None and callable(self.environment) else None,
                    )
                )
                log.event(services.weights.choice)
                tokenizer = Tokenizer(model, parse_control_tokens=config.parse_control_tokens)
                run_episode: RunEpisode
                if self.agent is not None:
                    engines = GeneratorBackend(services.generator, config.model)
                    serving = serving_agents(
                        self.agent,
                        self.gateway,
                        engines,
                        tokenizer,
                        services.reward,
                        warn=lambda text: log.event(text, "warning"),
                        logs=folder / "logs",
                    )
                    run_episode = await stack.enter_async_context(serving)
                else:
                    assert services.environment is not None
                    parser = ToolParser(config.tool_parser or parser_for(tokenizer), tokenizer)
                    run_episode = EpisodeRunner(tokenizer, services.environment, services.reward, parser.parse)
                rollouts = RolloutExecutor(
                    mixture=self.mixture,
                    groups=config.groups_per_batch,
                    episodes=config.group_size,
                    schedule=config.schedule,
                    tokenizer=tokenizer,
                    generator=services.generator,
                    run_episode=run_episode,
                    reward=services.reward,
                    devices=services.devices,
                    seed=config.seed,
                    version=lambda: services.trainer.version,
                    warn=lambda text: log.event(text, "warning"),
                    on_episode=log.episode,
                    reward_wait_s=config.reward.wait_for_another_s,
                )
                stack.push_async_callback(rollouts.close)
                services.reward.replaced.append(rollouts.reward_replaced)
                services.reward.samples = rollouts.samples
                monitor.follow(rollouts.status, rollouts.waiting_for)
                live = LiveSettings(
                    folder / "live.json",
                    step=lambda: checkpointer.step,
                    mixture=self.mixture,
                    adapting=config.mixture,
                    reward=services.reward,
                    rollouts=rollouts,
                    build_reward=build_reward,
                    tell=log.event,
                )
                stack.callback(live.close)
                keep_best = config.evaluation.keep_best
                checkpointer = Checkpointer(
                    checkpoints, services, rollouts, model, live, warn=warn, keep_best=keep_best
                )
                stack.push_async_callback(checkpointer.close)
                await checkpointer.resume(checkpoint)
                if checkpoint is not None:
                    log.event(f"continued from {checkpoint.folder}")
                if self.evaluation is None and 0 < (found := len(sets.get(HELD_OUT, ()))) < config.evaluation.tasks:
                    log.event(f"there are only {found} distinct held-out tasks", "warning")
                display.startup("first weights", "starting", "trainer to engines")
                version = await services.trainer.publish(services.weights, dtype=services.generator.dtype)
                await services.generator.load(services.weights, version)
                display.startup("first weights", "ready", f"version {version}, attested")
                evaluator = Evaluator(
                    config.evaluation,
                    sets,
                    rollouts,
                    max_tokens=config.generator.max_tokens,
                    warn=lambda text: log.event(text, "warning"),
                )
                run = Run(
                    config,
                    folder,
                    services=services,
                    rollouts=rollouts,
                    mixture=self.mixture,
                    evaluator=evaluator,
                    checkpointer=checkpointer,
                    monitor=monitor,
                    schedule=live.schedule,
                    close=partial(self.__aexit__, None, None, None),
                )
                run.restart_evaluation()
                policy = PolicyGateway(GeneratorBackend(services.generator, config.model), tokenizer, warn)
                stack.push_async_callback(policy.close)
                await stack.enter_async_context(serving_control(folder, Control(run, live, policy), warn))
                gc.freeze()  # also modules imported meanwhile: see responsive_loop
                with interrupted_by(raise_fault):
                    yield run
                    if run.step >= config.steps:
                        await run.finish_evaluation()
                        await checkpointer.finish_save()
                if run.step >= config.steps:
                    best = checkpoints.best()
                    monitor.summarise(run.step, checkpointer.seconds, run.scores, checkpoints.latest(), best)
            except asyncio.CancelledError:
                log.event("stopping: a second signal stops immediately, without saving")
                if run is not None:
                    await run.save_interrupted()
                raise
            except Exception as error:
                trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
                log.keep(f"ended by {error}\n{trace}", "fault")
                if run is not None:
                    await run.save_after(error)
                raise
            finally:
                faults.closing = True
                watching.cancel()

    def _sets(self) -> Mapping[str, Sequence[Task]]:
        """Return the sets to evaluate on; none if the settings turn evaluation off."""
        settings = self.config.evaluation
        if not settings.every:
            return {}
        if self.evaluation is not None:
            return self.evaluation
        return self.mixture.eval_sets(settings.tasks)


start = Starting  # the name that recipes use: `async with start(...) as run`
