"""Linear layers that torchtitan lacks: a router's gate in float32, and a bias shared by tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.gpt_oss.moe import ScaleBiasForward

from forge_rl.algorithms.logprobs import widened
from forge_rl.engines.titan.gradient_sums import keeps_sums, sum_place
from forge_rl.engines.titan.shards import local


class FloatGate(Linear):
    """Router projection in float32, or float64 for a float64 model, to distinguish close scores.

    torchtitan leaves this to autocast, which has no float32 on CPU.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project [..., dim] of any dtype to [..., experts] float32 or float64."""
        bias = None if self.bias is None else widened(self.bias)
        # DTensors and other subclasses go through torch's own linear layer.
        if keeps_sums(input) and type(input) is torch.Tensor and not isinstance(self.weight, DTensor):
            scores: torch.Tensor = _WideProduct.apply(input, self.weight)
            return scores if bias is None else scores + bias
        return nn.functional.linear(widened(input), widened(self.weight), bias)


class _WideProduct(torch.autograd.Function):
    """Product of narrow matrices in float32, on a GPU, which keeps no float32 copy of either for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = sum_place(weight)
        product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        scores: torch.Tensor = product.unflatten(0, x.shape[:-1])
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        flat, rows = grad.flatten(0, -2), x.flatten(0, -2)
        # The scores' gradient is float32, and stays so in both products.
        grad_x = (flat @ weight.float()).to(x.dtype).view_as(x)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        if ctx.place is None:
            return grad_x, (flat.t() @ rows.float()).to(weight.dtype)
        ctx.place.add_product(flat.t(), rows.float())
        return grad_x, None


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """Row-parallel linear layer with a bias; each tensor-parallel rank adds an equal share of the bias.

    The bias gets the full gradient, which torchtitan 0.3 would divide by the number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project a rank's part of [..., inputs] to its partial sum of [..., outputs]."""
        bias = ScaleBiasForward.apply(local(self.bias), self.tp_degree, input.dtype)
        return nn.functional.linear(input, local(self.weight), bias)
