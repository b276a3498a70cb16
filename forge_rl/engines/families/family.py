"""Defines model families and reads architectures from config.json, without torchtitan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from forge_rl.errors import ModelError
from forge_rl.models.quantized import refusal
from forge_rl.weights.names import Names, SameNames

_AGAIN = "download or export the model again"
_SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""RoPE types, with the parameters that each needs."""


SCALES = ("attention_factor", "mscale", "mscale_all_dim")
"""Parameters of YaRN that change the factor on attention scores; without them, it is 0.1 ln(factor) + 1."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: reads config.json, names the weights and has torchtitan build the model.

    Each family is a file of this package and a line in its `FAMILIES`.
    """

    model_type: str
    """model_type in config.json."""
    read: Callable[[ConfigFile], Architecture]
    """Reads config.json; raises ModelError for options that the trainer does not support."""
    names: Names | SameNames
    """Names of the weights."""
    layer: Callable[[Architecture, int, int], Any]
    """Makes torchtitan's `Config` of a layer from the architecture, the layer's index, and the maximum sequence length
    in tokens. Like set_sharding, it imports torchtitan and is only called in trainer processes."""
    set_sharding: Callable[..., None]
    """torchtitan's `set_*_sharding_config(config, *, enable_sp, enable_ep)`, called before the model is built."""
    general: bool = False
    """True if transformers' own code computes the model, see `families.general`; `layer` and `set_sharding` are then
    never called."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture-of-experts dimensions and routing."""

    layers: tuple[int, ...]
    """Indices of the layers with experts; the others are dense."""
    count: int
    """Experts per layer."""
    top_k: int
    """Experts per token."""
    hidden_dim: int
    normalized: bool
    """True if a token's gate weights are normalised to add up to 1."""
    limit: float | None = None
    """Clamp limit of SwiGLU; None for no clamping."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores."""
    scale: float = 1.0
    """Factor on a token's gate weights."""
    groups: int = 1
    """Number of equal groups that the experts form."""
    top_groups: int = 1
    """Groups from which a token's experts are chosen."""
    steered: bool = False
    """True if an untrained bias is added to the scores when experts are chosen."""
    shared_dim: int = 0
    """Hidden dimension of the shared expert, which processes every token; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Dimensions of multi-head latent attention."""

    q_rank: int
    """Rank of the q projection; 0 if it is a single matrix."""
    kv_rank: int
    nope_dim: int
    """Dimension per head of q and k without RoPE."""
    rope_dim: int
    """Dimension with RoPE: of each head's q, and of the k that all heads share."""
    value_dim: int
    """Dimension of v per head."""
    interleaved: bool
    """True if RoPE rotates adjacent pairs, False if it pairs the two halves."""

    def weights(self, dim: int, heads: int) -> int:
        """Number of weights in a layer's matrices."""
        qk = heads * (self.nope_dim + self.rope_dim)
        q = self.q_rank * (dim + qk) if self.q_rank else dim * qk
        kv = dim * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return q + kv + heads * self.value_dim * dim


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Dimensions in a Hugging Face config.json."""

    family: Family
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_dim: int
    """Hidden dimension of the feed-forward network in a dense layer."""
    vocab: int
    norm_eps: float
    max_positions: int
    rope: Mapping[str, float | str | bool]
    tied: bool
    """True if the input embedding is also the output projection."""
    untied_by_files: bool = False
    """True if config.json ties the two, but the files hold an output projection that differs."""
    experts: Experts | None = None
    """None if every layer is dense."""
    latent: LatentAttention | None = None
    """None without latent attention."""
    window: int | None = None
    """Sliding window in tokens, including the query's own; None if no layer has one."""
    window_layers: tuple[int, ...] = ()
    """Indices of the layers with sliding-window attention."""
    predicting_layers: int = 0
    """Multi-token-prediction layers after the last one, which are not trained."""
    quantized: bool = False
    """True if the folder holds quantised weights, which are dequantised."""
    weight_count: int = 0
    """Number of weights if these dimensions do not determine it; 0 if they do."""
    folder: Path | None = None
    """Folder of a model that transformers' code builds; None for native families."""

    @property
    def weights(self) -> int:
        """Number of weights in the matrices."""
        if self.weight_count:
            return self.weight_count
        # q and o have all heads, k and v the key heads.
        grouped = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        attention = self.latent.weights(self.dim, self.heads) if self.latent else grouped
        embeddings = self.vocab * self.dim * (1 if self.tied else 2)
        sparse = len(self.experts.layers) if self.experts else 0
        network = 3 * self.dim * self.hidden_dim
        mixture = 0
        if self.experts:
            # Router and three matrices of each expert.
            mixture = self.experts.count * self.dim * (1 + 3 * self.experts.hidden_dim)
            mixture += 3 * self.dim * self.experts.shared_dim
        return self.layers * attention + (self.layers - sparse) * network + sparse * mixture + embeddings


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A config.json whose values are validated when read: methods raise ModelError for invalid values."""

    path: Path
    values: Mapping[str, Any]
    family: Family

    def whole(self, name: str, default: int = 0, *, max_value: int = 2**31 - 1) -> int:
        """Read a positive integer; a default of 0 makes it required."""
        value = self.values.get(name) or default
        # By `type`, as true is an int in Python.
        if type(value) is not int or not 0 < value <= max_value:
            problem = (
                "not a whole number above 0" if max_value == 2**31 - 1 else f"not a whole number from 1 to {max_value}"
            )
            raise self.wrong(name, problem, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number, required without a default."""
        return self._number(name, {name: default, **self.values})

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.whole("num_hidden_layers", max_value=10_000)

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of RoPE, under their names in newer files."""
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(self.values.get(name) or {}, dict):
                raise self.wrong(name, "not an object")
        # Older files have rope_scaling, rope_theta and "type"; newer ones have all of it in rope_parameters, which win.
        rope = {**(self.values.get("rope_scaling") or {}), **(self.values.get("rope_parameters") or {})}
        rope.setdefault("rope_theta", self.values.get("rope_theta", 10000.0))
        rope.setdefault("rope_type", rope.pop("type", "default"))
        return rope

    def layer_set(self, name: str) -> frozenset[int]:
        """Read a list of layer indices; empty if absent."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or any(type(layer) is not int for layer in value):
            raise self.wrong(name, "not a list of layers")
        return frozenset(value)

    def need(self, *names: str) -> None:
        """Raise ModelError unless config.json has all of these."""
        if missing_names := [name for name in names if name not in self.values]:
            raise ModelError(f"{self.path} lacks {', '.join(missing_names)}", hint=_AGAIN)

    def wrong(self, name: str, problem: str, value: object = None) -> ModelError:
        """Make the error for an invalid value, by default the one in the file."""
        value = self.values.get(name) if value is None else value
        return ModelError(f"{self.path}: {name} is {value!r:.80}, {problem}", hint=_AGAIN)

    def architecture(
        self,
        *,
        unsupported: Mapping[str, bool] | None = None,
        rope_types: Collection[str] = tuple(_SCALING),
        scales: Collection[str] = (),
        **fields: Any,
    ) -> Architecture:
        """Read the values that all families share.

        Args:
            unsupported: unsupported options by name, True if config.json sets them; extends or overrides the list of
                options that no family supports.
            rope_types: RoPE types that the family supports.
            scales: the parameters in SCALES that the family supports.
            fields: fields of Architecture that the family reads itself.
        """
        values, rope = self.values, self.rope
        partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
        # Refused rather than ignored: the trainer would compute another model than engines serve.
        unsupported_options = {
            "attention_bias": bool(values.get("attention_bias")),
            "mlp_bias": bool(values.get("mlp_bias")),
            "use_sliding_window": bool(values.get("use_sliding_window")),
            # Of families without that switch, vLLM uses a window that transformers ignores.
            "sliding_window": bool(values.get("sliding_window")) and not self.family.model_type.startswith("qwen"),
            f"hidden_act {values.get('hidden_act')!r}": values.get("hidden_act", "silu") != "silu",
            f"rope_type {rope['rope_type']!r:.80}": rope["rope_type"] not in rope_types,
            f"partial_rotary_factor {partial!r:.80}": partial not in (None, 1),
            "dual_chunk_attention_config": bool(values.get("dual_chunk_attention_config")),
            **{f"YaRN with {name}": rope.get(name) is not None for name in SCALES if name not in scales},
            **(unsupported or {}),
        }
        unsupported_format = refusal(values.get("quantization_config"), self.family.model_type)
        if unsupported_format:
            raise ModelError(
                f"{self.path} asks for {unsupported_format}, which the trainer cannot read",
                hint="use the model's bfloat16 files: usually the same name without AWQ, GPTQ, FP8 or 4bit",
            )
        if option_names := [name for name, is_set in unsupported_options.items() if is_set]:
            raise ModelError(
                f"{self.path} asks for {', '.join(option_names)}, which the trainer does not support",
                hint=f"use a model of the plain {self.family.model_type!r} architecture, or train on transformers' own "
                "code: --trainer.modelling transformers",
            )
        self.need("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
        self.need("max_position_embeddings", "intermediate_size")
        self._check_dtype()
        for name in ("rope_theta", *_SCALING[rope["rope_type"]]):
            self._number(name, rope)
        heads, dim = self.whole("num_attention_heads"), self.whole("hidden_size")
        # Families whose heads have parts, such as latent attention, compute it themselves.
        if "head_dim" not in fields:
            fields["head_dim"] = self.whole("head_dim", dim // heads)
        has_predicting_layers = bool(values.get("num_nextn_predict_layers"))
        return Architecture(
            family=self.family,
            dim=dim,
            layers=self.layers,
            heads=heads,
            kv_heads=self.whole("num_key_value_heads", heads),
            hidden_dim=self.whole("intermediate_size"),
            vocab=self.whole("vocab_size"),
            norm_eps=self.number("rms_norm_eps"),
            max_positions=self.whole("max_position_embeddings"),
            rope=rope,
            tied=bool(values.get("tie_word_embeddings")),
            predicting_layers=self.whole("num_nextn_predict_layers", max_value=100) if has_predicting_layers else 0,
            quantized=bool(values.get("quantization_config")),
            **fields,
        )

    def _check_dtype(self) -> None:
        """Refuse a name that is not a float dtype: transformers and vLLM would look it up in torch and find something
        else."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16"
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelError(f"{self.path} is of dtype {name!r}", hint='set its "dtype" to "bfloat16" or "float32"')

    def _number(self, name: str, values: Mapping[str, object]) -> float:
        value = values.get(name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.path}: {name} is {value!r:.80}, not a number above 0", hint=_AGAIN)
        return value
