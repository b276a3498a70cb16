"""Services of a run: started concurrently, stopped together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forge_rl.engines.architecture import stored_bytes
from forge_rl.engines.platform import gpus, resolve_dtype
from forge_rl.envs.protocol import EnvFactory
from forge_rl.metrics import Display
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.run.run_config import RunConfig
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.tasks import task_group
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import Reward, RewardFunction
from forge_rl.services.trainer import Trainer
from forge_rl.services.weight_store import WeightStore

_START_DEADLINE_S = 900.0

Service = Trainer | Generator | WeightStore | Reward | Environment
S = TypeVar("S", bound=Service)


@dataclass(frozen=True, kw_only=True)
class Services:
    """Handles of all services of a run."""

    trainer: Trainer
    generator: Generator
    weights: WeightStore
    reward: Reward
    environment: Environment | None
    """None if an agent plays the episodes."""
    devices: DeviceHandover
    """Hands shared devices back and forth between trainer and generator."""


def _name_of(environment: EnvFactory) -> str:
    environment = getattr(environment, "func", environment)  # a partial of a class
    return getattr(environment, "__name__", type(environment).__name__)


@contextlib.asynccontextmanager
async def running_services(
    config: RunConfig,
    cluster: Cluster,
    faults: Faults,
    display: Display,
    *,
    folder: Path,
    model: Path,
    resume: Path | None,
    reference: bool,
    shares_devices: bool,
    reward: RewardFunction,
    environment: EnvFactory | None,
) -> AsyncIterator[Services]:
    """Start all services concurrently, on shared GPUs the trainer after the engines, and stop them after the body.

    Args:
        cluster: closed after the services.
        folder: the run folder.
        model: Hugging Face folder.
        resume: training state to resume from, if any.
        reference: whether the trainer keeps a frozen reference.
        environment: None if an agent plays the episodes.

    Raises:
        ForgeError: a service did not start; the others are stopped.
    """
    started: list[Service] = []
    ranks, replicas, deadline_s = config.trainer.ranks, config.generator.replicas, _START_DEADLINE_S
    each = config.generator.devices
    handover: asyncio.Future[DeviceHandover] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def start_engine() -> AsyncIterator[None]:
        devices = await asyncio.shield(handover)  # not while the trainer starts
        async with devices.start_engine():
            yield

    try:
        async with task_group() as group:

            def begin(name: str, detail: str, starting: Awaitable[S]) -> asyncio.Task[S]:
                async def start() -> S:
                    display.startup(name, "starting", detail)
                    try:
                        service = await starting
                    except BaseException:
                        display.startup(name, "failed", detail)
                        raise
                    started.append(service)
                    display.startup(name, "ready", detail)
                    return service

                return group.create_task(start())

            generator = begin(
                "generator",
                f"vLLM, {replicas} replica" + "s" * (replicas > 1) + f" of {each} devices" * (each > 1),
                Generator.start(
                    config.generator,
                    cluster,
                    faults,
                    model=model,
                    seed=config.seed,
                    deadline_s=deadline_s,
                    first_gpu=0 if shares_devices else ranks,
                    lend=lambda: handover.result().lend(),
                    replace=start_engine,
                    parse_control_tokens=config.parse_control_tokens,
                ),
            )

            async def start_trainer() -> Trainer:
                if shares_devices and gpus():  # vLLM would count the trainer's allocations as its own
                    await asyncio.wait((generator,))
                return await Trainer.start(
                    config.trainer,
                    cluster,
                    faults,
                    model=model,
                    resume=resume,
                    reference=reference,
                    seed=config.seed,
                    total_steps=config.steps,
                    skipped=folder / "skipped",
                    deadline_s=deadline_s,
                )

            trainer = begin("trainer", f"torchtitan, {ranks} rank" + "s" * (ranks > 1), start_trainer())
            weights = begin(
                "weights",
                config.weights.transport,
                WeightStore.start(
                    config.weights,
                    cluster,
                    faults,
                    deadline_s=deadline_s,
                    expected_bytes=stored_bytes(model) * resolve_dtype(config.generator.dtype).itemsize // 2,
                ),
            )
            scorer = begin(
                "reward",
                type(reward).__name__,
                Reward.start(
                    config.reward,
                    cluster,
                    faults,
                    function=reward,
                    deadline_s=deadline_s,
                    folder=(folder / "reward").resolve(),
                ),
            )
            if environment is not None:
                envs = begin(
                    "environment",
                    _name_of(environment),
                    Environment.start(config.environment, cluster, faults, factory=environment, deadline_s=deadline_s),
                )
        devices = DeviceHandover(generator.result(), trainer.result() if shares_devices else None)
        handover.set_result(devices)
        yield Services(
            trainer=trainer.result(),
            generator=generator.result(),
            weights=weights.result(),
            reward=scorer.result(),
            environment=envs.result() if environment is not None else None,
            devices=devices,
        )
    finally:
        stopped = await asyncio.gather(*(service.stop() for service in started), return_exceptions=True)
        await cluster.close()
        for failure in stopped:
            if isinstance(failure, BaseException):
                raise failure
