"""Decoder layer and its attention with a GPU's kernels between the products, see `block_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from forge_rl.engines.titan.block_kernels import add_norm, has_kernels, norm_rope
from forge_rl.engines.titan.master_weights import joint_weight
from forge_rl.engines.titan.products import Heads, is_bare, joint_linear, linear, rotated_product


class FusedBlock(Qwen3TransformerBlock):
    """torchtitan's Qwen3 layer, which adds each residual together with the norm that follows it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    @property
    def joint_weights(self) -> list[tuple[nn.Parameter, ...]]:
        """See `MasterWeights`."""
        # Joined copies let one pass sum the gradients of all norms of a layer, see `GradientSum.room`.
        norms = self.attention_norm, self.ffn_norm, self.attention.q_norm, self.attention.k_norm
        return [tuple(norm.weight for norm in norms if norm is not None)]

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Map [1, L, dim] to [1, L, dim]."""
        if not self._fuses(x):
            plain: torch.Tensor = super().forward(x, attention_masks, positions)
            return plain
        x, delta = self.deferred(x, None, attention_masks, positions)
        return x + delta

    def defers(self, x: torch.Tensor) -> bool:
        """Return whether `deferred` may run in place of a call: nothing else acts on the layer's results."""
        # A forward hook, such as `layer_noise` registers, needs the layer's own result, not two summands.
        return self._fuses(x) and not self._forward_hooks

    def deferred(
        self, x: torch.Tensor, delta: torch.Tensor | None, attention_masks: Any, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map x + delta, [1, L, dim] each, to two tensors whose sum is the layer's result, so that the norm that comes
        next adds them."""
        x, normed = add_norm(x, delta, self.attention_norm.weight, self.attention_norm.eps)
        attended = self.attention(normed, attention_masks, positions)
        x, normed = add_norm(x, attended, self.ffn_norm.weight, self.ffn_norm.eps)
        return x, self.moe(normed) if self.moe_enabled else self.feed_forward(normed)

    def _fuses(self, x: torch.Tensor) -> bool:
        return has_kernels(x, "norms") and is_plain(self.attention_norm) and is_plain(self.ffn_norm)


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
        q, k, v = self._heads(x_BLD, positions)
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        return linear(self.wo, out.flatten(2))

    @property
    def joint_weights(self) -> list[tuple[nn.Parameter, ...]]:
        """See `MasterWeights`."""
        layers = self._projections
        return [tuple(layer.weight for layer in layers)] if all(map(is_bare, layers)) else []

    @property
    def _projections(self) -> tuple[Any, ...]:
        return self.qkv_linear.wq, self.qkv_linear.wk, self.qkv_linear.wv

    def _heads(self, x: torch.Tensor, positions: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, [1, L, heads, head_dim] each; q and k normalised and rotated."""
        norms, layers = (self.q_norm, self.k_norm), self._projections
        cache = self.rope._reshape_cache(x, positions)
        if all(map(is_bare, layers)):
            weights = [layer.weight for layer in layers]
            # Copies that lie one after the other make q, k and v a single product.
            if (joint := joint_weight(*weights)) is not None:
                heads = Heads(
                    len(weights[0]) // self.head_dim, self.head_dim, 0.0 if norms[0] is None else norms[0].eps
                )
                norm_weights = tuple(None if norm is None else norm.weight for norm in norms)
                return rotated_product(x, joint, norm_weights, cache, heads)  # type: ignore[arg-type]
            outputs = joint_linear(x, *weights)
            q, k, v = (output.unflatten(-1, (-1, self.head_dim)) for output in outputs)
        else:
            q, k, v = self.qkv_linear(x)
        q, k = (
            norm_rope(part, None, cache, 0.0) if norm is None else norm_rope(part, norm.weight, cache, norm.eps)
            for part, norm in zip((q, k), norms, strict=True)
        )
        return q, k, v


def is_plain(norm: nn.Module) -> bool:
    """Return whether a norm has a weight that is whole on this rank, and its own epsilon."""
    return norm.eps is not None and norm.weight is not None and not isinstance(norm.weight, DTensor)
