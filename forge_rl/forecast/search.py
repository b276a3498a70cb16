"""Plans a run on machines that may not be here: searches a layout that fits, and predicts the time of a step."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.engines.architecture import Architecture, read_architecture
from forge_rl.engines.context import check_context
from forge_rl.engines.decode_layout import check_decode_layout
from forge_rl.engines.degrees import check_model
from forge_rl.engines.device_types import DEVICE_TYPES, DeviceType
from forge_rl.engines.devices import assumed_gpus, device_type
from forge_rl.engines.factory import plan_training
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import ConfigError, ModelError
from forge_rl.forecast.roofline import (
    GPU_EFFICIENCY,
    Efficiency,
    Spread,
    Times,
    Workload,
    rollout_times,
    train_times,
)
from forge_rl.forecast.transfer import GPU_COSTS, Version, VersionCosts, VersionTimes, version_times
from forge_rl.packing.trees import round_up
from forge_rl.run.plan.defaults import choose, colocated
from forge_rl.run.plan.memory import Need, plan_run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.run_models import RunModels
from forge_rl.services.trainer_config import LEAST_ROW, PAD_MULTIPLE

if TYPE_CHECKING:
    from forge_rl.engines.titan.plan import Traces

KEYS = "keys and values"
"""Part of an engine's memory, as `plan_run` names it."""
_ROW = 4096
"""Tokens of a row that keep a GPU busy; longer ones only take memory."""
_ENGINE_BYTES = 2 << 30
"""Part of a GPU's memory that an engine takes for activations and CUDA graphs, out of its room for keys and values."""
_EASIER = 0.02
"""A degree above 1 has to save this share of a step."""
_MOST_HOSTS = 64
"""Hosts that are tried when nothing fits."""
_CONFIG_BYTES = 1 << 20
_BOUNDS = {"layers": 1024, "heads": 4096, "dim": 1 << 18, "hidden_dim": 1 << 20, "vocab": 1 << 24}
"""Largest dimensions of a model that is planned; building a larger one takes minutes even without memory."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal hosts with equal devices."""

    device: DeviceType
    per_host: int
    hosts: int = 1
    use: Efficiency = GPU_EFFICIENCY
    costs: VersionCosts = GPU_COSTS
    """Costs of publishing and loading a version."""

    @property
    def count(self) -> int:
        return self.per_host * self.hosts

    @property
    def host_bytes(self) -> int:
        """Memory of each host."""
        return self.device.host_memory * self.per_host

    def __str__(self) -> str:
        host = f"{self.per_host}x{self.device.name}"
        return host if self.hosts == 1 else f"{self.hosts} hosts of {host}"


@dataclass(frozen=True, kw_only=True)
class PlannedPolicy:
    """The model to plan for, and the extra state of its loss."""

    models: RunModels
    """The model, in a folder with a config.json, and its use."""
    architecture: Architecture
    traces: Traces
    """Traces of its training step so far; see `plan_training`."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A layout, its memory, and the predicted times of a step."""

    config: RunConfig
    """Settings with all degrees chosen."""
    needs: Sequence[Need]
    shares_devices: bool
    """Whether trainer and engines take turns on the same devices."""
    rollout: Times
    train: Times
    publish: VersionTimes
    """A publish, and the load into all engines."""
    handover_s: float
    """Seconds in which shared devices change hands, twice in a step."""
    cache_bytes: int
    """Bytes of keys and values on each device of an engine."""
    reasons: Sequence[str] = ()
    """A line for each tensor parallel degree above 1 that the search chose."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        if self.config.schedule.decodes_while_training and not self.shares_devices:
            return max(self.rollout.seconds, self.train.seconds) + self.publish.seconds
        return self.rollout.seconds + self.train.seconds + self.publish.seconds + self.handover_s


def read_policy(folder: Path, *, reference: bool, values: bool) -> PlannedPolicy:
    """Read the model to plan for from its folder's config.json, which is not trusted.

    Raises:
        ModelError: the file is missing, larger than 1 MiB, of no supported model, or its dimensions are out of bounds.
    """
    path = folder / "config.json"
    try:
        size = path.stat().st_size if path.is_file() else -1
    except OSError:
        size = -1
    if not 0 <= size <= _CONFIG_BYTES:
        problem = "is not a file" if size < 0 else f"has {size} bytes, more than a config.json has"
        raise ModelError(f"{path} {problem}", hint="set --model-config to a model's config.json, or to its folder")
    architecture = read_architecture(folder)
    experts = architecture.experts.count if architecture.experts else 0
    sizes = {name: getattr(architecture, name) for name in _BOUNDS} | {"experts": experts}
    for name, maximum in (_BOUNDS | {"experts": 4096}).items():
        if sizes[name] > maximum:
            raise ModelError(
                f"{path} describes a model with {name} {sizes[name]}",
                hint=f"plans are for models with at most {maximum}",
            )
    models = RunModels(policy=folder, reference=reference, values=values)
    return PlannedPolicy(models=models, architecture=architecture, traces={})


def workload(config: RunConfig, policy: PlannedPolicy) -> Workload:
    """Return what a step computes: lengths are the flags' maxima where they give no means."""
    answer = config.target.answer_tokens or config.generator.max_tokens
    max_answer = max(answer, config.generator.max_tokens)
    return Workload(
        groups=config.groups_per_batch,
        group_size=config.group_size,
        prompt=config.target.prompt_tokens or max(1, config.generator.max_model_len - max_answer),
        answer=answer,
        longest=max_answer,
        ahead=config.schedule.max_lag if config.schedule.kind in ("pipelined", "asynchronous") else 0,
        minibatches=config.trainer.minibatches,
        epochs=config.trainer.epochs,
        passes=int(policy.models.reference),
    )


def search(config: RunConfig, policy: PlannedPolicy, machines: Machines) -> Forecast:
    """Find the layout with the shortest step among those that fit.

    Degrees above 1 that the config gives are kept. More context parallelism is only tried if nothing fits with less.

    Raises:
        ConfigError: nothing fits; names the part that does not, in the layout tried last.
    """
    if not config.starts_engines:
        raise ConfigError("--on predicts steps with rollouts, and this recipe has none", hint="leave out --on")
    _check_own_engines(config)
    refused: ConfigError | None = None
    with assumed_gpus(machines.count, machines.device.memory):
        _check_engine(config, policy, machines)
        # Ascending, and the first degree with any layout wins: context parallelism only adds communication if rows fit
        # without.
        degrees = _choices(config.trainer.context_parallel_degree, machines.per_host)
        for cp in degrees:
            forecasts: list[Forecast] = []
            for candidate in _candidates(config, machines, cp):
                try:
                    forecasts.append(_forecast(candidate, policy, machines))
                except ConfigError as error:
                    refused = error
            if forecasts:
                best = min(forecasts, key=_cost)
                return replace(best, reasons=[*_reasons(config, best, forecasts)])
    raise refused or ConfigError(f"{machines} have no layout", hint="leave out the parallel degrees")


def _reasons(config: RunConfig, best: Forecast, forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Say what each tensor parallel degree above 1 that the config does not set gains over none, by the best layout
    without it."""

    def sizes(settings: RunConfig) -> dict[str, int]:
        return {
            "--generator.tensor-parallel-size": settings.generator.tensor_parallel_size,
            "--trainer.tensor-parallel-degree": settings.trainer.tensor_parallel_degree,
        }

    for flag, size in sizes(best.config).items():
        if size == 1 or sizes(config)[flag] > 1:
            continue
        plain = min((forecast for forecast in forecasts if sizes(forecast.config)[flag] == 1), key=_cost, default=None)
        if plain is None:
            yield f"{flag} {size}: nothing fits with 1"
        else:
            differences = [words for words in _layout(plain) if words not in _layout(best)]
            yield f"{flag} {size}: " + ", ".join([f"a step takes {plain.step_s:,.1f} s with 1", *differences])


def _layout(forecast: Forecast) -> list[str]:
    """List what distinguishes a layout from others in a line of words."""
    trainer, rollout = forecast.config.trainer, forecast.rollout
    return [
        f"rollout {rollout.seconds:,.1f} s, {rollout.sequences:,.0f} answers on each engine",
        f"training {forecast.train.seconds:,.1f} s, recomputation {trainer.activation_checkpointing}",
    ]


def nearest(config: RunConfig, policy: PlannedPolicy, machines: Machines) -> list[tuple[str, Forecast]]:
    """Find what fits where `machines` do not: the fewest more hosts, the smallest larger device, and the longest
    shorter context."""
    alternatives = []
    max_hosts = _MOST_HOSTS
    with assumed_gpus(machines.count, machines.device.memory):
        shorter_contexts = list(_shorter(config))
        try:
            _check_engine(config, policy, machines)
        except ConfigError:
            max_hosts = 0  # more such hosts cannot help
    host_counts = itertools.takewhile(lambda count: count <= max_hosts, (machines.hosts * 2**n for n in range(1, 8)))
    larger_devices = sorted(
        (device for device in DEVICE_TYPES.values() if device.memory > machines.device.memory),
        key=lambda device: device.memory,
    )
    tries: list[list[tuple[str, RunConfig, Machines]]] = [
        [(str(m), config, m) for m in (replace(machines, hosts=hosts) for hosts in host_counts)],
        [(str(m), config, m) for m in (replace(machines, device=device) for device in larger_devices)],
        [
            (f"--generator.max-model-len {tokens} --generator.max-tokens {half.generator.max_tokens}", half, machines)
            for tokens, half in shorter_contexts
        ],
    ]
    # Each group is sorted by how much it asks for, and stops at the first that fits.
    for group in tries:
        for name, settings, candidate in group:
            try:
                alternatives.append((name, search(settings, policy, candidate)))
                break
            except ConfigError:
                continue
    return alternatives


def _check_own_engines(config: RunConfig) -> None:
    if config.generator.urls:
        raise ConfigError("--on cannot predict engines of --generator.urls", hint="leave out one of them")
    if config.generator.hosts_per_replica > 1:
        raise ConfigError(
            "--on cannot predict engines of several hosts", hint="leave out --on or --generator.hosts-per-replica"
        )


def measured_forecast(config: RunConfig, policy: PlannedPolicy, machines: Machines) -> Forecast:
    """Predict a step of a run as configured, on this machine; on a CPU, its ranks and engines share the cores.

    Raises:
        ConfigError: the run cannot be planned, or does not fit on the GPUs.
    """
    _check_own_engines(config)
    if device_type() == "cuda":
        return _forecast(config, policy, machines)
    trainer, generator, a = config.trainer, config.generator, policy.architecture
    needs = plan_run(config, policy.models, traces=policy.traces)
    work, use = workload(config, policy), machines.use
    cache = round(generator.kv_cache_gib * 2**30)
    # On a CPU, engines share the cores, so they count as one with the slots and the cache of all.
    all_engines = replace(generator, max_num_seqs=generator.max_num_seqs * generator.replicas)
    common = {"device": machines.device, "use": use}
    return Forecast(
        config=config,
        needs=needs,
        shares_devices=False,
        rollout=rollout_times(a, all_engines, work, engines=1, cache_bytes=cache * generator.replicas, **common),  # type: ignore[arg-type]
        train=train_times(
            a,
            trainer,
            work,
            spread=Spread(ranks=trainer.ranks, per_host=trainer.ranks, sharers=trainer.ranks),
            **common,  # type: ignore[arg-type]
        ),
        publish=_publish(config, policy, machines),
        handover_s=0.0,
        cache_bytes=cache,
    )


def _check_engine(config: RunConfig, policy: PlannedPolicy, machines: Machines) -> None:
    """Refuse a model that no engine can hold, which no layout of the trainer changes; each engine is on one host.

    Raises:
        ConfigError: says how much each device of the widest engine needs.
    """
    widest = 0
    for size in _choices(config.generator.tensor_parallel_size, machines.per_host):
        with contextlib.suppress(ConfigError):
            check_decode_layout(policy.models.policy, replace(config.generator, tensor_parallel_size=size))
            widest = size
    weights = 2 * policy.architecture.weights // max(1, widest)
    room = round(config.generator.gpu_share * machines.device.memory) - _ENGINE_BYTES
    if weights >= room:
        raise ConfigError(
            f"the weights of an engine take {weights / 2**30:.0f} GiB on each of {widest} {machines.device.name}, and "
            f"{room / 2**30:.0f} are left for them and for keys and values; a planned engine does not span hosts",
            hint="choose hosts with more devices, or devices with more memory; --generator.hosts-per-replica splits an "
            "engine over hosts, without --on",
        )


def _candidates(config: RunConfig, machines: Machines, cp: int) -> Iterator[RunConfig]:
    """Yield settings for each layout of these machines, without those that settings themselves refuse."""
    trainer, generator, n = config.trainer, config.generator, machines.count
    # A row must hold the longest sequence, of which each of cp ranks has a part.
    needed = max(LEAST_ROW, round_up(-(-generator.max_model_len // cp), PAD_MULTIPLE))
    # A long row keeps a GPU busy, the shortest possible one saves memory; both are tried.
    rows = [trainer.seq_len] if trainer.seq_len else list(dict.fromkeys((max(needed, _ROW), needed)))
    # Engines that decode while the trainer trains cannot lend it their devices.
    separate = config.placement == "separate" or config.schedule.decodes_while_training
    splits = [(n, n)] if not separate else [(n - part, part) for part in _parts(machines)]
    replicas = _choices(trainer.data_parallel_replicate_degree, machines.hosts)[:: max(1, machines.hosts.bit_length())]
    for (ranks, devices), row, tp, ep, copies, size in itertools.product(
        splits,
        rows,
        _choices(trainer.tensor_parallel_degree, machines.per_host),
        _choices(trainer.expert_parallel_degree, machines.count),
        dict.fromkeys((*replicas, machines.hosts) if trainer.data_parallel_replicate_degree == 1 else replicas),
        _choices(generator.tensor_parallel_size, machines.per_host),
    ):
        try:
            candidate = replace(
                config,
                placement="separate" if separate else "colocated",
                trainer=replace(
                    trainer,
                    ranks=ranks,
                    seq_len=row,
                    tensor_parallel_degree=tp,
                    context_parallel_degree=cp,
                    expert_parallel_degree=ep,
                    data_parallel_replicate_degree=copies,
                ),
                generator=replace(
                    generator,
                    tensor_parallel_size=size,
                    replicas=max(1, devices // (size * generator.data_parallel_size)),
                ),
            )
            candidate.check_devices()
        except ConfigError:
            continue
        yield candidate


def _parts(machines: Machines) -> list[int]:
    """Return numbers of devices that engines may have of their own: whole hosts, if there are several."""
    unit = machines.per_host if machines.hosts > 1 else 1
    units = machines.count // unit
    return [unit * count for count in sorted({max(1, units // 4), max(1, units // 2), units - max(1, units // 4)})]


def _choices(degree: int, max_degree: int) -> list[int]:
    """Return the degrees to try: the configured one, if it is above 1, or powers of two."""
    return [degree] if degree > 1 else [2**n for n in range(max_degree.bit_length()) if 2**n <= max_degree]


def _forecast(config: RunConfig, policy: PlannedPolicy, machines: Machines) -> Forecast:
    """Plan one layout.

    Raises:
        ConfigError: the model cannot be split this way, or a part does not fit; says which.
    """
    a, device, use = policy.architecture, machines.device, machines.use
    if a.experts is None and config.trainer.expert_parallel_degree > 1:
        raise ConfigError("the model has no experts", hint="leave out --trainer.expert-parallel-degree")
    check_model(config.trainer, config.trainer.ranks, a)
    check_decode_layout(policy.models.policy, config.generator, engines=config.generator.replicas)

    def memory(settings: TrainSettings) -> TrainMemory:
        return plan_training(
            policy.models.policy,
            settings,
            ranks=config.trainer.ranks,
            reference=policy.models.reference,
            values=policy.models.values,
            traces=policy.traces,
        )

    # The same choice of recomputation and offloading that a run makes at its start, but for these devices.
    config, _ = choose(config, a, gpu=device.memory, num_gpus=machines.count, memory=memory)
    check_context(a, config.generator)
    needs = plan_run(config, policy.models, traces=policy.traces)
    check_fits(needs, machines)
    trainer, generator, shared = config.trainer, config.generator, colocated(config)
    work = workload(config, policy)
    cache = next(need.parts[KEYS] for need in needs if KEYS in need.parts) - _ENGINE_BYTES
    # Shared devices change hands twice: the trainer's state goes to host memory and comes back.
    moved = 0.0
    if shared and not (trainer.stays_on_device or trainer.enable_cpu_offload):
        moved = 2 * sum(size for need in needs for part, size in need.parts.items() if "while engines decode" in part)
    return Forecast(
        config=config,
        needs=needs,
        shares_devices=shared,
        rollout=rollout_times(a, generator, work, device, engines=generator.replicas, cache_bytes=cache, use=use),
        train=train_times(
            a, trainer, work, device, spread=Spread(ranks=trainer.ranks, per_host=machines.per_host), use=use
        ),
        publish=_publish(config, policy, machines),
        handover_s=moved / (device.host_link * use.links),
        cache_bytes=cache,
    )


def _publish(config: RunConfig, policy: PlannedPolicy, machines: Machines) -> VersionTimes:
    """Predict the seconds of publishing and loading a version, all of whose weights are trained.

    Each rank and each engine on GPUs has its own link; on a CPU all of them share one memory.
    """
    trainer, generator, trace = config.trainer, config.generator, next(iter(policy.traces.values()))
    shards = trainer.ranks // trainer.data_parallel_replicate_degree
    shared, dtypes = machines.costs.shared, [resolve_dtype(trainer.dtype), resolve_dtype(generator.dtype)]
    version = Version(
        size=float(policy.architecture.weights * min(dtype.itemsize for dtype in dtypes)),
        tensors=trace.tensors,
        stacked=trace.stacked,
        stacks=trace.stacks,
        shapes=trace.shapes,
        shards=shards,
        rank_share=1.0 if shared else 1 / shards,
        engine_share=float(generator.replicas) if shared else 1 / generator.tensor_parallel_size,
        hosts=machines.hosts,
        per_host=machines.per_host,
    )
    return version_times(machines.costs, version, machines.device, machines.use)


def check_fits(needs: Sequence[Need], machines: Machines) -> None:
    """Refuse a plan that needs more than a device or a host has.

    Processes are spread evenly over the hosts, except for the store of weights, which each host has.

    Raises:
        ConfigError: names the process, its largest part and the flags that reduce it.
    """
    for need in needs:
        if need.of_gpu and need.total > machines.device.memory:
            part = max(need.parts, key=lambda name: need.parts[name])
            raise ConfigError(
                f"each {need.who} needs {need.total / 2**30:.1f} GiB ({need.parts[part] / 2**30:.1f} for {part}), and "
                f"a {machines.device.name} has {machines.device.memory / 2**30:.1f}",
                hint=need.hint,
            )
    host_needs = [need for need in needs if not need.of_gpu]
    # Ceiling: the fullest host decides.
    bytes_per_host = {need.who: need.total * math.ceil(need.count / machines.hosts) for need in host_needs}
    if sum(bytes_per_host.values()) > machines.host_bytes:
        largest = max(host_needs, key=lambda need: bytes_per_host[need.who])
        raise ConfigError(
            f"a host needs {sum(bytes_per_host.values()) / 2**30:.0f} GiB ({bytes_per_host[largest.who] / 2**30:.0f} "
            f"for {largest.who}), and has {machines.host_bytes / 2**30:.0f}",
            hint=largest.hint,
        )


def _cost(forecast: Forecast) -> tuple[float, int]:
    """Return the time of a step, with a penalty for each degree above 1, and the length of a row."""
    trainer, generator = forecast.config.trainer, forecast.config.generator
    degrees: Mapping[str, int] = trainer.degrees
    # Of two layouts that are nearly as fast, the one with fewer degrees, and without recomputation or offloading, wins.
    num_penalties = sum(value > 1 for value in (*degrees.values(), generator.tensor_parallel_size))
    num_penalties += (trainer.activation_checkpointing != "none") + 2 * trainer.enable_cpu_offload
    return forecast.step_s * (1 + _EASIER * num_penalties), trainer.seq_len


def _shorter(config: RunConfig) -> Iterator[tuple[int, RunConfig]]:
    """Yield the settings with half the context, and half of that."""
    generator, target = config.generator, config.target
    while generator.max_model_len >= 512:
        generator = replace(
            generator, max_model_len=generator.max_model_len // 2, max_tokens=max(1, generator.max_tokens // 2)
        )
        target = replace(target, prompt_tokens=target.prompt_tokens // 2, answer_tokens=target.answer_tokens // 2)
        trainer = replace(config.trainer, seq_len=0)
        yield generator.max_model_len, replace(config, generator=generator, target=target, trainer=trainer)
