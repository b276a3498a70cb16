"""Rows of tokens for their experts and back, and the experts' activations, in few passes over a GPU's memory.

As in `block_kernels`, each pass is one kernel, in Triton, and an operation of torch's. Sums are in float32, in a fixed
order, so that results do not differ from run to run.
"""

from __future__ import annotations

from typing import Any

import torch

from forge_rl.engines.titan.block_kernels import power_of_two, warps

_ELEMENTS = 4096
"""Elements of an activation that one program computes."""


def places_of(expert_ids: torch.Tensor) -> torch.Tensor:
    """Return the row of each token's K choices once all rows are sorted by expert, [T, K] int64, given its experts."""
    order = expert_ids.flatten().argsort(stable=True)
    # The sort's inverse: it maps a token's choice to its row, not a row to its choice.
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, rows).view(expert_ids.shape)


def spread_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Copy each token, [T, dim], to its places, [T, K]: [T K, dim]."""
    rows: torch.Tensor = _SpreadRows.apply(x, places)
    return rows


def weighted_sum(rows: torch.Tensor, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Add up the rows at each token's places, [T, K], weighted by its scores, [T, K]: [T, dim]."""
    out: torch.Tensor = _SumOfRows.apply(rows, scores, places)
    return out


def clamped_swiglu(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    """Return gpt-oss's activation of [N, 2 F], in which gate and linear part alternate: [N, F]."""
    out: torch.Tensor = _ClampedSwiGLU.apply(hidden, limit)
    return out


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        rows: torch.Tensor = _spread(x.contiguous(), places)
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        # The transpose of a copy to several places is a sum over them, here without scores as weights.
        return _sum_rows(grad.contiguous(), None, places), None


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows, scores = rows.contiguous(), scores.contiguous()
        ctx.save_for_backward(rows, scores, places)
        out: torch.Tensor = _sum_rows(rows, scores, places)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        grad_rows, grad_scores = _sum_gradient(*ctx.saved_tensors, grad.contiguous())
        return grad_rows, grad_scores, None


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, limit: float) -> torch.Tensor:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden)
        ctx.limit = limit
        out: torch.Tensor = _activated(hidden, limit)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _activation_gradient(*ctx.saved_tensors, grad.contiguous(), ctx.limit), None


@torch.library.custom_op("forge_rl::spread_rows", mutates_args=())
def _spread(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    from forge_rl.engines.titan.triton_experts import spread_kernel

    (tokens, choices), dim = places.shape, x.shape[1]
    rows = x.new_empty(tokens * choices, dim)
    block = power_of_two(dim)
    spread_kernel[(tokens,)](x, places, rows, choices, dim, BLOCK=block, num_warps=warps(block))
    return rows


@_spread.register_fake
def _(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.new_empty(places.numel(), x.shape[1])


@torch.library.custom_op("forge_rl::sum_rows", mutates_args=())
def _sum_rows(rows: torch.Tensor, scores: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    from forge_rl.engines.titan.triton_experts import sum_kernel

    (tokens, choices), dim = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, dim)
    block = power_of_two(dim)
    sum_kernel[(tokens,)](
        *(rows, scores, places, out, choices, dim), WEIGHS=scores is not None, BLOCK=block, num_warps=warps(block)
    )
    return out


@_sum_rows.register_fake
def _(rows: torch.Tensor, scores: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@torch.library.custom_op("forge_rl::sum_rows_gradient", mutates_args=())
def _sum_gradient(
    rows: torch.Tensor, scores: torch.Tensor, places: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by rows and scores."""
    from forge_rl.engines.titan.triton_experts import sum_gradient_kernel

    (tokens, choices), dim = places.shape, rows.shape[1]
    grad_rows, grad_scores = torch.empty_like(rows), torch.empty_like(scores)
    block = power_of_two(dim)
    sum_gradient_kernel[(tokens,)](
        *(rows, scores, places, grad, grad_rows, grad_scores, choices, dim), BLOCK=block, num_warps=warps(block)
    )
    return grad_rows, grad_scores


@_sum_gradient.register_fake
def _(
    rows: torch.Tensor, scores: torch.Tensor, places: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(scores)


@torch.library.custom_op("forge_rl::clamped_swiglu", mutates_args=())
def _activated(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    from forge_rl.engines.titan.triton_experts import clamped_swiglu_kernel

    out = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
    clamped_swiglu_kernel[(-(-out.numel() // _ELEMENTS),)](hidden, out, out.numel(), limit, BLOCK=_ELEMENTS)
    return out


@_activated.register_fake
def _(hidden: torch.Tensor, limit: float) -> torch.Tensor:
    return hidden.new_empty(len(hidden), hidden.shape[1] // 2)


@torch.library.custom_op("forge_rl::clamped_swiglu_gradient", mutates_args=())
def _activation_gradient(hidden: torch.Tensor, grad: torch.Tensor, limit: float) -> torch.Tensor:
    from forge_rl.engines.titan.triton_experts import clamped_swiglu_gradient_kernel

    grad_hidden = torch.empty_like(hidden)
    clamped_swiglu_gradient_kernel[(-(-grad.numel() // _ELEMENTS),)](
        *(hidden, grad, grad_hidden, grad.numel(), limit), BLOCK=_ELEMENTS
    )
    return grad_hidden


@_activation_gradient.register_fake
def _(hidden: torch.Tensor, grad: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(hidden)
