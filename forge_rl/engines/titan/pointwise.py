"""RMSNorm and RoPE with manual gradients: fewer passes over memory, and less saved for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common import RMSNorm

from forge_rl.algorithms import widened


class LeanRMSNorm(RMSNorm):
    """torchtitan's RMSNorm that, where torch has no kernel, saves only the input and one number per token."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., dim] over its last dimension."""
        plain = x.device.type != "cuda" and x.dtype.itemsize >= 4 and not isinstance(x, DTensor)
        if not plain or self.eps is None or self.weight is None or isinstance(self.weight, DTensor):
            plain_normed: torch.Tensor = super().forward(x)
            return plain_normed
        normed: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^(-1/2).

    With g = dL/dy: dL/dx = g w r - x r^3 mean(g w x), and dL/dw is the sum of g x r over all tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: torch.Tensor = (x * inverse).mul_(weight)
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        products = (grad * x).flatten(0, -2)
        along = products.mv(weight).view_as(inverse)
        grad_weight = products.t().mv(inverse.flatten()) if ctx.needs_input_grad[1] else None
        grad_x = torch.mul(grad, weight, out=products.view_as(x)).mul_(inverse)
        return grad_x.addcmul_(x, inverse.pow(3).mul_(along).div_(-x.shape[-1])), grad_weight, None


def rotate(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Apply rotate-half RoPE, in float32 or wider.

    Args:
        x: [1, L, heads, head_dim].
        cache: [1, L, 1, 2 head_dim], cosines then sines, each repeated for both halves.
    """
    turned: torch.Tensor = _Rotation.apply(x, cache)
    return turned


class _Rotation(torch.autograd.Function):
    """Rotation; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cache)
        return _turned(x, cache, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (cache,) = ctx.saved_tensors
        return _turned(grad, cache, -1), None


def _turned(x: torch.Tensor, cache: torch.Tensor, direction: int) -> torch.Tensor:
    dim, half = x.shape[-1], x.shape[-1] // 2
    given, cos, sin = widened(x), cache[..., :dim], cache[..., dim : dim + half]
    turned = given * cos
    turned[..., :half].addcmul_(given[..., half:], sin, value=-direction)
    turned[..., half:].addcmul_(given[..., :half], sin, value=direction)
    return turned.type_as(x)
