"""Linear layers that torchtitan lacks: a router's gate in float32, and a bias shared by tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.gpt_oss.moe import ScaleBiasForward

from forge_rl.algorithms.logprobs import widened
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
        return nn.functional.linear(widened(input), widened(self.weight), bias)


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """Row-parallel linear layer with a bias, of which each tensor-parallel rank adds its share.

    The bias gets the full gradient, which torchtitan 0.3 would divide by the number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project a rank's part of [..., inputs] to its partial sum of [..., outputs]."""
        bias = ScaleBiasForward.apply(local(self.bias), self.tp_degree, input.dtype)
        return nn.functional.linear(input, local(self.weight), bias)
