"""Scores of targets by products that never write a row's logits, see `fused_products`."""

from __future__ import annotations

from typing import Any

import torch

from forge_rl.algorithms.logprobs import Distributions, Scoring, TokenScores, kernel_statistics, scores_of_sums
from forge_rl.engines.platform import gpu_bytes
from forge_rl.engines.titan.fused_products import linear_gradient, linear_sums
from forge_rl.engines.titan.gradient_sums import added, sum_place, write_product

_CHUNK_BYTES = 1 << 30
"""Maximum bytes of logits' gradients held at a time, for all tokens and a part of the vocabulary. Each part of the
weight's gradient is thus added to its sum once."""
_CHUNK_SHARE = 80
"""They take at most 1/80 of a GPU's memory, less than a plan counts for torch's products."""
_LEAST_BYTES = 128 << 20
"""The limit on GPUs so small that 1/80 of their memory would be less."""


def score_in_products(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scoring: Scoring
) -> TokenScores:
    """Score [N] or [N, K] targets from [N, dim] and [V, dim], which are narrower than float32."""
    return TokenScores(*_FusedScores.apply(hidden, weight, targets, scoring))


class _FusedScores(torch.autograd.Function):
    """Scores whose backward pass computes the logits again, a part of the vocabulary at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor | None, ...]:
        sums, logits = linear_sums(hidden, weight, targets, scoring.temperature, scoring.squares)
        (logprobs, entropy, squares, _), distributions = scores_of_sums(_merged(sums, scoring), logits, scoring)
        ctx.save_for_backward(hidden, weight, targets, *distributions)
        ctx.scoring, ctx.place = scoring, sum_place(weight)
        fixed = (squares,) if scoring.entropy_gradient else (entropy, squares)
        ctx.mark_non_differentiable(*(tensor for tensor in fixed if tensor is not None))
        return logprobs, entropy, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        hidden, weight, targets, *saved = ctx.saved_tensors
        statistics, slopes = kernel_statistics(Distributions(*saved), (grad_logprobs, grad_entropy), ctx.scoring)
        places = targets.reshape(slopes.shape)
        total = None if ctx.place is None else ctx.place.sum.total(ctx.place.member)
        is_new = total is None or total.dtype != torch.float32
        # An update's first product is written rather than added, which saves zeroing the sum.
        if ctx.needs_input_grad[1] and is_new:
            total = weight.new_empty(weight.shape, dtype=torch.float32)
        columns, grad_hidden = _part_columns(len(hidden), len(weight), hidden.element_size()), None
        for start in range(0, len(weight), columns):
            part = weight[start : start + columns]
            # Shifted by the part's first column, targets of other parts match no column of this one.
            grad = linear_gradient(
                hidden, part, statistics, places - start if start else places, slopes, ctx.scoring.temperature
            )
            grad_hidden = added(grad_hidden, grad, part, torch.float32)
            if ctx.needs_input_grad[1]:
                assert total is not None
                room = total[start : start + columns]
                if is_new:
                    write_product(room, grad.t(), hidden)
                else:
                    added(room, grad.t(), hidden, torch.float32)
            del grad
        assert grad_hidden is not None, "there is a vocabulary"
        grad_hidden = grad_hidden.to(hidden.dtype)
        if ctx.place is None or not ctx.needs_input_grad[1]:
            return grad_hidden, total if ctx.needs_input_grad[1] else None, None, None
        if is_new:
            ctx.place.add(total)
        return grad_hidden, None, None, None


def _merged(sums: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Merge `score_sums` over parts of the vocabulary, [4, parts, N], into sums over all of it, [4, N]."""
    largest, total, weighted, squared = sums
    maximum = largest.amax(dim=0)
    # A part's sums are of x - m, with its own maximum m. For the common maximum M and shift = m - M:
    # sum e^(x-M) = e^shift sum e^(x-m), and sum (x-M) e^(x-M) = e^shift (sum (x-m) e^(x-m) + shift sum e^(x-m)).
    shift = largest - maximum
    factor = shift.exp()
    parts = [factor * total, factor * torch.addcmul(weighted, total, shift)]
    if scoring.squares:
        parts.append(factor.square() * squared)
    # Without squares, the maximum fills the fourth row, which nothing reads.
    return torch.stack([maximum, *(part.sum(dim=0) for part in parts), *([] if scoring.squares else [maximum])])


def _part_columns(tokens: int, vocab: int, itemsize: int) -> int:
    """Return how many columns of the logits' gradient to hold at a time, in parts of about equal size."""
    room = min(_CHUNK_BYTES, max(_LEAST_BYTES, gpu_bytes() // _CHUNK_SHARE))
    parts = -(-tokens * vocab * itemsize // room)
    columns = -(-vocab // max(1, parts))
    return min(vocab, -(-columns // _TILE) * _TILE)


_TILE = 256
"""Columns that one program computes."""
