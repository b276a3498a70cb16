"""Builds a torchtitan model from a Hugging Face folder: Llama and Qwen3 families, with attention over packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, create_attention_mask
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from forge_rl.algorithms import token_logprobs
from forge_rl.data.packing import Row, attends
from forge_rl.engines.architecture import Architecture
from forge_rl.engines.platform import device_type
from forge_rl.engines.titan.attention import TreeMask, attend_trees, tree_masks

_LOADED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"weight": skip_param_init}
"""No initialisation: every weight is read from the folder."""


HEAD_CHUNK_BYTES = 128 << 20
"""Most bytes of the logits that are held at a time, and as many again of their gradient."""


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
    inner = FlexAttention.Config() if device_type() == "cuda" else TreeAttention.Config()
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


def attention_mask(row: Row) -> tuple[TreeMask, ...] | BlockMask:
    """Return a packed row's mask as the model's attention takes it: that of each tree on CPU, else blocks."""
    if row.trees.device.type == "cpu":
        return tree_masks(row, slice(0, len(row)))

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return attends(row.trees, row.branches, q, k)

    return create_attention_mask(mask_mod, 1, None, len(row), len(row), device=str(row.trees.device))


class TreeAttention(Module):
    """Attention by the CPU's fused kernel, tree by tree: FlexAttention has no backward there."""

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
        attention_masks: tuple[TreeMask, ...],
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """q, k, v and the result are [1, L, heads, head_dim]; attention_masks are of L tokens in all."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend_trees(q, k, v, attention_masks, scale).transpose(1, 2)


class FloatHead(Linear):
    """Output projection in float32 whatever the model's format, as in the engine: logits of 20 rounded to bfloat16
    would be off by up to 0.06."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Project [..., dim] to float32 [..., V]; or score `targets` from [N, dim], see `token_logprobs`.

        Scores of many targets go chunk by chunk, whose logits are computed again for the backward pass, so that [N, V]
        is never held.
        """
        if targets is None:
            return self._logits(hidden)

        def score(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return token_logprobs(self._logits(hidden), targets, temperature)

        tokens = max(1, HEAD_CHUNK_BYTES // (4 * self.weight.shape[0]))
        if len(targets) <= tokens:
            return score(hidden, targets)
        chunks = zip(hidden.split(tokens), targets.split(tokens), strict=True)
        scored = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        logprobs, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))
        return logprobs, entropy

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cuda and hidden.dtype != torch.float32:
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits: torch.Tensor = _FloatProduct.apply(flat, self.weight)
            return logits.view(*hidden.shape[:-1], -1)
        return nn.functional.linear(hidden.float(), self.weight.float())


class _FloatProduct(torch.autograd.Function):
    """Product of two bfloat16 matrices on CUDA whose float32 sums are kept as they are, as vLLM's head does there.

    The gradient of the logits is rounded to bfloat16, as in any layer of the model.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[N, dim] and [V, dim] to float32 [N, V]."""
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        return grad.mm(weight), grad.t().mm(hidden) if ctx.needs_input_grad[1] else None


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
