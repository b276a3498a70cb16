"""Prints the plan of a run on other machines, or on this one: layout, memory by part, times, and what limits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from forge_rl.engines.context import sequence_bytes
from forge_rl.engines.device_types import parse_machine
from forge_rl.engines.devices import gpus
from forge_rl.engines.platform import resolve_dtype
from forge_rl.errors import ConfigError
from forge_rl.forecast.probe import this_device
from forge_rl.forecast.roofline import CPU_EFFICIENCY, Times
from forge_rl.forecast.search import (
    Forecast,
    Machines,
    PlannedPolicy,
    measured_forecast,
    nearest,
    read_policy,
    search,
    workload,
)
from forge_rl.forecast.transfer import CPU_COSTS, VersionTimes
from forge_rl.models.resolve import resolve_model
from forge_rl.run.plan.memory import tried_loss
from forge_rl.run.run_config import RunConfig
from forge_rl.run.target import LOCAL
from forge_rl.system.memory import host_bytes


def show_forecast(config: RunConfig) -> None:
    """Print the layout that is proposed for `config.target`, its memory and the predicted time of a step.

    Raises:
        ConfigError: nothing fits on these machines, after printing the nearest machines and settings that do.
        ModelError: the config.json cannot be used.
        LossError: the loss does not work.
    """
    console = Console(highlight=False)
    # The loss is tried on a small batch, which also shows whether it needs a reference or values.
    _, reference, values = tried_loss(config)
    policy = read_policy(_folder(config), reference=reference, values=values)
    if config.target.on == LOCAL:
        machines = this_machine(policy, resolve_dtype(config.trainer.dtype))
        forecast = measured_forecast(config, policy, machines)
    else:
        count, device = parse_machine(config.target.on)
        machines = Machines(device=device, per_host=count, hosts=config.target.hosts)
        try:
            forecast = search(config, policy, machines)
        except ConfigError as error:
            _show_nearest(console, config, policy, machines, error)
            raise
    _show_layout(console, forecast, machines)
    _show_memory(console, forecast, machines)
    _show_times(console, forecast, policy, machines)
    _show_assumptions(console, machines)
    if getattr(config, "critic", None) is not None or getattr(config, "teachers", None) is not None:
        console.print("not counted: the critic, or the teachers", style="yellow")


def _folder(config: RunConfig) -> Path:
    """Return the folder with the model's config.json."""
    path = config.target.model_config
    if path is None:
        return resolve_model(config.model, config.cache).resolve()
    path = path.expanduser()
    if path.is_dir():
        return path
    if path.name != "config.json":
        raise ConfigError(f"--model-config is {str(path)!r:.120}", hint="give a file named config.json, or its folder")
    return path.parent


def this_machine(policy: PlannedPolicy, dtype: torch.dtype) -> Machines:
    """Return this machine: its GPUs, whose rates are known, or its CPU, measured in a trainer's dtype."""
    a = policy.architecture
    device = this_device(a.dim, a.hidden_dim, dtype)
    if num_gpus := gpus():
        return Machines(device=device, per_host=num_gpus)
    return Machines(device=device, per_host=1, use=CPU_EFFICIENCY, costs=CPU_COSTS)


def _show_nearest(
    console: Console, config: RunConfig, policy: PlannedPolicy, machines: Machines, error: ConfigError
) -> None:
    console.print(f"{machines} cannot hold this run: {error.message}", markup=False, soft_wrap=True)
    with console.status("looking for the nearest that fits"):
        alternatives = nearest(config, policy, machines)
    for name, forecast in alternatives:
        console.print(f"would fit: {name}, {forecast.step_s:,.1f} s a step", markup=False, soft_wrap=True)
    if not alternatives:
        console.print("neither more such hosts, nor a larger device, nor a shorter context fits")


def _show_layout(console: Console, forecast: Forecast, machines: Machines) -> None:
    table = _table(f"layout on {machines}", "process", "where", "how many")
    for row in placed(forecast, machines):
        table.add_row(*row)
    console.print(table)
    console.print(f"flags: {' '.join(flags(forecast))}", markup=False, soft_wrap=True)
    for line in forecast.reasons:
        console.print(line, markup=False, soft_wrap=True)


def placed(forecast: Forecast, machines: Machines) -> Iterator[tuple[str, str, str]]:
    """Yield each kind of process, its hosts and devices, and its number; neighbouring ranks share a host."""
    config, per_host = forecast.config, machines.per_host
    trainer, generator = config.trainer, config.generator
    hosts = f"hosts 0 to {machines.hosts - 1}" if machines.hosts > 1 else "host 0"
    yield "controller, environments, rewards", "host 0, its CPUs", "1"
    yield "trainer ranks", _devices(0, trainer.ranks, per_host), f"{trainer.ranks}"
    split = trainer.shares // trainer.data_parallel_replicate_degree
    degrees = {
        "pipeline stages": trainer.pipeline_parallel_degree,
        "replicated": trainer.data_parallel_replicate_degree,
        "FSDP shards": split,
        "context parallel": trainer.context_parallel_degree,
        "tensor parallel": trainer.tensor_parallel_degree,
        "expert parallel": trainer.expert_parallel_degree,
    }
    yield "  their degrees", "tensor parallel ranks are neighbours", _degrees(degrees)
    # Engines of their own come after the trainer's ranks; on a CPU, everything is on the same device.
    first_device = 0 if forecast.shares_devices or machines.device.memory == host_bytes() else trainer.ranks
    num_devices = generator.replicas * generator.devices
    degrees = {"tensor parallel": generator.tensor_parallel_size, "copies": generator.data_parallel_size}
    yield "engines", _devices(first_device, num_devices, per_host), f"{generator.replicas}, each {_degrees(degrees)}"
    if forecast.shares_devices:
        yield "  taking turns", "engines and trainer share devices", ""
    yield "store of weights", f"{hosts}, in host memory", f"{machines.hosts}"


def _degrees(degrees: dict[str, int]) -> str:
    return ", ".join(f"{value} {name}" for name, value in degrees.items() if value > 1) or "1 device"


def _devices(first: int, count: int, per_host: int) -> str:
    last = first + count - 1
    if first // per_host == last // per_host:
        inside = f"device {first % per_host}" if count == 1 else f"devices {first % per_host} to {last % per_host}"
        return f"host {first // per_host}, {inside}"
    begins = f"host {first // per_host}, device {first % per_host}"
    return f"{begins} to host {last // per_host}, device {last % per_host}"


def flags(forecast: Forecast) -> list[str]:
    """Return the flags that a run with this layout takes."""
    trainer, generator, config = forecast.config.trainer, forecast.config.generator, forecast.config
    named: dict[str, object] = {"--placement": config.placement, "--trainer.ranks": trainer.ranks}
    named |= {f"--trainer.{name.replace('_', '-')}": value for name, value in trainer.degrees.items() if value > 1}
    named["--trainer.seq-len"] = trainer.seq_len
    if trainer.activation_checkpointing != "none":
        named["--trainer.activation-checkpointing"] = trainer.activation_checkpointing
    if trainer.expert_balance != "plain":
        named["--trainer.expert-balance"] = trainer.expert_balance
    if trainer.optimizer_state != "float32":
        named["--trainer.optimizer-state"] = trainer.optimizer_state
    named["--generator.replicas"] = generator.replicas
    if generator.tensor_parallel_size > 1:
        named["--generator.tensor-parallel-size"] = generator.tensor_parallel_size
    switches = {
        "--trainer.enable-activation-offload": trainer.enable_activation_offload,
        "--trainer.enable-cpu-offload": trainer.enable_cpu_offload,
        "--trainer.stays-on-device": trainer.stays_on_device,
    }
    return [f"{name} {value}" for name, value in named.items()] + [name for name, is_on in switches.items() if is_on]


def _show_memory(console: Console, forecast: Forecast, machines: Machines) -> None:
    table = _table("memory", "part", "GiB each")
    for need in forecast.needs:
        table.add_section()
        table.add_row(f"{need.who}, {need.count} of them" if need.count > 1 else need.who, "", style="bold")
        for part, size in need.parts.items():
            table.add_row(f"  {part}", f"{size / 2**30:.2f}")
        table.add_row("  in all", f"{need.total / 2**30:.2f}")
    table.add_section()
    table.add_row("a device has", f"{machines.device.memory / 2**30:.2f}")
    table.add_row("a host has", f"{machines.host_bytes / 2**30:.2f}")
    console.print(table)


def _show_times(console: Console, forecast: Forecast, policy: PlannedPolicy, machines: Machines) -> None:
    config, work = forecast.config, workload(forecast.config, policy)
    generator = config.generator
    bytes_per_token = sequence_bytes(policy.architecture, generator) / generator.max_model_len
    max_sequences = forecast.cache_bytes / sequence_bytes(policy.architecture, generator)
    console.print(
        f"keys and values: {bytes_per_token / 1024:,.1f} KiB a token on each device of an engine, of which "
        f"{forecast.cache_bytes / 2**30:,.1f} GiB hold {max_sequences:,.1f} sequences of {generator.max_model_len:,} "
        f"tokens; it decodes {forecast.rollout.sequences:,.0f} at a time",
        soft_wrap=True,
    )
    table = _table(
        f"a step of {work.episodes:,} episodes: prompts of {work.prompt:,.0f} tokens, answers of {work.answer:,.0f}",
        *("phase", "seconds", "tokens/s", "limited by"),
    )
    phases: Sequence[tuple[str, Times, float]] = (
        ("rollout", forecast.rollout, work.answers),
        ("train", forecast.train, work.tokens * work.epochs),
        ("publish", forecast.publish, 0.0),
    )
    for name, times, tokens in phases:
        rate = f"{tokens / times.seconds:,.0f}" if tokens else ""
        table.add_row(name, f"{times.seconds:,.2f}", rate, f"{times.binds}, {times.parts[times.binds]:,.2f} s")
    if forecast.handover_s:
        table.add_row("handover", f"{forecast.handover_s:,.2f}", "", "links to host memory")
    table.add_row(
        "step", f"{forecast.step_s:,.2f}", f"{work.answers / forecast.step_s:,.0f}", _limit(forecast), style="bold"
    )
    console.print(table)
    for line in version_lines(forecast.publish):
        console.print(line, soft_wrap=True)


def version_lines(times: VersionTimes) -> Iterator[str]:
    """Yield the parts of a publish and of a load, and how much of both are calls, tensors and bytes."""
    for phase in ("publish", "load"):
        parts = times.phase_parts(phase)
        listing = ", ".join(f"{name} {seconds:,.3f}" for name, seconds in parts.items() if seconds >= 0.0005)
        yield f"{phase} {sum(parts.values()):,.3f} s: {listing}"
    listing = ", ".join(f"{cause} {seconds:,.3f}" for cause, seconds in times.causes.items())
    yield f"publish and load {times.seconds:,.3f} s by cause: {listing}"


def _limit(forecast: Forecast) -> str:
    """Name the phase that takes the longest and its cause."""
    phases = {"rollout": forecast.rollout, "train": forecast.train, "publish": forecast.publish}
    longest = max(phases, key=lambda name: phases[name].seconds)
    return f"{longest}: {phases[longest].binds}"


def _show_assumptions(console: Console, machines: Machines) -> None:
    device, use = machines.device, machines.use
    console.print(
        f"{device.name}: {device.flops / 1e12:,.4g} TFLOP/s, memory {device.bandwidth / 1e9:,.4g} GB/s, links in a "
        f"host {device.link / 1e9:,.4g}, to other hosts {device.network / 1e9:,.4g}, to host memory "
        f"{device.host_link / 1e9:,.4g} ({device.source})",
        soft_wrap=True,
    )
    listing = ", ".join(f"{name} {value:g}" for name, value in vars(use).items())
    console.print(f"assumed: {listing}", soft_wrap=True)
    console.print(f"publish and load: {machines.costs.source}", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        numeric = column in ("GiB each", "seconds", "tokens/s")
        table.add_column(column, justify="right" if numeric and place else "left", overflow="fold")
    return table
