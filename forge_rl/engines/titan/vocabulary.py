"""Logprobs from logits split over tensor-parallel ranks by vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forge_rl.algorithms.logprobs import Scoring, TokenScores, entropy_slope, widened

_CHUNK_TOKENS = 64
"""Positions processed at a time: temporaries are [_CHUNK_TOKENS, V / ranks]."""


def split_token_scores(
    logits: torch.Tensor, targets: torch.Tensor, scoring: Scoring, mesh: DeviceMesh, vocab: int
) -> TokenScores:
    """Compute `token_scores` over split logits, with the same result on all ranks, in float32 or float64.

    Per position, ranks reduce the largest logit, then the sum of exponentials, their sum weighted by the logit, the sum
    of their squares, and the targets' logits. The backward pass overwrites the logits with their gradient.

    Args:
        logits: [N, V / ranks] float32 or float64, this rank's part of the vocabulary, split as by DTensor's Shard: all
            parts but the last ones are equally long. Nothing else may read them.
        targets: [N] or [N, K] int64, ids in the whole vocabulary.
        mesh: one-dimensional mesh of the ranks that share the vocabulary.
        vocab: V.
    """
    first = min(vocab, -(-vocab // mesh.size()) * mesh.get_local_rank())
    return TokenScores(*_SplitTokenScores.apply(logits, targets - first, scoring, mesh.get_group()))


class _SplitTokenScores(torch.autograd.Function):
    """Scores with a manual gradient, as in `token_scores`, for this rank's part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, places: torch.Tensor, scoring: Scoring, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`places` are the targets' indices in this rank's part; indices outside of it belong to other ranks."""
        shape, places = places.shape, places.reshape(len(places), -1)
        is_local = (places >= 0) & (places < logits.shape[1])
        places = torch.where(is_local, places, 0)
        # All ranks shift by the largest logit of the whole vocabulary, so that their sums can be added.
        largest = widened(logits.amax(dim=1)) / scoring.temperature
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = largest.new_empty(3 + places.shape[1], len(logits))
        for start in range(0, len(logits), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            shifted = widened(logits[rows]) / scoring.temperature - largest[rows, None]
            exp = shifted.exp()
            sums[0, rows] = exp.sum(dim=1)
            sums[1, rows] = exp.square().sum(dim=1) if scoring.squares else 0.0
            # The clamp keeps 0 * -inf out of the sum; clamped logits have probability 0.
            sums[2, rows] = exp.mul_(shifted.clamp(min=-1e4)).sum(dim=1)
            sums[3:, rows] = torch.where(is_local[rows], shifted.gather(1, places[rows]), 0.0).t()
        dist.all_reduce(sums, group=group)
        total, squared, weighted, *targets = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        squares = squared / total.square() if scoring.squares else None
        ctx.save_for_backward(logits, places, is_local, largest, log_total, entropy)
        ctx.scoring = scoring
        fixed = [entropy] if not scoring.entropy_gradient else []
        ctx.mark_non_differentiable(*fixed, *([] if squares is None else [squares]))
        return (torch.stack(targets, dim=1) - log_total[:, None]).reshape(shape).clone(), entropy, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, places, is_local, largest, log_total, entropy = ctx.saved_tensors
        scoring = ctx.scoring
        # The saved logits become their own gradient: a second [N, V / ranks] buffer would double the head's memory.
        grad_logits = logits.detach()
        for start in range(0, len(logits), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            # d logp(target) / d logits = onehot(target) - p. The first term is added last, on the rank that has the
            # target.
            slope = grad_logprobs[rows].reshape(-1, places.shape[1]) / scoring.temperature
            all_slopes = slope.sum(dim=1, keepdim=True)
            logp = (widened(logits[rows]) / scoring.temperature - largest[rows, None]).sub_(log_total[rows, None])
            if scoring.entropy_gradient:
                grad = entropy_slope(logp, entropy[rows], grad_entropy[rows] / scoring.temperature, all_slopes)
            else:
                grad = logp.exp_().mul_(-all_slopes)
            grad_logits[rows] = grad.scatter_add_(1, places[rows], torch.where(is_local[rows], slope, 0.0))
        return grad_logits, None, None, None
