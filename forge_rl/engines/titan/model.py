"""Builds torchtitan models from architectures, with forge_rl's own attention over packed rows and RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.gpt_oss.moe import ScaleBiasForward

from forge_rl.algorithms import widened
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.platform import device_type
from forge_rl.engines.titan.cpu_attention import TreeMask, attend_trees
from forge_rl.engines.titan.head import FloatHead
from forge_rl.engines.titan.moe import moe_config
from forge_rl.engines.titan.pointwise import LeanRMSNorm, rotate
from forge_rl.engines.titan.routing import routers

LOADED = dict.fromkeys(("weight", "bias"), skip_param_init)
"""No initialisation: every weight is read from the folder."""


def build_model(
    architecture: Architecture,
    *,
    max_positions: int,
    sequence_parallel: bool = False,
    expert_parallel: bool = False,
) -> Decoder:
    """Build the torchtitan model on the current default device, without weights, ready to be parallelised.

    Args:
        max_positions: maximum sequence length in tokens, for the RoPE cache.
        sequence_parallel: with tensor parallelism, shard activations between the layers' matrices.
        expert_parallel: shard whole experts over ranks instead of splitting each.
    """
    titan = architecture.family.titan()
    config = titan.model_config(architecture, min(architecture.max_positions, max_positions))
    titan.set_sharding(config, enable_sp=sequence_parallel, enable_ep=expert_parallel)
    model = cast(Decoder, config.build())
    model.names = architecture.family.names
    for number, layer in model.layers.items():
        for router in routers(layer):
            router.layer = int(number)
    return model


def gqa_decoder(
    architecture: Architecture,
    max_positions: int,
    *,
    model: Any,
    block: Any,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> Any:
    """Make the `Config` of a model with grouped-query attention, with experts if the architecture has them.

    q and k use Hugging Face's rotate-half order in every family (torchtitan's own Llama uses adjacent pairs), so that
    weights/names.py only renames.

    Args:
        max_positions: length of the RoPE cache, in tokens.
        model: torchtitan's model class.
        block: torchtitan's layer class.
        qk_norm: normalise q and k of each head.
        qkv_bias: add a bias to q, k and v.
    """
    a = architecture

    def layer(index: int) -> Any:
        attention = make_gqa_config(
            dim=a.dim,
            n_heads=a.heads,
            n_kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            wqkv_param_init=LOADED,
            wo_param_init=LOADED,
            inner_attention=inner_attention(),
            rope=half_rope(a, max_positions),
            qk_norm=norm(a, a.head_dim) if qk_norm else None,
        )
        attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = qkv_bias
        return block.Config(
            attention_norm=norm(a, a.dim), ffn_norm=norm(a, a.dim), attention=attention, **network(a, index)
        )

    return decoder(a, model, [layer(index) for index in range(a.layers)])


def decoder(architecture: Architecture, model: Any, layers: list[Any]) -> Any:
    """Make the `Config` of a torchtitan model class from its layers' configs."""
    a = architecture
    return model.Config(
        dim=a.dim,
        vocab_size=a.vocab,
        enable_weight_tying=a.tied,
        tok_embeddings=Embedding.Config(num_embeddings=a.vocab, embedding_dim=a.dim, param_init=LOADED),
        norm=norm(a, a.dim),
        lm_head=FloatHead.Config(in_features=a.dim, out_features=a.vocab, param_init=LOADED),
        layers=layers,
    )


def network(architecture: Architecture, layer: int) -> dict[str, Any]:
    """Make the `Config` of a layer's feed-forward network or experts, keyed by field name."""
    a = architecture
    if a.experts is not None and layer in a.experts.layers:
        return {"moe": moe_config(a.experts, a.dim)}
    dense = make_ffn_config(dim=a.dim, hidden_dim=a.hidden_dim, w1_param_init=LOADED, w2w3_param_init=LOADED)
    return {"feed_forward": dense}


def inner_attention() -> Any:
    """Make the `Config` of this device's attention kernel."""
    return FlexAttention.Config() if device_type() == "cuda" else TreeAttention.Config()


def norm(architecture: Architecture, dim: int) -> Any:
    """Make the `Config` of an RMSNorm over `dim` elements."""
    return LeanRMSNorm.Config(normalized_shape=dim, eps=architecture.norm_eps, param_init=LOADED)


def half_rope(architecture: Architecture, max_positions: int) -> Any:
    """Make the `Config` of RoPE in rotate-half order, scaled as the architecture says."""
    return HalfRoPE.Config(dim=architecture.head_dim, **rope_fields(architecture, max_positions))


def rope_fields(architecture: Architecture, max_positions: int) -> dict[str, Any]:
    """Return the fields of a RoPE `Config` other than its dimension, by name."""
    rope: Mapping[str, Any] = architecture.rope
    fields: dict[str, Any] = {"max_seq_len": max_positions, "theta": float(rope["rope_theta"])}
    if rope["rope_type"] == "llama3":
        fields |= {
            "scaling": "llama",
            "scaling_factor": float(rope["factor"]),
            "low_freq_factor": float(rope["low_freq_factor"]),
            "high_freq_factor": float(rope["high_freq_factor"]),
            "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        }
    elif rope["rope_type"] == "yarn":
        fields |= {
            "scaling": "yarn",
            "rope_factor": float(rope["factor"]),
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "original_seq_len": int(rope["original_max_position_embeddings"]),
            "truncate": bool(rope.get("truncate", True)),
        }
    return fields


class TreeAttention(FlexAttention):
    """Attention tree by tree with the CPU's fused kernel, as FlexAttention has no backward on CPU.

    A subclass of FlexAttention so that torchtitan's context parallelism gathers a row's keys before it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: tuple[TreeMask, ...],
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """q, k, v and the result are [1, L, heads, head_dim]; there may be fewer queries than keys.

        `out_transform` maps the attention output and the scores' logsumexp, [1, L, heads], to the result, as in
        torchtitan's FlexAttention.
        """
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))  # torchtitan's shardings use these names
        out, sums = (x.transpose(1, 2) for x in attend_trees(q, k, v, attention_masks, scale))
        return out if out_transform is None else out_transform(out, sums)


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """Row-parallel linear layer with a bias, of which each tensor-parallel rank adds its share.

    The bias gets the full gradient, which torchtitan 0.3 would divide by the number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project a rank's part of [..., inputs] to its partial sum of [..., outputs]."""
        weight, bias = (each.to_local() if isinstance(each, DTensor) else each for each in (self.weight, self.bias))
        return nn.functional.linear(input, weight, ScaleBiasForward.apply(bias, self.tp_degree, input.dtype))


class PairRoPE(ComplexRoPE):
    """torchtitan's RoPE over adjacent pairs, without rounding float64."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions."""

        def turned(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(widened(x).reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * rope_cache).flatten(3).type_as(x)

        return turned(query), turned(key)


class HalfRoPE(CosSinRoPE):
    """torchtitan's rotate-half RoPE, with Llama 3's frequency scaling, which it lacks."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        if config.scaling != "llama":
            cache: torch.Tensor = super()._precompute_cache()
            return cache
        frequencies = self._scale(1.0 / config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        angles = torch.outer(torch.arange(config.max_seq_len).float(), frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions, in fewer passes over memory than torchtitan."""
        cache = rope_cache.to_local() if isinstance(rope_cache, DTensor) else rope_cache

        def turned(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor):
                return rotate(x, cache)
            return DTensor.from_local(rotate(x.to_local(), cache), x.device_mesh, x.placements, run_check=False)

        return turned(query), turned(key)

    def _scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scale as Llama 3.1: stretch long wavelengths, keep short ones, interpolate in between."""
        factor, low, high = self.config.scaling_factor, self.config.low_freq_factor, self.config.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        smooth = (self.config.original_max_position_embeddings / wavelengths - low) / (high - low)
        smooth = smooth.clamp(0, 1)
        scaled: torch.Tensor = (1 - smooth) * frequencies / factor + smooth * frequencies
        return scaled
