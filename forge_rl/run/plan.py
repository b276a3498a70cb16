"""Plan of a run's memory: what each process needs, part by part, before anything starts; refuses what cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forge_rl.data.models import resolve_model
from forge_rl.engines.architecture import Architecture, read_architecture
from forge_rl.engines.context import check_context
from forge_rl.engines.factory import plan_training
from forge_rl.engines.platform import device_type, memory_bytes, resolve_dtype
from forge_rl.errors import ConfigError
from forge_rl.rollout.placement import shares_devices
from forge_rl.run.config import RunConfig

_TRAINER_FLAGS = "raise --trainer.ranks, set --trainer.activation-checkpointing full, or lower --trainer.row-tokens"
_ENGINE_FLAGS = "lower --generator.replicas, --generator.kv-cache-gib or --generator.memory-share"
_PROCESS_BYTES = 450 << 20
"""Python, torch and torchtitan in a trainer's process; an engine's has more."""
_ENGINE_PROCESS_BYTES = 900 << 20


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory that one kind of process needs on one device."""

    who: str
    count: int
    """Number of such processes."""
    parts: dict[str, int]
    """Bytes of each part of one of them."""
    hint: str
    """Flags that make it less."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def show_plan(config: object) -> None:
    """Print what `plan_run` finds for a recipe's settings.

    Raises:
        ConfigError: it cannot fit.
    """
    assert isinstance(config, RunConfig), f"{type(config).__name__} has a flag --plan"
    model = resolve_model(config.model, config.cache).resolve()
    loss = getattr(config, "loss", None)
    needs = plan_run(config, model, reference=bool(getattr(loss, "needs_reference", False)))
    on_gpu = device_type() == "cuda"
    table = Table(title=f"memory of a run of {config.model}", title_justify="left", caption_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for need in needs:
        table.add_section()
        table.add_row(f"[bold]{need.who}[/bold], {need.count} of them" if need.count > 1 else f"[bold]{need.who}", "")
        for part, size in need.parts.items():
            table.add_row(f"  {part}", f"{size / 2**30:.2f}")
        table.add_row("  in all, each" if need.count > 1 else "  in all", f"[bold]{need.total / 2**30:.2f}")
    table.add_section()
    where = "each of the GPUs has" if on_gpu else "this machine has"
    table.add_row(where, f"{memory_bytes() / 2**30:.2f}")
    Console(highlight=False).print(table)
    refuse(needs, available=memory_bytes(), together=not on_gpu)


def plan_run(config: RunConfig, model: Path, *, reference: bool) -> list[Need]:
    """List what the trainer's ranks, the engines, and the store of weights need, each at its peak.

    On GPUs it is what they need of one; the store is in host memory and left out there. Rows are counted as full.

    Args:
        model: Hugging Face folder, of which config.json is read.
        reference: whether the trainer keeps a frozen copy.
    """
    trainer = config.trainer
    found = plan_training(model, trainer, ranks=trainer.ranks, reference=reference)
    architecture = read_architecture(model)
    check_context(architecture, config.generator)
    dtype = str(resolve_dtype(trainer.dtype)).removeprefix("torch.")
    parts = {
        "weights, float32": found.weights,
        "gradients": found.gradients,
        "optimizer state": found.optimizer,
        "frozen reference": found.reference,
        f"weights gathered or cast, {dtype}": found.gathered,
        f"activations of {trainer.row_tokens} tokens, checkpointing {trainer.activation_checkpointing}": (
            found.activations
        ),
        "output head, a chunk of logits": found.head,
        "attention masks": found.masks,
        "freed memory that the heap keeps": found.heap,
    }
    if trainer.cpu_offload:
        for name in ("weights, float32", "gradients", "optimizer state"):
            parts[name] = 0
    on_gpu = device_type() == "cuda"
    if not on_gpu:
        parts["process"] = _PROCESS_BYTES
        if config.checkpoint_every:
            parts["copy of the state, while a checkpoint is written"] = found.weights + found.optimizer
    needs = [Need(who="trainer rank", count=trainer.ranks, parts=_without_zeros(parts), hint=_TRAINER_FLAGS)]
    return needs + _decoding(config, architecture, on_gpu=on_gpu)


def check_state_fits(config: RunConfig, architecture: Architecture, *, reference: bool) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone cannot fit, at no cost.

    Raises:
        ConfigError: they do not.
    """
    count, ranks, on_gpu = architecture.weights, config.trainer.ranks, device_type() == "cuda"
    split = max(1, ranks // int(getattr(config.trainer, "replicate", 1)))
    state = (20 if reference else 16) * count // split
    if on_gpu and config.trainer.cpu_offload:
        return
    needs = [Need(who="trainer rank", count=ranks, parts={"state": state}, hint=_TRAINER_FLAGS)]
    refuse(needs + _decoding(config, architecture, on_gpu=on_gpu), available=memory_bytes(), together=not on_gpu)


def refuse(needs: Sequence[Need], *, available: int, together: bool) -> None:
    """Raise ConfigError if a process needs more than there is, or, where they share it, all of them do.

    Args:
        available: bytes of a device.
        together: True if all are on that device.
    """
    if together:
        needed = sum(need.total * need.count for need in needs)
        most = max(needs, key=lambda need: need.total * need.count)
        if needed > available:
            raise ConfigError(
                f"the run needs {needed / 2**30:.1f} GiB, of which {most.count} x {most.total / 2**30:.1f} for each "
                f"{most.who}, and this machine has {available / 2**30:.1f} GiB",
                hint=f"{most.hint}; --plan shows each part",
            )
    for need in needs:
        if need.total > available:
            raise ConfigError(
                f"each {need.who} needs {need.total / 2**30:.1f} GiB, and its GPU has {available / 2**30:.1f} GiB",
                hint=f"{need.hint}; --plan shows each part",
            )


def _decoding(config: RunConfig, architecture: Architecture, *, on_gpu: bool) -> list[Need]:
    """List what engines and the versions that travel to them need."""
    generator, itemsize = config.generator, resolve_dtype(config.generator.dtype).itemsize
    weights = architecture.weights * itemsize // int(getattr(generator, "tensor_parallel", 1))
    if on_gpu:
        share = round(generator.memory_share * memory_bytes())
        parts = {f"weights, {itemsize} bytes each": weights, "keys and values": max(0, share - weights)}
        alone = not shares_devices(
            config.placement,
            ranks=config.trainer.ranks,
            engines=generator.replicas * generator.devices,
            decodes_while_training=config.schedule.decodes_while_training,
        )
        who = "engine" if alone else "engine, while the trainer's state is in host memory"
        return [Need(who=who, count=generator.replicas, parts=parts, hint=_ENGINE_FLAGS)]
    parts = {
        f"weights, {itemsize} bytes each": weights,
        "keys and values": round(generator.kv_cache_gib * 2**30),
        "process": _ENGINE_PROCESS_BYTES,
    }
    versions = min(
        config.weights.keep_versions * architecture.weights * itemsize, round(config.weights.keep_gib * 2**30)
    )
    return [
        Need(who="engine", count=generator.replicas, parts=parts, hint=_ENGINE_FLAGS),
        Need(who="store of weights", count=1, parts={"versions": versions}, hint="lower --weights.keep-versions"),
    ]


def _without_zeros(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}
