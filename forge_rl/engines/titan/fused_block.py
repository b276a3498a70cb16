"""Decoder layer and its attention with a GPU's kernels between the products, see `block_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from forge_rl.engines.titan.block_kernels import add_norm, has_kernels, joint_linear, norm_rope


class FusedBlock(Qwen3TransformerBlock):
    """torchtitan's Qwen3 layer, which adds each residual together with the norm that follows it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Map [1, L, dim] to [1, L, dim]."""
        if not (has_kernels(x, "norms") and is_plain(self.attention_norm) and is_plain(self.ffn_norm)):
            plain: torch.Tensor = super().forward(x, attention_masks, positions)
            return plain
        x, normed = add_norm(x, None, self.attention_norm.weight, self.attention_norm.eps)
        attended = self.attention(normed, attention_masks, positions)
        x, normed = add_norm(x, attended, self.ffn_norm.weight, self.ffn_norm.eps)
        out: torch.Tensor = x + (self.moe(normed) if self.moe_enabled else self.feed_forward(normed))
        return out


class FusedAttention(GQAttention):
    """torchtitan's grouped-query attention, which normalises q and k while it rotates them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(self, x_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Map [1, L, dim] to [1, L, dim]."""
        norms = self.q_norm, self.k_norm
        if not has_kernels(x_BLD, "rope") or not all(norm is None or is_plain(norm) for norm in norms):
            plain: torch.Tensor = super().forward(x_BLD, attention_masks, positions)
            return plain
        q, k, v = self._projected(x_BLD)
        cache = self.rope._reshape_cache(q, positions)
        q, k = (
            norm_rope(x, None, cache, 0.0) if norm is None else norm_rope(x, norm.weight, cache, norm.eps)
            for x, norm in zip((q, k), norms, strict=True)
        )
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        attended: torch.Tensor = self.wo(out.flatten(2))
        return attended

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, [1, L, heads, head_dim] each."""
        layers = self.qkv_linear.wq, self.qkv_linear.wk, self.qkv_linear.wv
        if not all(map(is_bare, layers)):
            projected: tuple[torch.Tensor, ...] = self.qkv_linear(x)
            return projected
        outputs = joint_linear(x, *(layer.weight for layer in layers))
        return tuple(output.unflatten(-1, (-1, self.head_dim)) for output in outputs)


def is_plain(norm: nn.Module) -> bool:
    """Return whether a norm has a weight that is whole on this rank, and its own epsilon."""
    return norm.eps is not None and norm.weight is not None and not isinstance(norm.weight, DTensor)


def is_bare(layer: nn.Module) -> bool:
    """Return whether a linear layer is a matrix that is whole on this rank, without bias or adapter."""
    return type(layer) is Linear and layer.bias is None and not isinstance(layer.weight, DTensor)
