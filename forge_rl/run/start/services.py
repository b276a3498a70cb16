"""Services of a run: started concurrently, stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from forge_rl.engines.architecture import stored_bytes
from forge_rl.engines.devices import gpus
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.speculation import read_speculation
from forge_rl.envs.protocol import EnvFactory
from forge_rl.metrics import Display
from forge_rl.models.bundled import default_cache
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.run.run_config import RunConfig
from forge_rl.run.service_set import RolloutServices, Services
from forge_rl.run.start.checks import CheckedRun
from forge_rl.run.start.hosts import RunHosts
from forge_rl.run.start.preparation import PreparedRun
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.runtime.service import Service
from forge_rl.services.device_sharing import DeviceSharing
from forge_rl.services.environment import Environment
from forge_rl.services.far_hosts import copy_folders
from forge_rl.services.generator import Generator
from forge_rl.services.reward import RewardFunction, RewardService
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.teachers import Teachers
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import TrainedModel, TrainerConfig, TrainingRun
from forge_rl.services.weight_store import WeightStore
from forge_rl.system.tasks import task_group
from forge_rl.tokens.template_args import read_template_args
from forge_rl.tokens.tokenizer import Tokenizer

_START_DEADLINE_S = 900.0
_COPY_DEADLINE_S = 6 * 3600.0
"""Maximum time of copying models to a host: 2 TB at 100 MB/s."""


class _Stoppable(Protocol):
    async def stop(self) -> None: ...


C = TypeVar("C", bound=RunConfig)
S = TypeVar("S", bound=_Stoppable)


@contextlib.asynccontextmanager
async def running_services(
    prepared: PreparedRun,
    checked: CheckedRun[C],
    hosts: RunHosts,
    *,
    reward: RewardFunction | None,
    environment: EnvFactory | None,
) -> AsyncIterator[Services]:
    """Start all services concurrently, on shared GPUs the trainer after the engines, and stop them after the body.

    Args:
        hosts: where each service starts.
        reward: None if nothing is generated: the trainer then starts alone.
        environment: None if an agent plays the episodes.

    Raises:
        ForgeError: a service did not start; the others are stopped.
    """
    started: list[_Stoppable] = []

    async def stop() -> list[BaseException]:
        # One service that cannot stop must not keep the others running.
        results = await asyncio.gather(*(service.stop() for service in started), return_exceptions=True)
        return [result for result in results if isinstance(result, BaseException)]

    try:
        yield await _start_services(prepared, checked, hosts, started, reward=reward, environment=environment)
    except BaseException as error:
        # The user needs the error that ended the body, or the signal, and not what follows from it.
        for failure in await stop():
            error.add_note(f"a service could not be stopped: {failure}")
        raise
    for failure in await stop():
        raise failure


async def _start_services(
    prepared: PreparedRun,
    checked: CheckedRun[C],
    hosts: RunHosts,
    started: list[_Stoppable],
    *,
    reward: RewardFunction | None,
    environment: EnvFactory | None,
) -> Services:
    config = checked.config
    if hosts.without_model:
        await _copy_models(checked, hosts, prepared)
    # The handover needs the started generator, whose replacement engines need the handover: a future closes the circle.
    handover: asyncio.Future[DeviceHandover] = asyncio.get_running_loop().create_future()
    generator = weights = scorer = envs = teachers = critic = None
    # The first failure cancels all other starts, and is the one error that the user sees.
    async with task_group() as group:

        def begin(name: str, detail: str, starting: Awaitable[S]) -> asyncio.Task[S]:
            return group.create_task(_start(name, detail, starting, started, prepared.monitor.display))

        # Rollouts need all of these. Without a reward nothing is generated, and the trainer starts alone.
        if reward is not None:
            generator = begin("generator", _engines(config), _start_generator(checked, hosts, prepared, handover))
            weights = begin("weights", config.weights.transport, _start_store(checked, hosts, prepared))
            reward_start = RewardService.start(
                config.reward,
                _service_start(hosts, prepared, hosts.placed.of("reward")),
                function=reward,
                folder=(prepared.folder / "reward").resolve(),
            )
            scorer = begin("reward", type(reward).__name__, reward_start)
            if environment is not None:
                kind = getattr(environment, "func", environment)  # a partial of a class
                env_start = Environment.start(
                    config.environment,
                    _service_start(hosts, prepared, hosts.placed.of("environment")),
                    factory=environment,
                )
                envs = begin("environment", getattr(kind, "__name__", type(kind).__name__), env_start)
            if checked.models.teachers is not None:
                models = ", ".join(checked.models.teachers.models)
                teachers = begin("teachers", models, _start_teachers(checked, hosts, prepared, policy=generator))
        trainer = begin("trainer", _ranks(config.trainer), _start_trainer(checked, hosts, prepared, after=generator))
        if checked.models.critic is not None:
            critic = begin(
                "critic", _ranks(checked.models.critic), _start_critic(checked, hosts, prepared, after=generator)
            )
    services = Services(trainer=trainer.result(), critic=critic.result() if critic is not None else None)
    if generator is None or weights is None or scorer is None:
        return services
    # Guests decode on the trainers' own devices while these wait for a batch; other engines only on shared ones.
    guests = DeviceHandover(generator.result().guests, *services.trainers) if config.generator.guests else None
    shared = services.trainers if checked.shares_devices else ()
    devices = DeviceHandover(generator.result(), *shared, guests=guests)
    handover.set_result(devices)
    prepared.monitor.log.event(weights.result().choice)
    rollout = RolloutServices(
        generator=generator.result(),
        weights=weights.result(),
        reward=scorer.result(),
        environment=envs.result() if envs is not None else None,
        devices=devices,
        teachers=teachers.result() if teachers is not None else None,
    )
    return replace(services, rollout=rollout)


async def _copy_models(checked: CheckedRun[C], hosts: RunHosts, prepared: PreparedRun) -> None:
    """Copy the models into the caches of hosts that do not see them."""
    display, drafting = prepared.monitor.display, read_speculation(checked.config.generator.speculation)
    folders = {checked.models.policy, checked.models.critic_folder, *checked.models.teacher_folders.values()}
    if drafting is not None and drafting.model:
        folders.add(Path(drafting.model))
    # A path of this user's home may not exist on another host, whose own default is used then.
    cache = None if checked.config.cache == default_cache() else checked.config.cache
    service = Service("copies", hosts.cluster, prepared.monitor.faults, recoverable=True)
    display.startup("models", "starting", ", ".join(hosts.without_model))
    try:
        copies = await copy_folders(service, hosts.without_model, folders, cache, deadline_s=_COPY_DEADLINE_S)
    finally:
        await service.stop()
    hosts.cluster.copies.update(copies)
    display.startup("models", "ready", ", ".join(hosts.without_model))


def _ranks(config: TrainerConfig) -> str:
    return f"torchtitan, {config.ranks} rank{'s' * (config.ranks > 1)}"


async def _start_store(checked: CheckedRun[C], hosts: RunHosts, prepared: PreparedRun) -> WeightStore:
    config = checked.config
    weights = config.weights
    if config.generator.hosts_per_replica > 1:  # each host of an engine reads a copy of its own
        weights = replace(weights, transport="shared_memory")
    return await WeightStore.start(
        weights,
        hosts.cluster,
        prepared.monitor.faults,
        deadline_s=_START_DEADLINE_S,
        hosts=hosts.placed.with_weights,
        # Counts stored weights as 2 bytes each.
        expected_bytes=stored_bytes(checked.models.policy) * resolve_dtype(config.generator.dtype).itemsize // 2,
    )


async def _start(name: str, detail: str, starting: Awaitable[S], started: list[_Stoppable], display: Display) -> S:
    """Show the start of a service, and note it in `started`."""
    display.startup(name, "starting", detail)
    try:
        service = await starting
    except BaseException:  # also if another service's failure cancels this start
        display.startup(name, "failed", detail)
        raise
    # Only what has started is stopped at the end; a start that fails cleans up after itself.
    started.append(service)
    display.startup(name, "ready", detail)
    return service


def _engines(config: RunConfig) -> str:
    replicas, devices, remote = config.generator.replicas, config.generator.devices, len(config.generator.urls)
    local_engines = f"{replicas} replica" + "s" * (replicas > 1) + f" of {devices} devices" * (devices > 1)
    hosts = config.generator.hosts_per_replica
    local_engines += f" on {hosts} hosts" * (hosts > 1)
    guests = config.generator.guests
    parts = [local_engines] * (replicas > 0) + [f"{guests} on the trainer's devices"] * (guests > 0)
    return "vLLM, " + " and ".join(parts + [f"{remote} elsewhere"] * (remote > 0))


def _service_start(
    hosts: RunHosts, prepared: PreparedRun, service_hosts: ServiceHosts, *, name: str = ""
) -> ServiceStart:
    return ServiceStart(
        cluster=hosts.cluster,
        faults=prepared.monitor.faults,
        deadline_s=_START_DEADLINE_S,
        hosts=service_hosts,
        name=name,
    )


async def _start_generator(
    checked: CheckedRun[C], hosts: RunHosts, prepared: PreparedRun, handover: asyncio.Future[DeviceHandover]
) -> Generator:
    @contextlib.asynccontextmanager
    async def start_engine(index: int) -> AsyncIterator[None]:
        devices = await asyncio.shield(handover)  # not while the trainer starts
        async with devices.start_engine(guest=index in checked.config.generator.guest_indices):
            yield

    return await Generator.start(
        checked.config.generator,
        _service_start(hosts, prepared, hosts.placed.of("generator", gpus_taken(checked, hosts, engines=False))),
        model=checked.models.policy,
        seed=checked.config.seed,
        sharing=DeviceSharing(
            trainer_hosts=hosts.placed.of("trainer"),
            lend=lambda: handover.result().lend(),
            replace=start_engine,
        ),
        make_tokenizer=functools.partial(
            Tokenizer,
            parse_control_tokens=checked.config.parse_control_tokens,
            template_args=read_template_args(checked.config.template_args),
        ),
    )


async def _start_trainer(
    checked: CheckedRun[C], hosts: RunHosts, prepared: PreparedRun, *, after: asyncio.Task[Generator] | None
) -> Trainer:
    return await Trainer.start(
        checked.config.trainer,
        _service_start(hosts, prepared, hosts.placed.of("trainer")),
        model=TrainedModel(
            folder=checked.models.policy, reference=checked.models.reference, values=checked.models.values
        ),
        run=TrainingRun(
            seed=checked.config.seed, total_steps=checked.config.policy_steps, skipped=prepared.folder / "skipped"
        ),
        resume=prepared.checkpoint.training.resolve() if prepared.checkpoint else None,
        after=_devices_free(checked, after),
    )


def _devices_free(checked: CheckedRun[C], engines: asyncio.Task[Generator] | None) -> asyncio.Task[Generator] | None:
    """Return what trainers await before they allocate memory, which a starting vLLM would count as its own."""
    return engines if (checked.shares_devices or checked.config.generator.guests) and gpus() else None


async def _start_critic(
    checked: CheckedRun[C], hosts: RunHosts, prepared: PreparedRun, *, after: asyncio.Task[Generator] | None
) -> Trainer:
    assert checked.models.critic is not None
    return await Trainer.start(
        checked.models.critic,
        _service_start(hosts, prepared, hosts.placed.of("trainer"), name="critic"),
        model=TrainedModel(folder=checked.models.critic_folder, values=True),
        run=TrainingRun(
            seed=checked.config.seed, total_steps=checked.config.steps, skipped=prepared.folder / "skipped-critic"
        ),
        resume=prepared.checkpoint.critic.resolve() if prepared.checkpoint else None,
        after=_devices_free(checked, after),
    )


async def _start_teachers(
    checked: CheckedRun[C], hosts: RunHosts, prepared: PreparedRun, *, policy: asyncio.Task[Generator]
) -> Teachers:
    assert checked.models.teachers is not None
    config = checked.config
    return await Teachers.start(
        checked.models.teachers,
        checked.models.teacher_folders,
        _service_start(hosts, prepared, hosts.placed.of("teachers", gpus_taken(checked, hosts, engines=True))),
        policy=policy,
        settings=config.generator,
        seed=config.seed,
        warn=prepared.monitor.log.warn,
    )


def gpus_taken(checked: CheckedRun[C], hosts: RunHosts, *, engines: bool) -> dict[str, int]:
    """Return the number of GPUs per host that are taken: by the trainer, unless engines share them, and with `engines`
    also by the policy's engines."""
    config, placed = checked.config, hosts.placed
    # A critic adds none: it takes turns with the trainer on the same GPUs.
    ranks = placed.ranks_on(config.trainer.ranks)
    if not engines:
        return {} if checked.shares_devices else ranks
    engine_devices = placed.engines_on(config.generator) if config.starts_engines else {}
    counts = {host: (ranks.get(host, 0), engine_devices.get(host, 0)) for host in ranks | engine_devices}
    return {host: max(shares) if checked.shares_devices else sum(shares) for host, shares in counts.items()}
