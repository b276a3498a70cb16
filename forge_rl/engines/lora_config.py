"""Settings of LoRA, and the modules of a model that can have adapters. Does not import torchtitan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Operational
from forge_rl.models.base_formats import stored_bytes

if TYPE_CHECKING:
    from forge_rl.engines.families.family import Architecture
    from forge_rl.engines.families.general import LinearModule
    from forge_rl.weights.names import Names

LR_FACTOR = 10.0
"""Ratio of the best learning rate of adapters to the best one of full training, about the same over models, ranks and
tasks: Schulman et al., "LoRA Without Regret" (Thinking Machines Lab, 2025)."""
ALL_LINEAR = "all-linear"
"""Target for every linear layer in the model's layers that can have an adapter."""
HEAD, EXPERTS = "lm_head", "experts"
"""Targets besides linear layers: the output head, and all expert networks."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA: train low-rank adapters of some matrices instead of all weights.

    A matrix W, [outputs, inputs], acts as W + scale B A, with A [rank, inputs] and B [outputs, rank], which starts at 0
    (Hu et al., arXiv:2106.09685).

    LoRAConfig(rank=16, targets=("q_proj", "v_proj"))
    """

    rank: int = 0
    """Rank of the adapters; 0 trains all weights. Adapters learn with a higher learning rate than weights: without
    --trainer.optimizer.lr it is ten times the recipe's."""
    alpha: float = 32.0
    """Numerator of the scale: B A is multiplied by alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Modules with adapters, by their names in the model's folder, such as q_proj v_proj. all-linear is every linear
    layer except the output head, and in models with experts every one in attention. experts is every expert network, at
    the rank divided by the number of experts that a token uses; lm_head is the output head."""
    rslora: bool = False
    """Divide by the root of the rank instead: the scale is alpha / sqrt(rank), as in rank-stabilised LoRA."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What A and B are rounded to, from the optimizer's float32 values, in the trainer's passes, versions and exports.
    Adapters by name are float32, as are versions and exports of a trainer that computes in float64."""
    base_format: Literal["full", "fp8", "nf4"] = "full"
    """How the trainer holds the frozen matrices of all linear layers except the head (QLoRA). full: in the dtype of its
    passes. fp8: float8_e4m3, with a scale for each output. nf4: 4-bit NormalFloat, with a scale for 64 inputs. Passes,
    versions, engines and merged folders have the values that these stand for."""
    publish: Operational[Literal["adapters", "merged"]] = "adapters"
    """What each version writes. adapters: A and B alone, which engines add to the base weights, written once. merged:
    the adapted weights, whole; always with --weights.mirror, whose readers know no adapters."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is set to 0 in updates; logprobs that are only computed have no dropout."""

    @property
    def scale(self) -> float:
        """Factor on B A of linear layers."""
        return self.scale_of(self.rank)

    def scale_of(self, rank: int) -> float:
        """Return the factor on B A of an adapter of a rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def expert_rank(self, active_experts: int) -> int:
        """Return the rank of each expert's adapter, so that a token meets about as many adapter weights as in a dense
        model (Schulman et al., "LoRA Without Regret", 2025).

        Args:
            active_experts: number of experts that a token uses.
        """
        return max(1, self.rank // active_experts)

    def __post_init__(self) -> None:
        check_flags(
            self, "--lora.", minimum={"rank": 0, "dropout": 0}, above={"alpha": 0}, below={"alpha": 1e9, "dropout": 1}
        )
        if not self.targets:
            raise ConfigError("--lora.targets names no module", hint=f"leave it out, or set {ALL_LINEAR}")

    def describe(self) -> str:
        """Describe the adapters in one line, for the start of a run."""
        root = "sqrt(rank)" if self.rslora else "rank"
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        experts = "; experts at the rank over the number a token uses" if EXPERTS in self.targets else ""
        base = "" if self.base_format == "full" else f", linear layers held in {self.base_format}"
        return (
            f"LoRA of rank {self.rank} on {' '.join(self.targets)}, scale alpha/{root} = {self.scale:g}"
            f"{dropout}{experts}: the model's own weights are frozen{base}"
        )


def linear_modules(architecture: Architecture) -> dict[str, str]:
    """Return Hugging Face's names, such as self_attn.q_proj, of the linear layers that can have adapters, by
    torchtitan's names, such as attention.qkv_linear.wq.

    In models with experts, only attention's layers can: peft takes gate_proj and the like for stacks of experts there,
    even in a dense layer. On transformers' code the keys are its own names, and a layer may lack some of the modules.
    """
    if architecture.family.general:
        return {module.name: module.file_name for module in _general_modules(architecture)}
    a, names = architecture, _layer_names(architecture)
    has_latent_q = a.latent is not None and a.latent.q_rank > 0
    # Latent attention has q either as one matrix or as a product of two.
    absent = {"attention.wq"} if has_latent_q else {"attention.wq_a", "attention.wq_b"}
    kinds = ("attention.",) if a.experts is not None else ("attention.", "feed_forward.")
    modules = {
        name.removesuffix(".weight"): hf_name.removesuffix(".weight")
        for name, hf_name in names.items()
        if name.startswith(kinds) and name.endswith(".weight") and "norm" not in name
    }
    return {name: hf_name for name, hf_name in modules.items() if name not in absent}


def adapted_modules(architecture: Architecture, lora: LoRAConfig) -> dict[str, str]:
    """Return the `linear_modules` that the targets match.

    Raises:
        ConfigError: a target names no module that can have an adapter.
    """
    modules = linear_modules(architecture)
    if EXPERTS in lora.targets:
        _check_experts(architecture, lora)
    if HEAD in lora.targets and architecture.tied:
        raise ConfigError(
            f"--lora.targets {HEAD}: the head of this {architecture.family.model_type!r} is the embedding, "
            "which has no adapter",
            hint=f"leave {HEAD} out, or untie them: tie_word_embeddings in config.json",
        )
    # Targets match whole parts of names from the end, as PEFT's target_modules do.
    targets = [target for target in lora.targets if target not in (HEAD, EXPERTS)]
    if ALL_LINEAR in targets:
        # all-linear includes them, so naming one as well is a mistake.
        unmatched_targets = [target for target in targets if target != ALL_LINEAR]
        matches = modules
    else:
        matches = {name: hf for name, hf in modules.items() if any(f".{hf}".endswith(f".{t}") for t in targets)}
        unmatched_targets = [t for t in targets if not any(f".{hf}".endswith(f".{t}") for hf in matches.values())]
    if unmatched_targets:
        raise ConfigError(
            f"--lora.targets {unmatched_targets[0]}: {_cause(architecture, unmatched_targets[0])}",
            hint=f"choose from {ALL_LINEAR} {' '.join(dict.fromkeys(hf.split('.')[-1] for hf in modules.values()))} "
            f"{EXPERTS} {HEAD}",
        )
    return matches


def check_shared_base(lora: LoRAConfig) -> None:
    """Raise ConfigError for targets or a quantised base that several adapters over one base do not support."""
    if lora.base_format != "full":
        raise ConfigError(
            f"--lora.base-format {lora.base_format}: several adapters by name act on the model's own weights, which "
            "engines read from its folder",
            hint=f"leave it out, or train one adapter with recipes.grpo --lora.rank {lora.rank}",
        )
    if targets := [target for target in (EXPERTS, HEAD) if target in lora.targets]:
        raise ConfigError(
            f"--lora.targets {targets[0]}: several adapters over one base adapt linear layers only",
            hint=f"leave out {targets[0]}, or train one adapter with recipes.grpo --lora.rank {lora.rank}",
        )


def _check_experts(architecture: Architecture, lora: LoRAConfig) -> None:
    """Raise ConfigError unless a model has experts that can have adapters."""
    a, name = architecture, architecture.family.model_type
    if a.experts is None or not _expert_features(a):
        raise ConfigError(
            f"--lora.targets {EXPERTS}: a {name!r} has no experts that can have adapters",
            hint=f"leave {EXPERTS} out: {ALL_LINEAR} works",
        )
    if lora.dropout:
        raise ConfigError(
            f"--lora.dropout {lora.dropout:g}: adapters of experts have no dropout, as in PEFT",
            hint=f"leave it out, or leave {EXPERTS} out of --lora.targets",
        )


def _expert_features(architecture: Architecture) -> int:
    """Return the sum of the inputs and outputs of all matrices of all experts; 0 if they cannot have adapters."""
    a = architecture
    if a.folder is not None:
        from forge_rl.engines.families.general import expert_features  # imports transformers

        return expert_features(a.folder)
    if a.experts is None:
        return 0
    return len(a.experts.layers) * a.experts.count * (2 * a.dim + 3 * a.experts.hidden_dim)


def adapter_parameters(architecture: Architecture, lora: LoRAConfig) -> int:
    """Count the parameters of a model's adapters; 0 without adapters."""
    if not lora.rank:
        return 0
    a, names = architecture, adapted_modules(architecture, lora)
    # rank * (inputs + outputs) for each matrix: A and B.
    extra = lora.rank * (a.dim + a.vocab) if HEAD in lora.targets else 0
    if EXPERTS in lora.targets and a.experts is not None:
        extra += lora.expert_rank(a.experts.top_k) * _expert_features(a)
    return extra + lora.rank * sum(inputs + outputs for name, inputs, outputs in _linear_sizes(a) if name in names)


def base_bytes(architecture: Architecture, lora: LoRAConfig, itemsize: int) -> int:
    """Return the bytes of the frozen weights.

    Args:
        itemsize: bytes of an element in the dtype of the passes.
    """
    a = architecture
    if lora.base_format == "full":
        return itemsize * a.weights
    # Linear layers are quantised; embedding, head, norms and biases stay in the passes' dtype.
    sizes = [(inputs, outputs) for _, inputs, outputs in _linear_sizes(a)]
    stored = sum(stored_bytes(lora.base_format, outputs, inputs) for inputs, outputs in sizes)
    return itemsize * (a.weights - sum(inputs * outputs for inputs, outputs in sizes)) + stored


def dequantized_bytes(architecture: Architecture, lora: LoRAConfig, itemsize: int) -> int:
    """Return the bytes of all matrices of a quantised base once dequantised; 0 if the base is not quantised.

    Args:
        itemsize: as for `base_bytes`.
    """
    if not lora.rank or lora.base_format == "full":
        return 0
    return itemsize * sum(inputs * outputs for _, inputs, outputs in _linear_sizes(architecture))


def _linear_sizes(architecture: Architecture) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of the `linear_modules` of all layers."""
    a, latent = architecture, architecture.latent
    if a.family.general:
        yield from ((module.name, module.inputs, module.outputs) for module in _general_modules(a))
        return
    # (inputs, outputs) by torchtitan's name, of all kinds of layers; `linear_modules` says which of them the model has.
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    sizes = {"attention.wo": (a.heads * latent.value_dim if latent else q, a.dim)}
    if latent is not None:
        sizes |= {"attention.wq": (a.dim, q), "attention.wq_a": (a.dim, latent.q_rank)}
        sizes |= {"attention.wq_b": (latent.q_rank, q)}
        sizes |= {"attention.wkv_a": (a.dim, latent.kv_rank + latent.rope_dim)}
        sizes |= {"attention.wkv_b": (latent.kv_rank, a.heads * (latent.nope_dim + latent.value_dim))}
    sizes |= {f"attention.qkv_linear.{name}": (a.dim, width) for name, width in (("wq", q), ("wk", kv), ("wv", kv))}
    sizes |= {"feed_forward.w1": (a.dim, a.hidden_dim), "feed_forward.w3": (a.dim, a.hidden_dim)}
    sizes |= {"feed_forward.w2": (a.hidden_dim, a.dim)}
    for _ in range(a.layers):
        yield from ((name, *sizes[name]) for name in linear_modules(a))


def _general_modules(architecture: Architecture) -> Iterable[LinearModule]:
    """List the modules of all layers of a model on transformers' code that can have adapters."""
    from forge_rl.engines.families.general import linear_modules as modules_of  # imports transformers

    assert architecture.folder is not None, "read_general gives it"
    return modules_of(architecture.folder)


def _layer_names(architecture: Architecture) -> Mapping[str, str]:
    """Return Hugging Face's name by torchtitan's of each weight of a layer; empty for a model on transformers' code."""
    names = architecture.family.names
    return {} if architecture.family.general else cast("Names", names).layer


def _cause(architecture: Architecture, target: str) -> str:
    """Say why a target has no adapter."""
    if any(f".{name}".endswith(f".{target}") for name in linear_modules(architecture).values()):
        return f"{ALL_LINEAR} includes it"
    if target in ("embed_tokens", "score"):
        return "embeddings and value heads have no adapters"
    if architecture.folder is not None:
        from forge_rl.engines.families.general import weight_shapes  # imports transformers

        if any(f".{target}." in name for name in weight_shapes(architecture.folder)):
            return "routers, what shares a name with experts, convolutions and Mamba's output have no adapters"
    layer_names = _layer_names(architecture)
    matches = [
        name for name, hf_name in layer_names.items() if f".{hf_name.removesuffix('.weight')}".endswith(f".{target}")
    ]
    if any(name.startswith("moe.router") for name in matches):
        return "routers have no adapters"
    if any(name.startswith(("moe", "feed_forward")) for name in matches) or EXPERTS in target:
        return f"in a model with experts only attention has adapters, and all experts together, as {EXPERTS}"
    return f"a {architecture.family.model_type} model has no such linear layer"
