"""Memory plan of a run: each process's needs by part, computed before anything starts; refuses runs that cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from forge_rl.algorithms.loss_flag import build_loss
from forge_rl.algorithms.protocol import Loss
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.engines.architecture import Architecture, check_weights, read_architecture
from forge_rl.engines.context import check_context, sequence_bytes
from forge_rl.engines.devices import device_type
from forge_rl.engines.factory import plan_training
from forge_rl.engines.lora_config import LoRAConfig, adapter_parameters, base_bytes, dequantized_bytes
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.optimizer import moments_bytes
from forge_rl.engines.platform import gpu_bytes, resolve_dtype
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.speculation import read_speculation, resolve_draft_model
from forge_rl.errors import ConfigError
from forge_rl.models.adapter_limits import served_rank
from forge_rl.models.resolve import resolve_model
from forge_rl.run.lora_settings import lora_lines
from forge_rl.run.plan.defaults import check_teachers, colocated, with_defaults
from forge_rl.run.plan.scaled import with_scaled
from forge_rl.run.run_config import RunConfig
from forge_rl.run.run_models import RunModels
from forge_rl.services.teachers import engine_settings, resolve_teachers
from forge_rl.services.trainer_config import CriticConfig, TrainerConfig
from forge_rl.system.memory import host_bytes

if TYPE_CHECKING:
    from forge_rl.engines.titan.plan import Traces

C = TypeVar("C", bound=RunConfig)

_SPARE = "spare engine"
"""Name of the spare engines' need."""
_DEQUANTIZED = "dequantised base, while a version is written whole, beyond what a step needs"
_TRAINER_FLAGS = "raise --trainer.ranks, set --trainer.activation-checkpointing full, or lower --trainer.seq-len"
_CRITIC_FLAGS = "raise --critic.ranks, set --critic.activation-checkpointing full, or lower --critic.seq-len"
_ENGINE_FLAGS = "lower --generator.replicas, --generator.kv-cache-gib or --generator.gpu-memory-utilization"
_TEACHER_FLAGS = "lower --teachers.replicas, --teachers.kv-cache-gib or --teachers.gpu-memory-utilization"
PROCESS_BYTES = 540 << 20
"""Python, torch and torchtitan in a trainer process that has taken a step; an engine's process needs more."""
_ENGINE_PROCESS_BYTES = 900 << 20
_CUDA_PROCESS_BYTES = 3 << 30
"""Approximate host memory of a process with a CUDA context: libraries, pinned buffers and compiled kernels."""
_HOST_FLAGS = (
    "give the trainer GPUs of its own (--placement separate), leave out --trainer.enable-cpu-offload, set "
    "--checkpoint-every 0, or lower --weights.keep-versions"
)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory that one kind of process needs, on its GPU or on the host."""

    who: str
    count: int
    """Number of processes of this kind."""
    parts: dict[str, int]
    """Bytes of each part, per process."""
    hint: str
    """Flags that reduce it."""
    of_gpu: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def show_plan(config: object) -> None:
    """Print the result of `plan_run` for a recipe's settings; try their `loss`, texts or a Loss, if there is one.

    Raises:
        ConfigError: the run cannot fit.
        LossError: the loss does not work, see `try_loss`.
    """
    assert isinstance(config, RunConfig), f"{type(config).__name__} has a flag --plan"
    config.check_devices()
    # What follows repeats the checks and choices of a start, so that a plan refuses what a start would.
    loss, reference, values = tried_loss(config)
    model = resolve_model(config.model, config.cache).resolve()
    architecture = read_architecture(model, config.trainer.modelling)
    if not architecture.quantized:
        check_weights(model, architecture, values=values)
    drafts = resolve_draft_model(config.generator.speculation, model, config.cache)
    config = replace(config, generator=replace(config.generator, speculation=drafts))
    critic = getattr(config, "critic", None)
    if critic is not None and critic.model:
        critic = replace(critic, model=str(resolve_model(critic.model, config.cache).resolve()))
    config, critic, scaled_lines = with_scaled(
        config,
        critic,
        architecture=architecture,
        critics=None if critic is None else read_architecture(Path(critic.model or model), critic.modelling),
    )
    config, critic, choices = with_defaults(config, model, reference=reference, values=values, critic=critic)
    teachers, folders = getattr(config, "teachers", None), {}
    if teachers is not None:
        folders = resolve_teachers(teachers, model, config.cache)
        check_teachers(config, teachers, folders)
    models = RunModels(
        policy=model,
        reference=reference,
        values=values,
        critic=critic,
        teachers=teachers,
        teacher_folders=folders,
    )
    needs = plan_run(config, models)
    config, choices = with_spares_that_fit(config, needs, choices, host=host_bytes())
    # Planned with the spares to see whether they fit, and shown without them if not.
    needs = [need for need in needs if need.who != _SPARE or config.generator.spares]
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
    if gpu := gpu_bytes():
        table.add_row("each of the GPUs has", f"{gpu / 2**30:.2f}")
    table.add_row("this machine has", f"{host_bytes() / 2**30:.2f}")
    console = Console(highlight=False)
    for line in [*lora_lines(config, values=values), *(f"chosen: {line}" for line in (*scaled_lines, *choices))]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(table)
    if loss is None:
        console.print(
            f"the loss was not tried, and no frozen reference is counted: {type(config).__name__} has no `loss`"
        )
    refuse(needs, host=host_bytes(), gpu=gpu)


def tried_loss(config: RunConfig) -> tuple[Loss | None, bool, bool]:
    """Try the `loss` of a recipe's settings, if there is one. Return it, and whether it needs a frozen reference and a
    value model.

    Raises:
        LossError: the loss does not work, see `try_loss`.
    """
    loss = getattr(config, "loss", None)
    if loss is None:
        return None, False, False
    loss = loss if isinstance(loss, Loss) else build_loss(loss)
    try_loss(loss)
    return loss, "reference" in loss.needs, "values" in loss.needs


def plan_run(config: RunConfig, models: RunModels, *, traces: Traces | None = None) -> list[Need]:
    """List the peak memory of trainer ranks, critic ranks, engines, weight store, and teachers.

    With GPUs, this is the need of each GPU, and the host memory of all processes together. Rows count as full.

    Args:
        models: the run's models; only their config.json is read.
        traces: earlier traces of the policy's model, to which new ones are added.
    """
    trainer, critic = config.trainer, models.critic
    architecture = read_architecture(models.policy, trainer.modelling)
    rank_memory = plan_training(
        models.policy,
        trainer,
        ranks=trainer.ranks,
        reference=models.reference,
        values=models.values,
        traces=traces,
    )
    if config.starts_engines:
        check_context(architecture, config.generator)
    parts = _parts(trainer, rank_memory)
    if config.starts_engines:
        parts[_DEQUANTIZED] = _dequantized_excess(trainer, architecture, rank_memory)
    # On GPUs each rank needs device memory and host memory, planned apart; on CPU both are the same.
    on_gpu, host = device_type() == "cuda", {}
    if config.checkpoint_every:
        host["copy of the state, while a checkpoint is written"] = rank_memory.copy
    if rank_memory.offloaded:
        host["inputs of layers, between forward and backward pass"] = rank_memory.offloaded
    if on_gpu:
        moved_bytes = rank_memory.state
        if trainer.enable_cpu_offload:
            for name in (_weights_of(trainer), "gradients", "optimizer state", "frozen reference", _DEQUANTIZED):
                host[name] = parts.pop(name, 0)
        # Only one of the two holds shared devices: the trainer's state moves out for the engines' turn.
        elif (colocated(config) or config.generator.guests) and not trainer.stays_on_device:
            host["state that comes here while engines decode"] = moved_bytes
        host["process"] = _CUDA_PROCESS_BYTES
    else:
        parts |= {"process": PROCESS_BYTES} | host
        host = {}
    critic_needs = []
    if critic is not None:
        critic_memory = plan_training(models.critic_folder, critic, ranks=critic.ranks, reference=False, values=True)
        # Trainer and critic take turns on the same GPUs: both states stay, and the larger step counts.
        if on_gpu:
            step = rank_memory.total - rank_memory.state
            parts["critic's state, and what its step needs more"] = max(critic_memory.state, critic_memory.total - step)
        else:
            critic_needs.append(_critic_on_cpu(critic, critic_memory, saved=config.checkpoint_every > 0))
    rank = Need(
        who="trainer rank", count=trainer.ranks, parts=_without_zeros(parts), hint=_TRAINER_FLAGS, of_gpu=on_gpu
    )
    host_need = Need(
        who="trainer rank, in host memory", count=trainer.ranks, parts=_without_zeros(host), hint=_HOST_FLAGS
    )
    other_needs = _decoding(config, architecture, on_gpu=on_gpu) + _teaching(config, models, on_gpu=on_gpu)
    return [rank, *([host_need] if host else []), *critic_needs, *other_needs]


def _critic_on_cpu(critic: CriticConfig, critic_memory: TrainMemory, *, saved: bool) -> Need:
    parts = _parts(critic, critic_memory) | {"process": PROCESS_BYTES}
    if saved:
        parts["copy of the state, while a checkpoint is written"] = critic_memory.copy
    return Need(who="critic rank", count=critic.ranks, parts=_without_zeros(parts), hint=_CRITIC_FLAGS)


def _parts(trainer: TrainerConfig, rank_memory: TrainMemory) -> dict[str, int]:
    """Name the parts of a rank's memory."""
    dtype = str(resolve_dtype(trainer.dtype)).removeprefix("torch.")
    return {
        _weights_of(trainer): rank_memory.weights,
        "gradients": rank_memory.gradients,
        "optimizer state": rank_memory.optimizer,
        "frozen reference": rank_memory.reference,
        f"weights gathered or cast, {dtype}": rank_memory.gathered,
        f"activations of {trainer.seq_len} tokens, checkpointing {trainer.activation_checkpointing}": (
            rank_memory.activations
        ),
        "hot experts, twice as busy as others": rank_memory.hot_experts,
        "output head, a chunk of logits": rank_memory.head,
        "attention masks": rank_memory.masks,
        "freed memory that the heap keeps": rank_memory.heap,
    }


def _dequantized_excess(trainer: TrainerConfig, architecture: Architecture, rank_memory: TrainMemory) -> int:
    """Return the bytes of a rank's part of the dequantised base above a step's activations and other temporaries.

    The rank holds that whole part while it writes the first version, before any step.
    """
    shards = max(1, trainer.ranks // trainer.data_parallel_replicate_degree)
    itemsize = resolve_dtype(trainer.dtype).itemsize
    # Sharded over the ranks of a replicate; each replicate holds all of it.
    part = dequantized_bytes(architecture, trainer.lora, itemsize) // shards
    return max(0, part - (rank_memory.total - rank_memory.state))


def _weights_of(trainer: TrainerConfig) -> str:
    """Name the weights of a rank."""
    if not trainer.lora.rank:
        return "weights, float32"
    dtype = str(resolve_dtype(trainer.dtype)).removeprefix("torch.")
    base = "" if trainer.lora.base_format == "full" else f", linear layers in {trainer.lora.base_format}"
    return f"weights, {dtype}{base}, and LoRA adapters of rank {trainer.lora.rank}"


def check_state_fits(config: RunConfig, models: RunModels) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone cannot fit; a cheap check.

    Raises:
        ConfigError: they do not fit.
    """
    architecture, critic = read_architecture(models.policy, config.trainer.modelling), models.critic
    count, ranks, on_gpu = architecture.weights, config.trainer.ranks, device_type() == "cuda"
    # FSDP shards the state over the ranks of a replicate; each replicate has all of it.
    split = max(1, ranks // int(getattr(config.trainer, "data_parallel_replicate_degree", 1)))
    moments = moments_bytes(config.trainer.optimizer_state)
    itemsize = resolve_dtype(config.trainer.dtype).itemsize
    # Float32 weights and gradients, 4 bytes each, the moments, and a reference in the dtype of the passes.
    state = int((8 + moments + models.reference * itemsize) * count) // split
    if config.lora.rank:
        frozen = base_bytes(architecture, config.lora, itemsize)
        state = int(frozen + (8 + moments) * adapter_parameters(architecture, config.lora)) // split
    is_offloaded = on_gpu and config.trainer.enable_cpu_offload
    critic_needs = []
    if critic is not None:
        weights = read_architecture(models.critic_folder, critic.modelling).weights
        per_weight = 8 + moments_bytes(critic.optimizer_state)
        critic_bytes = int(per_weight * weights) // (critic.ranks // critic.data_parallel_replicate_degree)
        if on_gpu:
            state += critic_bytes
        else:
            critic_needs = [
                Need(who="critic rank", count=critic.ranks, parts={"state": critic_bytes}, hint=_CRITIC_FLAGS)
            ]
    needs = [
        Need(
            who="trainer rank",
            count=ranks,
            parts={"state": state},
            hint=_TRAINER_FLAGS,
            of_gpu=on_gpu and not is_offloaded,
        )
    ]
    moves = colocated(config) or config.generator.guests
    if on_gpu and not is_offloaded and moves and not config.trainer.stays_on_device:
        moved_bytes = state - 4 * count // split  # no gradients exist while engines decode
        needs.append(
            Need(who="trainer rank, in host memory", count=ranks, parts={"state": moved_bytes}, hint=_HOST_FLAGS)
        )
    other_needs = _decoding(config, architecture, on_gpu=on_gpu) + _teaching(config, models, on_gpu=on_gpu)
    refuse(needs + critic_needs + other_needs, host=host_bytes(), gpu=gpu_bytes())


def refuse(needs: Sequence[Need], *, host: int, gpu: int) -> None:
    """Raise ConfigError if a process needs more than its GPU has, or all processes together more than this machine.

    Args:
        host: bytes of this machine's memory.
        gpu: bytes of a GPU's memory; 0 without GPUs.
    """
    for need in needs:
        if need.of_gpu and need.total > gpu:
            raise ConfigError(
                f"each {need.who} needs {need.total / 2**30:.1f} GiB, but its GPU has {gpu / 2**30:.1f} GiB",
                hint=f"{need.hint}; --plan shows each part",
            )
    # Each GPU has one process of a kind, while all processes share the host's memory.
    host_needs = [need for need in needs if not need.of_gpu]
    needed = sum(need.total * need.count for need in host_needs)
    if needed > host:
        largest = max(host_needs, key=lambda need: need.total * need.count)
        raise ConfigError(
            f"the run needs {needed / 2**30:.1f} GiB, of which {largest.count} x {largest.total / 2**30:.1f} for each "
            f"{largest.who}, but this machine has {host / 2**30:.1f} GiB",
            hint=f"{largest.hint}; --plan shows each part",
        )


def with_spares_that_fit(config: C, needs: Sequence[Need], choices: list[str], *, host: int) -> tuple[C, list[str]]:
    """Drop the spare engines if this machine's memory does not suffice for them.

    Args:
        needs: the run's needs with its spares, see `plan_run`.
        choices: lines about the choices so far.
        host: bytes of this machine's memory.

    Returns:
        The run's settings, and the lines, with one more if the spares are dropped.
    """
    spare_bytes = sum(need.total * need.count for need in needs if need.who == _SPARE)
    other_bytes = sum(need.total * need.count for need in needs if not need.of_gpu and need.who != _SPARE)
    if not spare_bytes or other_bytes + spare_bytes <= host:
        return config, choices
    line = (
        f"--generator.spares 0: they need {spare_bytes / 2**30:.1f} GiB, but the rest of the run leaves "
        f"{max(0, host - other_bytes) / 2**30:.1f}; an engine that dies is replaced after a whole start"
    )
    return replace(config, generator=replace(config.generator, spares=0)), [*choices, line]


def _decoding(config: RunConfig, architecture: Architecture, *, on_gpu: bool) -> list[Need]:
    """List the needs of engines, if there are any, and of the versions published to them."""
    if not config.starts_engines:
        return []
    generator, itemsize = config.generator, resolve_dtype(config.generator.dtype).itemsize
    model_bytes = architecture.weights * itemsize
    # At least two, since one version is held while the next is written.
    versions = config.weights.held_bytes(model_bytes)
    store = Need(who="store of weights", count=1, parts={"versions": versions}, hint="lower --weights.keep-versions")
    if not generator.replicas + generator.guests:  # all engines run in external servers
        return [store]
    if on_gpu:
        weights = model_bytes // generator.tensor_parallel_size
        share = round(generator.gpu_share * gpu_bytes())
        slots = _adapter_slots(config, architecture)
        # vLLM gives keys and values whatever weights and adapters leave of its share.
        cache = max(0, share - weights - sum(slots.values()))
        parts = {f"weights, {itemsize} bytes each": weights, **slots, "keys and values": cache}
        asleep = {"weights, while it sleeps": weights} if colocated(config) else {}
        is_state_fixed = config.trainer.stays_on_device or config.trainer.enable_cpu_offload or not asleep
        who = "engine" if is_state_fixed else "engine, while the trainer's state is in host memory"
        host = Need(
            who="worker of an engine, in host memory",
            count=generator.replicas * generator.devices,
            parts=asleep | {"process": _CUDA_PROCESS_BYTES},
            hint=_HOST_FLAGS,
        )
        engines = (generator.replicas + generator.guests) * generator.devices
        engine = Need(who=who, count=engines, parts=parts, hint=_ENGINE_FLAGS, of_gpu=True)
        guest = Need(
            who="worker of a guest, in host memory",
            count=generator.guests * generator.devices,
            parts={"weights, while it sleeps": weights, "process": _CUDA_PROCESS_BYTES},
            hint="lower --generator.guests",
        )
        return [engine, host, *[guest] * (guest.count > 0), *_spares(config, {"process": _ENGINE_PROCESS_BYTES}), store]
    parts = {
        # Counted once for an engine, whose processes hold a shard each.
        f"weights, {itemsize} bytes each": model_bytes * generator.data_parallel_size,
        "keys and values": round(generator.kv_cache_gib * 2**30),
        **_adapter_slots(config, architecture),
        **_draft_model(generator),
        "process": _ENGINE_PROCESS_BYTES,
    }
    engine = Need(who="engine", count=generator.replicas + generator.guests, parts=parts, hint=_ENGINE_FLAGS)
    asleep = {name: size for name, size in parts.items() if name != "keys and values"}
    return [engine, *_spares(config, asleep), store]


def _adapter_slots(config: RunConfig, architecture: Architecture) -> dict[str, int]:
    """Return the bytes that an engine reserves for adapters, if it serves any. vLLM reserves them for each linear layer
    that could have one: on the device, and for the adapters' own copies on the host. On CPU these are one."""
    generator = config.generator
    if not generator.max_loras:
        return {}
    lora = LoRAConfig(rank=served_rank(generator.max_lora_rank))
    adapter_bytes = adapter_parameters(architecture, lora) * resolve_dtype(generator.dtype).itemsize
    return {f"{generator.max_loras} adapters of rank {lora.rank}": generator.max_loras * adapter_bytes}


def _draft_model(settings: DecodeSettings) -> dict[str, int]:
    """Return the bytes that an engine's draft model takes, if there is one and its name is a folder."""
    speculation = read_speculation(settings.speculation)
    if speculation is None or not (Path(speculation.model) / "config.json").is_file():
        return {}
    architecture = read_architecture(Path(speculation.model))
    room = speculation.max_running * sequence_bytes(architecture, settings)
    weights = architecture.weights * resolve_dtype(settings.dtype).itemsize
    return {"weights of the draft model": weights, "its keys and values": room}


def _spares(config: RunConfig, parts: dict[str, int]) -> list[Need]:
    """List the needs of spare engines, which hold no keys and values, and nothing on GPUs."""
    spares = config.generator.spares
    return [Need(who=_SPARE, count=spares, parts=parts, hint="lower --generator.spares")] if spares else []


def _teaching(config: RunConfig, models: RunModels, *, on_gpu: bool) -> list[Need]:
    """List the needs of the teachers' engines, which never sleep."""
    needs = []
    for name, folder in models.teacher_folders.items():
        assert models.teachers is not None
        settings = engine_settings(models.teachers, config.generator, folder)
        itemsize = resolve_dtype(settings.dtype).itemsize
        weights = read_architecture(folder).weights * itemsize
        # On CPU, the processes of an engine are counted together.
        weights = weights // settings.tensor_parallel_size if on_gpu else weights * settings.data_parallel_size
        parts = {f"weights, {itemsize} bytes each": weights}
        who, count = f"engine of the teacher {name}", settings.replicas * settings.devices
        if on_gpu:
            parts["keys and values"] = max(0, round(settings.gpu_share * gpu_bytes()) - weights)
            process = {"process": _CUDA_PROCESS_BYTES}
            needs.append(Need(who=f"{who}, in host memory", count=count, parts=process, hint=_TEACHER_FLAGS))
        else:
            parts |= {"keys and values": round(settings.kv_cache_gib * 2**30), "process": _ENGINE_PROCESS_BYTES}
            count = settings.replicas
        needs.append(Need(who=who, count=count, parts=parts, hint=_TEACHER_FLAGS, of_gpu=on_gpu))
    return needs


def _without_zeros(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}
