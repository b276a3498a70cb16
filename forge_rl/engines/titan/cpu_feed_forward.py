"""SwiGLU feed-forward network that keeps and reads little: a Triton kernel on CUDA, a manual gradient on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.feed_forward import FeedForward

from forge_rl.engines.titan.block_kernels import has_kernels, swiglu
from forge_rl.engines.titan.fused_products import has_fused_products
from forge_rl.engines.titan.master_weights import joint_weight
from forge_rl.engines.titan.products import gated_network, gated_product, is_bare, joint_linear, linear

_CHUNK = 1 << 17
"""Elements that are computed at a time, to stay in a CPU's cache."""
_TRACED = 64
"""Maximum number of chunks in a plan."""


class LeanFeedForward(FeedForward):
    """torchtitan's feed-forward network, which on CPU keeps two hidden activations for its backward pass, not four."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    @property
    def joint_weights(self) -> list[tuple[nn.Parameter, ...]]:
        """See `MasterWeights`."""
        return [(self.w1.weight, self.w3.weight)] if is_bare(self.w1) and is_bare(self.w3) else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., dim] to [..., dim]."""
        if has_kernels(x, "swiglu"):
            layers = self.w1, self.w3
            if all(map(is_bare, layers)):
                weights = [layer.weight for layer in layers]
                joint = joint_weight(*weights)
                if joint is not None and is_bare(self.w2) and has_fused_products(x, "products"):
                    return gated_network(x, joint, self.w2.weight)
                hidden = swiglu(*joint_linear(x, *weights)) if joint is None else gated_product(x, joint)
            else:
                hidden = swiglu(*(layer(x) for layer in layers))
            return linear(self.w2, hidden)
        if x.is_cuda or x.dtype.itemsize < 4 or isinstance(x, DTensor):
            plain: torch.Tensor = super().forward(x)
            return plain
        gates = self.w1(x), self.w3(x)
        out: torch.Tensor = (
            _DownProduct.apply(*gates, self.w2.weight) if is_bare(self.w2) else self.w2(_SwiGLU.apply(*gates))
        )
        return out


class _DownProduct(torch.autograd.Function):
    """(silu(a) b) W^T, [..., dim].

    The backward pass computes silu(a) b again, as it would take half as much memory as a and b together. It overwrites
    a and b with their gradients, as `_SwiGLU` does.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b, weight)
        return nn.functional.linear(nn.functional.silu(a).mul_(b), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        rows = grad.flatten(0, -2)
        grad_weight: torch.Tensor | None = None
        if ctx.needs_input_grad[2]:
            grad_weight = rows.t() @ nn.functional.silu(a).mul_(b).flatten(0, -2)
        return *_gate_gradients(a, b, (rows @ weight).view_as(a)), grad_weight


class _SwiGLU(torch.autograd.Function):
    """silu(a) b, where nothing else reads a and b, [..., hidden]: their gradients overwrite them, so that a second
    backward pass fails."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return nn.functional.silu(a).mul_(b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (tensor.detach() for tensor in ctx.saved_tensors)
        return _gate_gradients(a, b, grad)


def _gate_gradients(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite a and b with their gradients, and return both; `grad` is the gradient of silu(a) b, [..., hidden]."""
    rows = max(1, _CHUNK // a.shape[-1])
    if a.is_meta:  # a plan traces every chunk; that of long rows would take minutes
        rows = max(rows, a.numel() // a.shape[-1] // _TRACED)
    for a_rows, b_rows, grad_rows in zip(*(x.flatten(0, -2).split(rows) for x in (a, b, grad)), strict=True):
        slope = grad_rows * b_rows
        # The order matters: b's gradient needs a, which the next line overwrites, and `slope` has already read b.
        torch.mul(grad_rows, nn.functional.silu(a_rows), out=b_rows)
        torch.ops.aten.silu_backward.grad_input(slope, a_rows, grad_input=a_rows)
    return a, b
