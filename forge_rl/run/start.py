"""Start a run and end it: services side by side, the first weights, resume, interruption, the summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from forge_rl.checkpoint import Checkpoint
from forge_rl.data.mixture import Mixture
from forge_rl.data.models import resolve_model
from forge_rl.data.sources import make_sources, parse_source
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.engines.platform import resolve_dtype
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ForgeError
from forge_rl.gateway import Agent, GatewayConfig, GeneratorBackend, serving_agents
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
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import Attempt, RolloutExecutor, Shape
from forge_rl.rollout.placement import DeviceHandover, shares_devices
from forge_rl.run.config import RunConfig
from forge_rl.run.monitor import RunMonitor
from forge_rl.run.run import Run
from forge_rl.run.run_dir import as_json, check_space, choose_folder, prepare_folder
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.garbage import rare_collections
from forge_rl.runtime.tasks import task_group
from forge_rl.services.environment import EnvFactory, Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import Reward, RewardFunction
from forge_rl.services.trainer import Trainer
from forge_rl.services.weight_store import WeightStore

_START_DEADLINE_S = 900.0

C = TypeVar("C", bound=RunConfig)


class Starting(Generic[C]):
    """A run that is about to start: `async with start(config) as run`, or `run = await start(config).open()`."""

    def __init__(self, context: AbstractAsyncContextManager[Run[C]]) -> None:
        self._context = context

    async def __aenter__(self) -> Run[C]:
        return await self._context.__aenter__()

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._context.__aexit__(*error)  # type: ignore[arg-type]

    async def open(self) -> Run[C]:
        """For an interactive session: the run stays open until `await run.close()` or until Python ends."""
        run = await self._context.__aenter__()
        run._close = lambda: self._context.__aexit__(None, None, None)
        return run


def start(
    config: C,
    *,
    recipe: str = "grpo",
    reward: RewardFunction | None = None,
    environment: EnvFactory = SingleTurn,
    agent: Agent | None = None,
    gateway: GatewayConfig | None = None,
) -> Starting[C]:
    """Start everything that a recipe needs, or continue where the same command stopped.

    Args:
        config: of the recipe.
        recipe: its name, for the run folder.
        reward: scores episodes; the config's verifier by default.
        environment: makes each episode's world; by default the model answers once.
        agent: makes the episodes instead of worlds; it finds the policy at a gateway.
        gateway: of the agent.

    Returns:
        A context manager that yields the Run.
    """
    return Starting(_start(config, recipe, reward or config.verifier, environment, agent, gateway or GatewayConfig()))


@contextlib.asynccontextmanager
async def _start(
    config: C,
    recipe: str,
    reward: RewardFunction,
    environment: EnvFactory,
    agent: Agent | None,
    gateway: GatewayConfig,
) -> AsyncIterator[Run[C]]:
    clock = PhaseClock()
    faults = Faults(phase=lambda: clock.current)
    shared = shares_devices(
        config.placement,
        ranks=config.trainer.ranks,
        engines=config.generator.replicas,
        decodes_while_training=config.schedule.decodes_while_training,
    )
    folder = choose_folder(config, recipe, config.out)
    specs = [parse_source(text) for text in config.tasks]
    sources = make_sources(
        specs, config.seed, config.held_out_share, instruction=config.instruction, system=config.system
    )
    mixture = Mixture(sources, {name: spec.weight for name, spec in zip(sources, specs, strict=True)})
    held_out = mixture.held_out(config.held_out_tasks) if config.held_out_tasks and config.eval_every else ()
    lock = prepare_folder(folder, config)
    display = Display(config.display, phase_clock=clock)
    log = RunLog(display, *_sinks(config, folder))
    watch = RunMonitor(folder, display, log, clock, faults)
    run = Run(config, folder, clock, faults, log, watch)
    watching: asyncio.Task[None] | None = None
    checkpoint = run._checkpoints.latest()
    cluster = Cluster((folder / "logs").resolve())
    front = contextlib.AsyncExitStack()
    front.enter_context(rare_collections())
    try:
        log.start(
            RunInfo(
                recipe=recipe,
                model=config.model,
                folder=folder,
                steps=config.steps,
                step=checkpoint.step if checkpoint else 0,
                config=_flat(as_json(config)),
            )
        )
        faults.install()
        watching = asyncio.ensure_future(watch.run())
        model = await asyncio.to_thread(resolve_model, config.model, config.cache, display.progress)
        run._model = model.resolve()
        if config.checkpoint_every:
            check_space(folder, _checkpoint_bytes(run._model) * (config.keep_checkpoints + 1))
        worlds = environment if agent is None else None
        await _start_services(run, cluster, faults, display, reward, worlds, checkpoint)
        log.event(run.weights.choice)
        run.mixture, run.held_out = mixture, held_out
        run.tokenizer = Tokenizer(run._model)
        run._devices = DeviceHandover(run.generator, run.trainer if shared else None)
        run.generator.lent = run._devices.lent
        attempt: Attempt
        if agent is None:
            assert run.environment is not None
            attempt = EpisodeRunner(run.tokenizer, run.environment, run.reward)
        else:
            engines = GeneratorBackend(run.generator, config.model)
            serving = serving_agents(agent, gateway, engines, run.tokenizer, run.reward)
            attempt = await front.enter_async_context(serving)
        run.rollouts = RolloutExecutor(
            mixture=mixture,
            shape=Shape(groups=config.groups_per_batch, episodes=config.group_size),
            schedule=config.schedule,
            tokenizer=run.tokenizer,
            generator=run.generator,
            attempt=attempt,
            devices=run._devices,
            seed=config.seed,
            version=lambda: run.trainer.version,
            warn=lambda text: log.event(text, "warning"),
        )
        watch.rollouts(run.rollouts.status, run.rollouts.waiting_for)
        await run._restore(checkpoint)
        if checkpoint is not None:
            log.event(f"continued from {checkpoint.folder}")
        if held_out and len(held_out) < config.held_out_tasks:
            log.event(f"there are only {len(held_out)} distinct held-out tasks", "warning")
        await _first_weights(run, display)
        run._finish_step()
        with _stop_on_fault(run):
            yield run
        if run.step >= config.steps:
            _summarise(run, display)
    except asyncio.CancelledError:
        if faults.fatal is None:
            log.event("stopping: a second Ctrl-C stops at once, without saving")
            await _save_interrupted(run)
        raise
    finally:
        faults.closing = True
        if watching is not None:
            watching.cancel()
        try:
            if hasattr(run, "rollouts"):
                await run.rollouts.close()
            await front.aclose()
            await _stop_services(run, cluster)
        finally:
            watch.close()
            log.close()
            os.close(lock)


def _checkpoint_bytes(model: Path) -> int:
    """About what a checkpoint takes: weights, two moments and the exported copy, where the model is in bfloat16."""
    return 7 * sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _version_bytes(model: Path, generator: Generator.Config) -> int:
    """About what a published version takes, where the model is in bfloat16."""
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return stored * resolve_dtype(generator.dtype).itemsize // 2


def _sinks(config: RunConfig, folder: Path) -> list[Sink]:
    sinks: list[Sink] = [
        JSONLSink(folder / "metrics.jsonl"),
        EventSink(folder / "events.jsonl"),
        EpisodeSink(folder / "episodes.jsonl"),
        TensorBoardSink(folder / "tensorboard"),
    ]
    if config.wandb:
        settings = _flat(as_json(config))
        sinks.append(WandbSink(config.wandb, name=folder.name, config=settings))
    return sinks


async def _start_services(
    run: Run[C],
    cluster: Cluster,
    faults: Faults,
    display: Display,
    reward: RewardFunction,
    environment: EnvFactory | None,
    checkpoint: Checkpoint | None,
) -> None:
    """Side by side: none needs another to start."""
    config = run.config
    deadline_s = _START_DEADLINE_S

    async def shown(name: str, detail: str, starting: Awaitable[object]) -> None:
        display.startup(name, "starting", detail)
        try:
            service = await starting
        except BaseException:
            display.startup(name, "failed", detail)
            raise
        setattr(run, name, service)
        display.startup(name, "ready", detail)

    ranks, replicas = config.trainer.ranks, config.generator.replicas
    parts: list[tuple[str, str, Awaitable[object]]] = [
        (
            "trainer",
            f"torchtitan, {ranks} rank" + "s" * (ranks > 1),
            Trainer.start(
                config.trainer,
                cluster,
                faults,
                model=run._model,
                resume=checkpoint.training.resolve() if checkpoint else None,
                reference=config.loss.needs_reference,
                total_steps=config.steps,
                deadline_s=deadline_s,
            ),
        ),
        (
            "generator",
            f"vLLM, {replicas} replica" + "s" * (replicas > 1),
            Generator.start(
                config.generator,
                cluster,
                faults,
                model=run._model,
                seed=config.seed,
                deadline_s=deadline_s,
                first_gpu=0
                if shares_devices(
                    config.placement,
                    ranks=config.trainer.ranks,
                    engines=config.generator.replicas,
                    decodes_while_training=config.schedule.decodes_while_training,
                )
                else ranks,
            ),
        ),
        (
            "weights",
            config.weights.transport,
            WeightStore.start(
                config.weights,
                cluster,
                faults,
                deadline_s=deadline_s,
                expected_bytes=_version_bytes(run._model, config.generator),
            ),
        ),
        (
            "reward",
            type(reward).__name__,
            Reward.start(config.reward, cluster, faults, function=reward, deadline_s=deadline_s),
        ),
    ]
    if environment is not None:
        worlds = Environment.start(config.environment, cluster, faults, factory=environment, deadline_s=deadline_s)
        parts.append(("environment", getattr(environment, "__name__", type(environment).__name__), worlds))
    async with task_group() as group:
        for name, detail, starting in parts:
            group.create_task(shown(name, detail, starting))


async def _first_weights(run: Run[C], display: Display) -> None:
    """Engines get their weights from the store before the first rollout, and are attested, like after each step."""
    display.startup("first weights", "starting", "trainer to engines")
    version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
    await run.generator.load(run.weights, version)
    display.startup("first weights", "ready", f"version {version}, attested")


@contextlib.contextmanager
def _stop_on_fault(run: Run[C]) -> Iterator[None]:
    """While the recipe runs, a process that dies stops it, also when nobody is calling it.

    Raises:
        ServiceError: a process died; names service, replica, cause and phase.
    """
    main = asyncio.current_task()
    assert main is not None
    error: ForgeError | None = None

    async def wait() -> None:
        nonlocal error
        found = await run._faults.wait()
        await asyncio.sleep(0.5)  # a call in flight fails by itself, and says more
        error = found
        main.cancel()

    watching = asyncio.ensure_future(wait())
    try:
        yield
    except asyncio.CancelledError:
        if error is None:
            raise
        main.uncancel()
        raise error from None
    finally:
        watching.cancel()


async def _save_interrupted(run: Run[C]) -> None:
    """Keep what was trained since the last checkpoint."""
    if not hasattr(run, "rollouts") or run.config.checkpoint_every == 0 or not run.trainer.alive:
        return
    step = await run.trainer.settle()
    if step > run._logged:  # it was stopped in the optimizer step, which ended
        run.log({}, run.rollouts.last)
    if step != run._saved_step and step > 0:
        await run._save()
        run._log.event(f"saved step {run.step}; the same command continues from there")


async def _stop_services(run: Run[C], cluster: Cluster) -> None:
    async with task_group() as group:
        for name in ("trainer", "generator", "weights", "reward", "environment"):
            if service := getattr(run, name, None):
                group.create_task(service.stop())
    await cluster.close()


def _summarise(run: Run[C], display: Display) -> None:
    scores = run.scores
    checkpoint = run._checkpoints.latest()
    recoveries = run._monitor.recoveries()
    summary = {
        "score_before": scores[min(scores)] if scores else None,
        "score_after": scores[max(scores)] if scores else None,
        "steps": run.step,
        "seconds": round(run.seconds, 1),
        "faults": [asdict(recovery) for recovery in recoveries],
    }
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    places: dict[str, object] = {
        "run folder": run.folder,
        "metrics": run.folder / "metrics.jsonl",
        "timeline": f"{run.folder / 'trace.json'} (open it in ui.perfetto.dev)",
    }
    if checkpoint is not None:
        places["model"] = checkpoint.model
    places["curves"] = f"tensorboard --logdir {run.folder / 'tensorboard'}"
    display.summary(places, recoveries)


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {
            key: item
            for name, part in value.items()
            for key, item in _flat(part, f"{prefix}.{name}" if prefix else name).items()
        }
    return {prefix: value}
