"""Logprobs from logits split over tensor-parallel ranks by vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forge_rl.algorithms.logprobs import widened

_CHUNK_TOKENS = 64
"""Positions processed at a time: temporaries are [_CHUNK_TOKENS, V / ranks]."""


def split_token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, mesh: DeviceMesh, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `token_logprobs` over split logits, with the same result on all ranks, in float32 or float64.

    Per position, ranks reduce the largest logit, then the sum of exponentials, their sum weighted by the logit, and the
    target's logit. The backward pass overwrites the logits with their gradient.

    Args:
        logits: [N, V / ranks] float32 or float64, this rank's part of the vocabulary, split as by DTensor's Shard: all
            parts but the last ones are equally long. Nothing else may read them.
        targets: [N] int64, ids in the whole vocabulary.
        temperature: the engine's sampling temperature, above 0.
        mesh: ranks that share the vocabulary, one axis.
        vocab: V.

    Returns:
        logprobs [N] with gradient, entropy [N] in nats without gradient, in the dtype of the logits or float32.
    """
    first = min(vocab, -(-vocab // mesh.size()) * mesh.get_local_rank())
    logprobs, entropy = _SplitTokenLogprobs.apply(logits, targets - first, temperature, mesh.get_group())
    return logprobs, entropy


class _SplitTokenLogprobs(torch.autograd.Function):
    """Manual gradient, as in token_logprobs: d logprob / d logits = (onehot - p) / temperature, for each part."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, places: torch.Tensor, temperature: float, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`places` are the targets' indices in this rank's part; indices outside of it belong to other ranks."""
        own = (places >= 0) & (places < logits.shape[1])
        places = torch.where(own, places, 0)
        largest = widened(logits.amax(dim=1)) / temperature
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = largest.new_empty(3, len(logits))
        for start in range(0, len(logits), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            shifted = widened(logits[rows]) / temperature - largest[rows, None]
            exp = shifted.exp()
            sums[0, rows] = exp.sum(dim=1)
            # The clamp keeps 0 * -inf out of the sum; clamped logits have probability 0.
            sums[1, rows] = exp.mul_(shifted.clamp(min=-1e4)).sum(dim=1)
            sums[2, rows] = torch.where(own[rows], shifted.gather(1, places[rows, None]).squeeze(1), 0.0)
        dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        log_total = total.log()
        ctx.save_for_backward(logits, places, own, largest, log_total)
        ctx.temperature = temperature
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return target - log_total, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, places, own, largest, log_total = ctx.saved_tensors
        grad_logits = logits.detach()
        for start in range(0, len(logits), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            slope = grad_logprobs[rows, None] / ctx.temperature
            shifted = widened(logits[rows]) / ctx.temperature - largest[rows, None]
            grad = shifted.sub_(log_total[rows, None]).exp_().mul_(-slope)
            grad_logits[rows] = grad.scatter_add_(1, places[rows, None], torch.where(own[rows, None], slope, 0.0))
        return grad_logits, None, None, None
