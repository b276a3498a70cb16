"""Defaults that depend on memory and the model, for settings that the user left open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from forge_rl.engines.architecture import Architecture, read_architecture
from forge_rl.engines.context import check_context, positions
from forge_rl.engines.decode_layout import check_adapters, check_decode_layout
from forge_rl.engines.degrees import check_model
from forge_rl.engines.devices import gpus
from forge_rl.engines.factory import plan_training
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.optimizer import OPTIMIZER_STATES
from forge_rl.engines.platform import gpu_bytes
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import ConfigError
from forge_rl.packing.trees import round_up
from forge_rl.rollout.placement import shares_devices
from forge_rl.run.lora_settings import check_served_versions
from forge_rl.run.placement_flag import read_placement
from forge_rl.run.plan.scaled import CONTEXT, NEW_TOKENS, open_flags
from forge_rl.run.run_config import RunConfig
from forge_rl.services.teachers import engine_settings
from forge_rl.services.teachers_config import TeachersConfig, as_teachers
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import LEAST_ROW, PAD_MULTIPLE, CriticConfig, as_critic
from forge_rl.system.memory import host_bytes

C = TypeVar("C", bound=RunConfig)

_ROWS = 8192, 4096, 2048, 1024
"""Candidate row lengths in tokens. Longer rows do not raise GPU utilisation."""
_CONTEXTS = 4096, 2048
"""Candidate contexts in tokens on a GPU, where the user names none; half of one is for new tokens."""
_MOST_SHARE = 0.9
_LEAST_SHARE = 0.4
"""Minimum share of a GPU left for an engine if the trainer's state stays on it."""
_USABLE = 0.95
"""Usable share of the memory left to a process; the rest is lost to fragmentation."""
_SMALL_SHARE = 0.25
"""Share of a machine's memory below which a trainer's state leaves enough for its activations."""
_CONTEXT_BYTES = 2 << 30
"""CUDA context, library workspaces and the like of a trainer rank."""
_ASLEEP_BYTES = 3 << 30
"""GPU memory that a sleeping engine keeps: a context, and CUDA graphs."""


def colocated(config: RunConfig, num_gpus: int | None = None) -> bool:
    """Return whether trainer and engines share devices, see `shares_devices`; False without engines.

    Args:
        num_gpus: number of GPUs; this machine's by default.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if not config.starts_engines:
        num_gpus = gpus() if num_gpus is None else num_gpus
        if 0 < num_gpus < config.trainer.ranks:
            raise ConfigError(
                f"{config.trainer.ranks} trainer ranks need as many GPUs, but there are {num_gpus}",
                hint="lower --trainer.ranks",
            )
        return False
    return shares_devices(
        read_placement(config.placement).devices,
        ranks=config.trainer.ranks,
        engines=config.generator.replicas * config.generator.devices,
        decodes_while_training=config.schedule.decodes_while_training,
        num_gpus=num_gpus,
    )


def with_defaults(
    config: C, model: Path, *, reference: bool, values: bool = False, critic: CriticConfig | None = None
) -> tuple[C, CriticConfig | None, list[str]]:
    """Choose settings that the user left open, for this machine; see `choose`. Takes seconds with GPUs, and where a
    model is large for this machine.

    A critic's rows are as long as the trainer's, and its state is where the trainer's is, on the same GPUs.

    Args:
        model: Hugging Face folder; only its config.json is read, and of served adapters the names of its weights.
        reference: whether the trainer keeps a frozen copy.
        values: whether the trainer has a value model.
        critic: settings of a critic, whose model is a folder or the trainer's.

    Returns:
        The run's settings, the critic's, and a line per choice.

    Raises:
        ConfigError: there are too few GPUs, see `shares_devices`; the critic does not fit next to the trainer; or
            engines cannot serve the run's adapters.
    """
    gpu, ranks = gpu_bytes(), config.trainer.ranks
    architecture = read_architecture(model, config.trainer.modelling)
    if config.generator.adapters == "served":
        check_served_versions(config, model, architecture)
    if config.starts_engines:
        check_adapters(model, config.generator)
    if critic is not None:
        check_critic(config, critic, read_architecture(Path(critic.model or model), critic.modelling))

    def memory(settings: TrainSettings) -> TrainMemory:
        plan = plan_training(model, settings, ranks=ranks, reference=reference, values=values)
        # A critic's state stays on the same GPUs, as a frozen reference does, and is planned as such a part.
        return plan if critic is None else replace(plan, reference=plan.reference + _critic_state(critic, model))

    # On CPU there is no separate device memory to share: only recomputation and small moments are chosen.
    flags = open_flags(config)
    if not gpu:
        config, lines = with_recomputation(config, flags, architecture, host=host_bytes(), memory=memory)
        return config, critic, lines
    config, lines = with_context(config, flags, positions(architecture), gpu=gpu, memory=memory)
    config, more_lines = choose(config, architecture, gpu=gpu, num_gpus=gpus(), memory=memory)
    lines += more_lines
    if critic is not None:
        critic = replace(
            critic,
            seq_len=critic.seq_len or config.trainer.seq_len,
            stays_on_device=critic.stays_on_device or config.trainer.stays_on_device,
        )
    return config, critic, lines


def _critic_state(critic: CriticConfig, model: Path) -> int:
    """Return the bytes that a critic holds on each of its GPUs from step to step."""
    # The shortest row will do, as the state does not depend on it.
    settings = replace(critic, seq_len=LEAST_ROW)
    folder = Path(critic.model) if critic.model else model
    return plan_training(folder, settings, ranks=critic.ranks, reference=False, values=True).state


def check_critic(config: RunConfig, critic: CriticConfig, architecture: Architecture) -> None:
    """Refuse a critic that does not fit its model, the batches, or the trainer's GPUs.

    Raises:
        ConfigError: says what does not fit, and what to change.
    """
    # Errors then name flags of --critic and not of --trainer.
    with as_critic():
        check_model(critic, critic.ranks, architecture)
    if 0 < critic.longest_row < config.generator.max_model_len:
        raise ConfigError(
            f"episodes can have {config.generator.max_model_len} tokens, but a row of the critic only "
            f"{critic.longest_row}",
            hint="raise --critic.seq-len or --critic.context-parallel-degree, or lower --generator.max-model-len",
        )
    if critic.minibatches > config.groups_per_batch:
        raise ConfigError(
            f"{config.groups_per_batch} groups cannot be split into {critic.minibatches} minibatches",
            hint="lower --critic.minibatches, or raise --groups-per-batch",
        )
    if gpus() and critic.ranks > config.trainer.ranks:
        raise ConfigError(
            f"the critic has {critic.ranks} ranks, and shares the {config.trainer.ranks} GPUs of the trainer",
            hint="set --critic.ranks to --trainer.ranks or less",
        )


def policy_gpus(config: RunConfig) -> int:
    """Return the number of GPUs that trainer and policy engines take; teachers come after them."""
    engines = config.generator.replicas * config.generator.devices
    return max(config.trainer.ranks, engines) if colocated(config) else config.trainer.ranks + engines


def check_teachers(config: RunConfig, teachers: TeachersConfig, folders: Mapping[str, Path]) -> None:
    """Refuse teachers whose engines cannot hold them, or for which there are too few GPUs.

    Args:
        folders: folder of each teacher with engines of its own, by the name of its model.

    Raises:
        ConfigError: says what does not fit, and what to change.
    """
    for folder in folders.values():
        with as_teachers():
            settings = engine_settings(teachers, config.generator, folder)
            check_decode_layout(folder, settings, engines=teachers.replicas)
            check_context(read_architecture(folder), settings)
    policy_devices, devices_per_teacher = policy_gpus(config), teachers.replicas * teachers.devices
    if gpus() and (needed := policy_devices + devices_per_teacher * len(folders)) > gpus():
        raise ConfigError(
            f"trainer and policy take {policy_devices} GPUs and each of {len(folders)} teachers {devices_per_teacher}, "
            f"{needed} in all, but there are {gpus()}",
            hint="lower --trainer.ranks, --generator.replicas or --teachers.replicas, set --placement colocated, or "
            "choose the policy itself as the teacher",
        )


def with_recomputation(
    config: C,
    flags: Collection[str],
    architecture: Architecture,
    *,
    host: int,
    memory: Callable[[TrainSettings], TrainMemory],
) -> tuple[C, list[str]]:
    """Have a trainer on CPU recompute activations, and then also keep small moments, if it would not fit in memory
    otherwise and these flags are open. Returns the settings, and a line if they changed.

    Args:
        flags: flags that are open.
        host: bytes of this machine's memory.
        memory: plans the memory of a trainer rank, which takes seconds.
    """
    trainer, engines = config.trainer, config.generator.replicas * config.starts_engines
    # What the engines' float32 weights and caches on the same machine leave to the trainer.
    usable = _USABLE * host - engines * (4 * architecture.weights + config.generator.kv_cache_gib * 2**30)
    # A plan takes seconds, which a model that surely fits is spared: 16 bytes a weight, and few more for a row.
    is_small = 16 * architecture.weights < _SMALL_SHARE * host
    if is_small or "trainer.activation_checkpointing" not in flags or trainer.ranks * memory(trainer).total <= usable:
        return config, []
    # Moments are ordered from exact to smallest; only those below the current one save memory.
    smaller_moments = OPTIMIZER_STATES[OPTIMIZER_STATES.index(trainer.optimizer_state) + 1 :]
    if trainer.dtype == "float64" or "trainer.optimizer_state" not in flags:
        smaller_moments = ()
    recomputing = replace(trainer, activation_checkpointing="full")
    for candidate in (recomputing, *(replace(recomputing, optimizer_state=state) for state in smaller_moments)):
        if trainer.ranks * memory(candidate).total <= usable:
            text = "--trainer.activation-checkpointing full"
            if candidate.optimizer_state != trainer.optimizer_state:
                text += f" --trainer.optimizer-state {candidate.optimizer_state}"
            line = f"{text}: the trainer does not fit in {host / 2**30:.0f} GiB otherwise"
            return replace(config, trainer=candidate), [line]
    return config, []


def with_context(
    config: C,
    flags: Collection[str],
    longest: int,
    *,
    gpu: int,
    memory: Callable[[TrainSettings], TrainMemory],
) -> tuple[C, list[str]]:
    """Choose the context of engines on GPUs and the new tokens of an answer, where they are open: as many as fit a row
    next to the trainer's state, without recomputation. Returns the settings, and a line per choice.

    Args:
        flags: flags that are open.
        longest: positions of the model.
        gpu: memory of each GPU in bytes.
        memory: plans the memory of a trainer rank.
    """
    trainer, generator, lines = config.trainer, config.generator, list[str]()
    if not config.starts_engines:
        return config, lines
    # Engines may end up on the same GPUs, so a sleeping one is reckoned with, whatever the placement.
    usable = _USABLE * (gpu - _CONTEXT_BYTES - _ASLEEP_BYTES)
    parts = trainer.context_parallel_degree

    def fits(tokens: int) -> bool:
        if "trainer.seq_len" not in flags and trainer.seq_len:
            return tokens <= trainer.longest_row
        row = max(LEAST_ROW, round_up(-(-tokens // parts), PAD_MULTIPLE))
        return memory(replace(trainer, seq_len=row)).total <= usable

    if CONTEXT in flags:
        # The longest that fits; the default stays if none above it does.
        context = next((n for n in _CONTEXTS if generator.max_model_len < n <= longest and fits(n)), 0)
        if context:
            generator = replace(generator, max_model_len=context)
            lines.append(f"--generator.max-model-len {context}: a row of so many tokens fits on a GPU")
    if NEW_TOKENS in flags and generator.max_model_len // 2 > generator.max_tokens:
        generator = replace(generator, max_tokens=generator.max_model_len // 2)
        lines.append(f"--generator.max-tokens {generator.max_tokens}: half of --generator.max-model-len")
    return replace(config, generator=generator), lines


def choose(
    config: C, architecture: Architecture, *, gpu: int, num_gpus: int, memory: Callable[[TrainSettings], TrainMemory]
) -> tuple[C, list[str]]:
    """Choose settings for a given machine; returns them and a line per choice. A pure function.

    Trainer rows become as long as memory allows, and engines get the memory that the trainer leaves. State stays on a
    shared GPU if the engines have room next to it. If nothing fits otherwise, activations are recomputed, then ranks
    lend hot experts, then moments are kept in bfloat16 or int8, and only if that is not enough, the state moves to host
    memory permanently. Trainer and engines that take turns share GPUs if that costs nothing.

    Args:
        gpu: memory of each GPU in bytes.
        num_gpus: number of GPUs.
        memory: plans the memory of a trainer rank.

    Raises:
        ConfigError: the trainer has too few GPUs for the engines that are guests there.
    """
    trainer, generator, lines = config.trainer, config.generator, list[str]()
    if generator.guests * generator.devices > trainer.ranks:
        raise ConfigError(
            f"{generator.guests} guests of {generator.devices} devices do not fit on the trainer's {trainer.ranks}",
            hint="lower --generator.guests",
        )
    context = generator.max_model_len if config.starts_engines else 0
    # A row must hold the longest episode, split over context-parallel ranks and padded to whole blocks.
    needed = max(LEAST_ROW, round_up(-(-context // trainer.context_parallel_degree), PAD_MULTIPLE))
    tokens = trainer.seq_len or needed
    rank_memory = memory(replace(trainer, seq_len=tokens))
    engines = generator.replicas * generator.devices
    turns = config.starts_engines and not config.schedule.decodes_while_training
    shared = colocated(config, num_gpus)

    # What the trainer's state leaves of a GPU if it stays there.
    free_bytes = gpu - round(rank_memory.state / _USABLE) - _CONTEXT_BYTES
    weights = 2 * architecture.weights // generator.tensor_parallel_size
    # The share that the user set, or else room for the weights and as much again, and at least `_LEAST_SHARE`.
    min_engine_bytes = generator.gpu_memory_utilization * gpu or max(_LEAST_SHARE * gpu, 2 * weights)
    # State that stays need not be moved at each turn; it does if the engines have room next to it.
    stays = trainer.stays_on_device or (turns and not trainer.enable_cpu_offload and free_bytes >= min_engine_bytes)
    placement = read_placement(config.placement)
    # Sharing costs nothing if both fit side by side and neither would leave GPUs of the other unused.
    if placement.devices == "auto" and turns and not shared and stays and trainer.ranks == engines:
        shared = True
        lines.append(
            f"placement colocated: under the {config.schedule.kind} schedule trainer and engines take turns, and both "
            f"fit on {engines} of {num_gpus} GPUs; --trainer.ranks and --generator.replicas use the others"
        )
    has_engines = shared or generator.guests > 0  # on the trainer's GPUs
    usable = _USABLE * (gpu - _CONTEXT_BYTES - has_engines * _ASLEEP_BYTES)
    lends = rank_memory.hot_experts > 0 and trainer.expert_balance == "plain" and not architecture.family.general
    trainer, rank_memory, flags = _fitted(trainer, rank_memory, tokens, usable, memory, lends=lends)
    if flags:
        lines.append(f"{flags}: the trainer does not fit otherwise; more --trainer.ranks shard its state")
    stays = stays and has_engines and (config.trainer.enable_cpu_offload or not trainer.enable_cpu_offload)

    if not trainer.seq_len:
        # Only these grow with the row's length. Taken as linear, they spare a plan for each candidate.
        bytes_per_token = (rank_memory.activations + rank_memory.hot_experts) / tokens
        seq_len = next(
            (row for row in _ROWS if row > needed and rank_memory.total + bytes_per_token * (row - tokens) <= usable),
            needed,
        )
        trainer = replace(trainer, seq_len=seq_len)
        lines.append(f"--trainer.seq-len {seq_len}: for {gpu / 2**30:.0f} GiB per GPU")
    if stays and not trainer.stays_on_device:
        trainer = replace(trainer, stays_on_device=True)
        lines.append("--trainer.stays-on-device: its state fits next to the engines, which then decode immediately")
    if config.starts_engines and not generator.gpu_memory_utilization:
        engine_bytes = free_bytes if stays else gpu - has_engines * _CONTEXT_BYTES
        # Rounded down to whole percents, so that the share never exceeds what is free.
        share = max(0.01, min(_MOST_SHARE, engine_bytes * 100 // gpu / 100))
        generator = replace(generator, gpu_memory_utilization=share)
        lines.append(
            f"--generator.gpu-memory-utilization {share:g}: of a GPU that engines {'share' if shared else 'have'}"
        )
    if shared and placement.devices != "colocated":
        config = replace(config, placement=replace(placement, devices="colocated").text)
    return replace(config, trainer=trainer, generator=generator), lines


def _fitted(
    trainer: Trainer.Config,
    rank_memory: TrainMemory,
    tokens: int,
    usable: float,
    memory: Callable[[TrainSettings], TrainMemory],
    *,
    lends: bool,
) -> tuple[Trainer.Config, TrainMemory, str]:
    """If a rank does not fit, recompute activations; then also have ranks lend hot experts, which changes no result;
    then keep small moments, and only then offload the state, as the host's link costs more than rounding moments does.

    Args:
        lends: whether ranks can lend experts, and do not.
        rank_memory: memory of a rank with these settings and rows of `tokens` tokens.
        usable: bytes of a GPU that a rank may use.

    Returns:
        The settings, the memory of a rank on its GPU, and the flags that changed; unchanged if nothing fits.
    """

    def on_gpu(settings: TrainSettings, needs: TrainMemory) -> TrainMemory:
        # Offloaded state is in host memory: only gathered weights, activations and the like are left on the GPU.
        offloaded = replace(needs, weights=0, gradients=0, optimizer=0, reference=0)
        return offloaded if settings.enable_cpu_offload else needs

    rank_memory = on_gpu(trainer, rank_memory)
    if trainer.enable_cpu_offload or rank_memory.total <= usable:
        return trainer, rank_memory, ""
    # Each candidate has the means of those before it: the first that fits is the one that costs least.
    recomputing = replace(trainer, seq_len=tokens, activation_checkpointing="full")
    smaller_moments = OPTIMIZER_STATES[OPTIMIZER_STATES.index(trainer.optimizer_state) + 1 :]
    smaller_moments = () if trainer.dtype == "float64" else smaller_moments
    lending = replace(recomputing, expert_balance="least_loaded") if lends else recomputing
    for candidate in (
        recomputing,
        *([lending] if lends else []),
        *(replace(lending, optimizer_state=state) for state in smaller_moments),
        replace(lending, enable_cpu_offload=True),
    ):
        candidate_memory = on_gpu(candidate, memory(candidate))
        if candidate_memory.total <= usable:
            flags = (
                "--trainer.activation-checkpointing full"
                + " --trainer.expert-balance least_loaded" * (candidate.expert_balance != trainer.expert_balance)
                + f" --trainer.optimizer-state {candidate.optimizer_state}"
                * (candidate.optimizer_state != trainer.optimizer_state)
                + " --trainer.enable-cpu-offload" * candidate.enable_cpu_offload
            )
            # A row's length that is open is chosen afterwards, from the memory that is left.
            return replace(candidate, seq_len=trainer.seq_len), candidate_memory, flags
    return trainer, rank_memory, ""
