"""Layers of experts and their gradients, against a loop over experts in float64."""

from __future__ import annotations

import pytest
import torch

from forge_rl.engines.titan.expert_products import expert_bias, expert_linear
from forge_rl.engines.titan.gradient_sums import GradientSum
from forge_rl.engines.titan.master_weights import MasterWeights, joint_weight

COUNTS = (3, 0, 6, 0)
"""Rows of each expert; one between others and the last have none."""


def ends_of(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def exact_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shares: int) -> torch.Tensor:
    """Compute the layer as one product a row; each result has a share of the bias, and the bias its whole gradient."""
    experts = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    rank_bias = bias - bias.detach() * (1 - 1 / shares)
    return torch.stack([weight[expert] @ row + rank_bias[expert] for expert, row in zip(experts, x, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [1, 2])
def test_results_and_gradients_are_those_of_a_product_a_row(dtype: torch.dtype, shares: int):
    torch.manual_seed(0)
    drawn = [torch.randn(9, 8), torch.randn(4, 16, 8), torch.randn(4, 16)]
    inputs = [values.to(dtype).requires_grad_() for values in drawn]
    wide = [values.detach().double().requires_grad_() for values in inputs]
    out = expert_bias(expert_linear(inputs[0], inputs[1], ends_of(COUNTS)), inputs[2], ends_of(COUNTS), shares)
    exact = exact_layer(wide[0], wide[1], wide[2], shares)
    grad = torch.randn(9, 16).to(dtype)
    out.backward(grad)
    exact.backward(grad.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    for value, exact_value in zip(inputs, wide, strict=True):
        assert value.grad is not None
        torch.testing.assert_close(value.grad.double(), exact_value.grad, rtol=tolerance, atol=tolerance)


def test_no_rows_give_no_results_and_gradients_of_zero():
    weight, bias = torch.randn(4, 16, 8, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    ends = ends_of((0, 0, 0, 0))
    x = torch.randn(0, 8, requires_grad=True)
    out = expert_bias(expert_linear(x, weight, ends), bias, ends)
    assert out.shape == (0, 16)
    out.sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert x.grad is not None
    assert x.grad.shape == (0, 8)
    assert not weight.grad.any()
    assert not bias.grad.any()


def test_weights_that_lie_one_after_the_other_get_the_sums_of_their_gradients():
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (torch.nn.Parameter(torch.randn(4, 6, 8, dtype=torch.float64)) for _ in range(2))

        @property
        def joint_weights(self) -> list[tuple[torch.nn.Parameter, ...]]:
            return [(self.gate, self.up)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joint = joint_weight(self.gate, self.up)
            assert joint is not None
            assert joint.shape == (4, 12, 8)
            return expert_linear(x, joint, ends_of(COUNTS))

    torch.manual_seed(0)
    pair, x = Pair(), torch.randn(9, 8, dtype=torch.float64)
    gate, up = pair.gate, pair.up
    exact = torch.cat([gate, up], dim=1).detach().requires_grad_()
    masters, grads = MasterWeights(pair, torch.float64), torch.randn(2, 9, 12, dtype=torch.float64)
    for grad in grads:
        pair(x).backward(grad)
        exact_layer(x, exact, torch.zeros(4, 12), 1).backward(grad)
    assert gate.grad is not None
    assert up.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(torch.cat([gate.grad, up.grad], dim=1), exact.grad, rtol=1e-12, atol=1e-12)
    assert gate.grad.is_contiguous(), "as the optimizer's kernels need"
    masters.release()
    assert pair.gate is gate


def test_a_gradient_of_several_experts_weights_is_split_by_outputs():
    masters = [torch.nn.Parameter(torch.zeros(2, outputs, 1)) for outputs in (1, 2)]
    total = GradientSum(masters)
    for _ in range(2):
        total.add(torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]]), None)
    assert masters[0].grad is not None
    assert masters[1].grad is not None
    assert masters[0].grad.flatten().tolist() == [2, 8]
    assert masters[1].grad.flatten().tolist() == [4, 6, 10, 12]
