"""Checks the parallel degrees of a trainer against its ranks and its model, before anything starts."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from forge_rl.engines.devices import device_type, gpus
from forge_rl.engines.lora_config import EXPERTS, HEAD, adapted_modules
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from forge_rl.engines.families.family import Architecture

_MIN_HEAD_DIM = 16
"""Smallest head dimension, of q and k or of v, for which FlexAttention has a kernel on CUDA."""


def least_ranks(settings: TrainSettings) -> int:
    """Return the smallest number of ranks that the parallel flags allow; its multiples also work."""
    # Expert-parallel ranks are the same ranks as the others of a copy, so only the least common multiple is needed.
    copies = settings.pipeline_parallel_degree * settings.data_parallel_replicate_degree
    return copies * math.lcm(settings.peers, settings.expert_parallel_degree)


def check_ranks(settings: TrainSettings, ranks: int) -> None:
    """Check that the parallel flags fit the number of ranks.

    Raises:
        ConfigError: they do not; names the flags and the numbers that work.
    """
    min_ranks = least_ranks(settings)
    if ranks % min_ranks:
        flags = [f"{_flag(name)} {value}" for name, value in settings.degrees.items() if value > 1]
        raise ConfigError(
            f"{ranks} ranks do not fit {' '.join(flags)}",
            hint=f"set --trainer.ranks to {min_ranks} or a multiple of it, or leave it out",
        )


def check_model(settings: TrainSettings, ranks: int, architecture: Architecture) -> None:
    """Check that the parallel flags fit the model, and that a machine with GPUs has enough of them.

    Raises:
        ConfigError: they do not; names the flags and the numbers that work.
        ModelError: attention has no kernel for the model's heads on GPUs.
    """
    if device_type() == "cuda":
        _check_heads(architecture)
    # Each check names one flag: a layout must be refused here, not by a rank after all have started.
    a = architecture
    if a.family.general:
        _check_general(settings, a)
    else:
        heads = {"heads": a.heads, "key heads": a.kv_heads}
        _divides("tensor_parallel_degree", settings.tensor_parallel_degree, heads)
    if settings.pipeline_parallel_degree > a.layers:
        raise ConfigError(
            f"--trainer.pipeline-parallel-degree is {settings.pipeline_parallel_degree}, and the model has {a.layers} "
            "layers",
            hint=f"set --trainer.pipeline-parallel-degree to {a.layers} or less",
        )
    if settings.expert_parallel_degree > 1 and a.experts is None:
        raise ConfigError(
            f"--trainer.expert-parallel-degree is {settings.expert_parallel_degree}, and the model has no experts",
            hint="leave --trainer.expert-parallel-degree out",
        )
    if settings.context_parallel_load_balancer not in ("auto", "none") and settings.context_parallel_degree == 1:
        raise ConfigError(
            f"--trainer.context-parallel-load-balancer is {settings.context_parallel_load_balancer}, and each rank has "
            "whole rows",
            hint="set --trainer.context-parallel-degree, or leave --trainer.context-parallel-load-balancer out",
        )
    if settings.router_replay and a.experts is None:
        raise ConfigError(
            "--trainer.router-replay is set, and the model has no experts", hint="leave --trainer.router-replay out"
        )
    if settings.expert_balance == "bias" and not (a.experts and a.experts.steered):
        raise ConfigError(
            "--trainer.expert-balance is bias, and the model has no biases in its choice of experts",
            hint="choose least_loaded; DeepSeek-V3 has such biases",
        )
    if settings.expert_balance == "least_loaded" and settings.expert_parallel_degree == 1:
        raise ConfigError(
            "--trainer.expert-balance is least_loaded, and each rank has all experts",
            hint="set --trainer.expert-parallel-degree, or leave --trainer.expert-balance out",
        )
    if settings.prefix_states != "shared" and not _has_branching_states(a):
        raise ConfigError(
            f"--trainer.prefix-states is {settings.prefix_states}, and no layer of a {a.family.model_type!r} has a "
            "state that branches could share",
            hint="leave --trainer.prefix-states out",
        )
    _check_lora(settings, a)
    if a.experts is not None:
        _divides("expert_parallel_degree", settings.expert_parallel_degree, {"experts in a layer": a.experts.count})
    if 0 < gpus() < ranks:
        raise ConfigError(
            f"{ranks} ranks need a GPU each, and this machine has {gpus()}",
            hint=f"set --trainer.ranks to {gpus()} or less, and lower the parallel flags to match",
        )


def _check_heads(architecture: Architecture) -> None:
    """Raise ModelError if a model has heads for which FlexAttention has no kernel."""
    dim, name = min(_head_dims(architecture)), architecture.family.model_type
    if dim < _MIN_HEAD_DIM:
        raise ModelError(
            f"a {name!r} with heads of {dim}: on GPUs, FlexAttention has no kernel for heads smaller than "
            f"{_MIN_HEAD_DIM}",
            hint="use a model with larger heads, or train on CPU",
        )


def _head_dims(architecture: Architecture) -> set[int]:
    """Return the head dimensions of all layers, of q and k and of v."""
    a = architecture
    if a.folder is None:
        return {a.head_dim, a.latent.value_dim if a.latent else a.head_dim}
    from forge_rl.engines.families.transformers_model import inspected_model  # imports transformers

    dims = set[int]()
    for module in inspected_model(a.folder).model.layers.modules():
        # Not `head_dim` alone, which Mamba 2's layers have too. With latent attention it is missing, or that of RoPE.
        head_dim = getattr(module, "head_dim", None) if hasattr(module, "is_causal") else None
        qk_dim = getattr(module, "qk_head_dim", None) or head_dim
        dims |= {dim for dim in (qk_dim, getattr(module, "v_head_dim", None)) if type(dim) is int}
    return dims or {a.head_dim}


def _check_general(settings: TrainSettings, architecture: Architecture) -> None:
    """Raise ConfigError for settings that a model on transformers' code does not support."""
    a, name = architecture, architecture.family.model_type
    degrees = [f"{kind}_parallel_degree" for kind in ("context", "pipeline")]
    if flags := [f"{_flag(field)} {getattr(settings, field)}" for field in degrees if getattr(settings, field) > 1]:
        raise ConfigError(
            f"{' '.join(flags)}: a {name!r} on transformers' code is laid out by {', '.join(general_layouts(a))}",
            hint=f"leave {' and '.join(flag.split()[0] for flag in flags)} out; more --trainer.ranks shard its state",
        )
    # Whether it works depends on the model's own plan in transformers.
    if settings.tensor_parallel_degree > 1:
        _check_tensor_plan(settings, architecture)
    if settings.expert_parallel_degree > 1:
        _check_experts(settings, architecture)
    if settings.expert_balance != "plain":
        flag = _flag("expert_balance")
        raise ConfigError(
            f"{flag} is set, which a {name!r} on transformers' code does not support", hint=f"leave {flag} out"
        )
    if settings.router_replay and architecture.experts is None:
        flag = _flag("router_replay")
        raise ConfigError(
            f"{flag} is set, and transformers' code of a {name!r} has no router of experts that the trainer knows",
            hint=f"leave {flag} out",
        )
    # LongRoPE chooses its angles by the longest position of a call, and a row is one call.
    original = architecture.rope.get("original_max_position_embeddings", math.inf)
    if architecture.rope["rope_type"] == "longrope" and settings.longest_row > float(original):
        raise ConfigError(
            f"rows of {settings.longest_row} tokens: an episode longer than {original} makes a {name!r} rotate the "
            "whole row by other angles",
            hint=f"set --trainer.seq-len to {original} or less",
        )


def general_layouts(architecture: Architecture) -> list[str]:
    """List the supported layouts of a model on transformers' code."""
    from forge_rl.engines.families.tensor_plan import expert_modules, module_styles
    from forge_rl.engines.families.transformers_model import inspected_model  # imports transformers

    assert architecture.folder is not None, "read_general gives it"
    causal, layouts = inspected_model(architecture.folder), ["FSDP", "HSDP"]
    with contextlib.suppress(LookupError):
        module_styles(causal)
        layouts.append("TP")
    return [*layouts, "EP"] if architecture.experts and expert_modules(causal) else layouts


def _check_tensor_plan(settings: TrainSettings, architecture: Architecture) -> None:
    """Raise ConfigError unless tensor-parallel ranks can share a model on transformers' code."""
    from forge_rl.engines.families.tensor_plan import uneven_part
    from forge_rl.engines.families.transformers_model import inspected_model  # imports transformers

    assert architecture.folder is not None, "read_general gives it"
    ranks, name = settings.tensor_parallel_degree, architecture.family.model_type
    flag = _flag("tensor_parallel_degree")
    try:
        part = uneven_part(inspected_model(architecture.folder), ranks)
    except LookupError as error:
        raise ConfigError(
            f"{flag} {ranks}: of a {name!r}, {error.args[0]}",
            hint=f"leave {flag} out; more --trainer.ranks shard its state, and HSDP keeps several copies of it",
        ) from error
    if part is not None:
        raise ConfigError(
            f"{flag} is {ranks}, which does not divide the {part} in a {name!r}",
            hint=f"set {flag} to a number that does, or leave it out",
        )


def _check_experts(settings: TrainSettings, architecture: Architecture) -> None:
    """Raise ConfigError unless ranks can each compute some experts of a model on transformers' code."""
    from forge_rl.engines.families.tensor_plan import expert_modules
    from forge_rl.engines.families.transformers_model import inspected_model  # imports transformers

    assert architecture.folder is not None, "read_general gives it"
    flag, name = _flag("expert_parallel_degree"), architecture.family.model_type
    if settings.tensor_parallel_degree > 1:
        raise ConfigError(
            f"{flag} {settings.expert_parallel_degree}: tensor-parallel ranks share the experts of a {name!r} already",
            hint=f"leave out {flag}, or {_flag('tensor_parallel_degree')}",
        )
    if not architecture.experts or not expert_modules(inspected_model(architecture.folder)):
        raise ConfigError(
            f"{flag} {settings.expert_parallel_degree}: a {name!r} on transformers' code has no experts that can be on "
            "several ranks",
            hint=f"leave {flag} out; more --trainer.ranks shard its state",
        )


def _check_lora(settings: TrainSettings, architecture: Architecture) -> None:
    """Raise ConfigError for adapters that the model or the layout does not support."""
    lora = settings.lora
    if not lora.rank:
        return
    adapted_modules(architecture, lora)
    if settings.pipeline_parallel_degree > 1:
        raise ConfigError(
            f"--lora.rank {lora.rank} trains adapters, which pipeline stages do not have",
            hint="leave out --trainer.pipeline-parallel-degree: FSDP, HSDP, TP, CP and EP work",
        )
    # From here on, combinations that work separately but not together.
    is_split = settings.tensor_parallel_degree > 1
    if lora.base_format != "full" and _has_experts(architecture):
        raise ConfigError(
            f"--lora.base-format {lora.base_format}: a {architecture.family.model_type!r} has experts, whose stacked "
            "matrices are held in the dtype of the passes alone",
            hint="leave it out: the base is then in --trainer.dtype",
        )
    if lora.base_format != "full" and is_split:
        raise ConfigError(
            f"--lora.base-format {lora.base_format}: tensor-parallel ranks would split the rows that share a scale",
            hint="leave out --trainer.tensor-parallel-degree: FSDP, HSDP and CP work",
        )
    if (
        EXPERTS in lora.targets
        and is_split
        and settings.expert_parallel_degree == 1
        and not architecture.family.general
    ):
        raise ConfigError(
            f"--lora.targets {EXPERTS}: adapters of experts need whole experts, and tensor-parallel ranks split each",
            hint="set --trainer.expert-parallel-degree too: each rank then has some of the experts, whole",
        )
    if HEAD in lora.targets and is_split and architecture.family.general:
        raise ConfigError(
            f"--lora.targets {HEAD}: tensor-parallel ranks on transformers' code have no adapter of the head",
            hint=f"leave out {HEAD} or --trainer.tensor-parallel-degree: FSDP, HSDP and EP work",
        )
    if settings.frozen:
        raise ConfigError(
            f"--trainer.frozen {settings.frozen[0]} has no effect: with --lora.rank all weights are frozen",
            hint="leave out --trainer.frozen, and name the modules to adapt with --lora.targets",
        )
    if settings.expert_balance == "bias":
        raise ConfigError(
            "--trainer.expert-balance bias moves biases of the model, all of whose weights are frozen with --lora.rank",
            hint="leave out --trainer.expert-balance",
        )
    if lora.dropout and settings.peers > 1:
        raise ConfigError(
            f"--lora.dropout {lora.dropout:g} needs whole rows on each rank",
            hint="leave it out, or leave out --trainer.tensor-parallel-degree and --trainer.context-parallel-degree",
        )
    if lora.dropout and not _sees_whole_rows(architecture):
        raise ConfigError(
            f"--lora.dropout {lora.dropout:g} needs whole rows in each layer, and layers with a state in a "
            f"{architecture.family.model_type!r} see one episode at a time",
            hint="leave it out",
        )


def _has_branching_states(architecture: Architecture) -> bool:
    """Return whether layers have a state that branches could share; convolutions do not count."""
    from forge_rl.engines.families.general import has_states  # imports transformers

    return architecture.folder is not None and has_states(architecture.folder, convolutions=False)


def _has_experts(architecture: Architecture) -> bool:
    """Return whether a model has experts, even if their routers are of an unknown kind."""
    if architecture.experts is not None or architecture.folder is None:
        return architecture.experts is not None
    from forge_rl.engines.families.general import has_experts  # imports transformers

    return has_experts(architecture.folder)


def _sees_whole_rows(architecture: Architecture) -> bool:
    from forge_rl.engines.families.general import sees_whole_rows  # imports transformers

    return architecture.folder is None or sees_whole_rows(architecture.folder)


def _divides(field: str, degree: int, counts: dict[str, int]) -> None:
    """Raise ConfigError if a degree does not divide all of the model's counts."""
    if any(count % degree for count in counts.values()):
        common = math.gcd(*counts.values())
        divisors = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            f"{_flag(field)} is {degree}, and the model has "
            + " and ".join(f"{count} {name}" for name, count in counts.items()),
            hint=f"set {_flag(field)} to "
            + " or ".join([", ".join(divisors[:-1]), divisors[-1]] if divisors[1:] else divisors),
        )


def _flag(field: str) -> str:
    return "--trainer." + field.replace("_", "-")
