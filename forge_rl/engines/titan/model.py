"""Builds a torchtitan model from a Hugging Face folder: Llama and Qwen3 families, with attention over packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from forge_rl.data.packing import Row, attends, dense_mask
from forge_rl.engines.architecture import Architecture
from forge_rl.engines.platform import device_type

_LOADED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"weight": skip_param_init}
"""No initialisation: every weight is read from the folder."""


def build_model(architecture: Architecture, *, max_positions: int) -> Decoder:
    """Build the torchtitan model, without weights, on the current default device.

    q and k use Hugging Face's rotate-half order in both families (torchtitan's own Llama uses adjacent pairs), so that
    weights/names.py only renames.

    `max_positions` is the longest sequence that will be seen, for the RoPE cache.
    """
    a = architecture

    def norm(dim: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=dim, eps=a.norm_eps, param_init=_LOADED)

    model_class, block_class = {
        "llama": (Llama3Model, Llama3TransformerBlock),
        "qwen3": (Qwen3Model, Qwen3TransformerBlock),
    }[a.family]
    inner = FlexAttention.Config() if device_type() == "cuda" else DenseMaskAttention.Config()
    rope = HalfRoPE.Config(
        dim=a.head_dim,
        max_seq_len=min(a.max_positions, max_positions),
        theta=float(a.rope["rope_theta"]),
        **_llama_scaling(a.rope),
    )
    layers = [
        block_class.Config(
            attention_norm=norm(a.dim),
            ffn_norm=norm(a.dim),
            attention=make_gqa_config(
                dim=a.dim,
                n_heads=a.heads,
                n_kv_heads=a.kv_heads,
                head_dim=a.head_dim,
                wqkv_param_init=_LOADED,
                wo_param_init=_LOADED,
                inner_attention=inner,
                rope=rope,
                qk_norm=norm(a.head_dim) if a.family == "qwen3" else None,
            ),
            feed_forward=make_ffn_config(
                dim=a.dim, hidden_dim=a.hidden_dim, w1_param_init=_LOADED, w2w3_param_init=_LOADED
            ),
        )
        for _ in range(a.layers)
    ]
    config = model_class.Config(
        dim=a.dim,
        vocab_size=a.vocab,
        enable_weight_tying=a.tied,
        tok_embeddings=Embedding.Config(num_embeddings=a.vocab, embedding_dim=a.dim, param_init=_LOADED),
        norm=norm(a.dim),
        lm_head=FloatHead.Config(in_features=a.dim, out_features=a.vocab, param_init=_LOADED),
        layers=layers,
    )
    return cast(Decoder, config.build())


def attention_mask(row: Row) -> torch.Tensor | BlockMask:
    """Return a packed row's mask as the model's attention takes it: [1, 1, L, L] bool on CPU, else blocks."""
    if row.trees.device.type == "cpu":
        return dense_mask(row)[None, None]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return attends(row.trees, row.branches, q, k)

    return create_block_mask(mask_mod, 1, None, len(row), len(row), device=str(row.trees.device))


class DenseMaskAttention(Module):
    """Attention by SDPA with a dense mask: FlexAttention has no backward on CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """q, k, v and the result are [1, L, heads, head_dim]; attention_masks is [1, 1, L, L] bool."""
        if enable_gqa:
            # The fused CPU kernel wants as many key heads as query heads; enable_gqa falls back to a slow one.
            repeats = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attention_masks, scale=scale
        )
        return out.transpose(1, 2)


class FloatHead(Linear):
    """Output projection in float32 whatever the model's format, as in the engine: logits of 20 rounded to bfloat16
    would be off by up to 0.06."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project [..., dim] to float32 [..., V]."""
        return nn.functional.linear(hidden.float(), self.weight.float())


class HalfRoPE(CosSinRoPE):
    """torchtitan's rotate-half RoPE, with Llama 3's frequency scaling, which it lacks."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        frequencies = 1.0 / config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)
        if config.scaling == "llama":
            frequencies = self._scale(frequencies)
        angles = torch.outer(torch.arange(config.max_seq_len).float(), frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def _scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scale as Llama 3.1 does: long wavelengths are stretched, short ones kept, those between interpolated."""
        factor, low, high = self.config.scaling_factor, self.config.low_freq_factor, self.config.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        smooth = (self.config.original_max_position_embeddings / wavelengths - low) / (high - low)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / factor + smooth * frequencies


def _llama_scaling(rope: Mapping[str, float | str]) -> dict[str, float | str]:
    if rope["rope_type"] != "llama3":
        return {}
    return {
        "scaling": "llama",
        "scaling_factor": float(rope["factor"]),
        "low_freq_factor": float(rope["low_freq_factor"]),
        "high_freq_factor": float(rope["high_freq_factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
    }
