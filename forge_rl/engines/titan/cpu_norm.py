"""RMSNorm that keeps and reads little: a Triton kernel on CUDA, and a manual gradient on CPU, where torch has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common import RMSNorm

from forge_rl.engines.titan.block_kernels import add_norm, has_kernels


class LeanRMSNorm(RMSNorm):
    """torchtitan's RMSNorm that saves only the input and one number per token."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., dim] over its last dimension."""
        if self.eps is not None and self.weight is not None and not isinstance(self.weight, DTensor):
            if has_kernels(x, "norms"):
                return add_norm(x, None, self.weight, self.eps)[1]
            if not x.is_cuda and x.dtype.itemsize >= 4 and not isinstance(x, DTensor):
                lean: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
                return lean
        plain: torch.Tensor = super().forward(x)
        return plain


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
        dots = products.mv(weight).view_as(inverse)
        grad_weight = products.t().mv(inverse.flatten()) if ctx.needs_input_grad[1] else None
        # Nothing reads the products again, so the result takes their memory.
        grad_x = torch.mul(grad, weight, out=products.view_as(x)).mul_(inverse)
        return grad_x.addcmul_(x, inverse.pow(3).mul_(dots).div_(-x.shape[-1])), grad_weight, None
