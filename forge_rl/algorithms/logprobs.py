"""Logprobs of chosen tokens from logits, in at least float32, without a float32 copy of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from forge_rl.algorithms.score_kernels import score_gradient, score_sums
from forge_rl.errors import ConfigError
from forge_rl.system.kernels import is_on


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What to compute of each target's distribution, softmax(logits / temperature)."""

    temperature: float = 1.0
    """The engine's sampling temperature, so that logprobs are comparable with behaviour logprobs."""
    entropy_gradient: bool = False
    """Give the entropy a gradient."""
    squares: bool = False
    """Compute the sum of the squared probabilities."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"the sampling temperature is {self.temperature}",
                hint="train on episodes sampled at a temperature above 0: greedy decoding has no logprobs",
            )


DEFAULT_SCORING = Scoring()


class TokenScores(NamedTuple):
    """Scores of N targets; float32, or float64 for float64 logits."""

    logprobs: torch.Tensor
    """[N], or [N, K] for several targets each, with gradient."""
    entropy: torch.Tensor
    """[N], in nats."""
    squares: torch.Tensor | None
    """[N], without gradient; None unless asked for."""
    values: torch.Tensor | None = None
    """[N], with gradient, of a value model, whose other scores are 0 without gradient; None of any other model."""

    @property
    def first(self) -> torch.Tensor:
        """Return the logprobs of the first, or only, target of each position, [N]."""
        return self.logprobs[:, 0] if self.logprobs.ndim == 2 else self.logprobs


def token_scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scoring: Scoring = DEFAULT_SCORING,
    *,
    chunk_tokens: int | None = None,
    overwrite_logits: bool = False,
) -> TokenScores:
    """Return the logprob of each target, and the entropy of its distribution softmax(logits / temperature).

    Logits at position t score token t+1. Packed rows already hold that token as targets[t], so nothing is shifted here:
    entry t of all results belongs to targets[t].

    Computes in float32, or float64 for float64 logits, in chunks, forward and backward; saves only the logits for the
    backward pass.

    Args:
        logits: [N, V], any float dtype.
        targets: [N] int64, or [N, K] for K targets of the same distribution; any valid token id at positions without a
            target.
        chunk_tokens: positions per chunk; float32 temporaries are [chunk_tokens, V]. CUDA needs no chunks: its kernels
            have no temporaries.
        overwrite_logits: overwrite the logits with the gradient in the backward pass, which saves their size in memory.
            Only for logits that nothing else reads; a second backward pass fails.
    """
    chunk_tokens = chunk_tokens or default_chunk_tokens(logits)
    assert logits.ndim == 2, f"logits have shape {list(logits.shape)}, not [N, V]"
    assert targets.shape[:1] == logits.shape[:1], f"targets {list(targets.shape)}, logits {list(logits.shape)}"
    return TokenScores(*_TokenScoresFunction.apply(logits, targets, scoring, chunk_tokens, overwrite_logits))


def widened(values: torch.Tensor) -> torch.Tensor:
    """Convert narrower dtypes to float32; keep float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def logprob_gap(trainer: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure the gap between the trainer's and the engine's logprobs on the same tokens.

    All three have the same, arbitrary shape, and entry t belongs to the same token in each; `mask` is bool.

    Returns:
        Detached scalars, float32 or wider: "abs_sum" and "max" of the absolute differences, and "count" of the tokens.
        Over rows and ranks, sums and counts add up, and "max" takes the maximum.
    """
    gap = widened(torch.where(mask, trainer.detach() - behaviour, 0.0).abs())
    # A rank may have no tokens, and `max` of nothing raises.
    largest = gap.max() if gap.numel() else gap.new_zeros(())
    return {"abs_sum": gap.sum(), "max": largest, "count": mask.sum().to(torch.float32)}


class Distributions(NamedTuple):
    """What the gradient needs of N distributions besides their logits; float32, or float64 for float64 logits."""

    entropy: torch.Tensor
    """[N], in nats."""
    log_total: torch.Tensor | None
    """[N], log of the sum of exp(logits / temperature); None where the gradient computes it again."""


def score_logits(
    logits: torch.Tensor, targets: torch.Tensor, scoring: Scoring, chunk_tokens: int
) -> tuple[TokenScores, Distributions]:
    """Compute `token_scores` without gradients, and what `logits_gradient` needs."""
    # One kernel reads the logits once for all scores, without temporaries.
    if has_score_kernels(logits):
        return scores_of_sums(
            score_sums(logits, scoring.temperature, scoring.squares), target_logits(logits, targets), scoring
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs, entropy = logits.new_empty(targets.shape, dtype=dtype), logits.new_empty(len(targets), dtype=dtype)
    squares = torch.empty_like(entropy) if scoring.squares else None
    # [chunk_tokens, V] each: log probabilities, and probabilities.
    buffers = _room(logits, chunk_tokens), _room(logits, chunk_tokens)
    for start in range(0, len(targets), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        scaled = _scaled(logits[rows], scoring.temperature)
        logp, p = (buffer[: len(scaled)] for buffer in buffers)
        torch.log_softmax(scaled, dim=1, out=logp)
        logprobs[rows] = logp.gather(1, targets[rows].view(len(scaled), -1)).view(targets[rows].shape)
        torch.exp(logp, out=p)
        if squares is not None:
            squares[rows] = p.square().sum(dim=1)
        # The bound avoids 0 * -inf in the sum; it only changes entries of probability 0.
        entropy[rows] = -p.mul_(logp.clamp_(min=_LEAST)).sum(dim=1)
    return TokenScores(logprobs, entropy, squares), Distributions(entropy, None)


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    distributions: Distributions,
    grads: tuple[torch.Tensor, torch.Tensor],
    scoring: Scoring,
    *,
    chunk_tokens: int,
    out: torch.Tensor,
) -> None:
    """Write the gradient by the logits to `out`, [N, V] of any float dtype, which may be the logits themselves.

    Args:
        grads: gradients by the logprobs, [N] or [N, K], and by the entropy, [N], which counts only if `scoring` says
            so.
    """
    if distributions.log_total is not None:
        statistics, slopes = kernel_statistics(distributions, grads, scoring)
        score_gradient(logits, out, statistics, _columns(targets).contiguous(), slopes, scoring.temperature)
        return
    grad_logprobs, grad_entropy = (grad / scoring.temperature for grad in grads)
    # d logprob / d z = onehot - p: -p times the sum of the K targets' slopes, plus each slope at its target.
    slopes = _columns(grad_logprobs)
    buffer = _room(logits, chunk_tokens)
    for start in range(0, len(targets), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        scaled, slope = _scaled(logits[rows], scoring.temperature), slopes[rows]
        all_slopes = slope.sum(dim=1, keepdim=True)
        if scoring.entropy_gradient:
            logp = torch.log_softmax(scaled, dim=1, out=buffer[: len(scaled)])
            grad = entropy_slope(logp, distributions.entropy[rows], grad_entropy[rows], all_slopes)
        else:
            grad = torch.softmax(scaled, dim=1, out=buffer[: len(scaled)]).mul_(-all_slopes)
        out[rows] = grad.scatter_add_(1, targets[rows].view(slope.shape), slope)


def kernel_statistics(
    distributions: Distributions, grads: tuple[torch.Tensor, torch.Tensor], scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `statistics`, [4, N], and `slopes`, [N, K], of `score_gradient`."""
    grad_logprobs, grad_entropy = (_scaled(grad, scoring.temperature) for grad in grads)
    slopes, (entropy, log_total) = _columns(grad_logprobs), distributions
    assert log_total is not None, "kernels compute it"
    # A sum over one column would be another kernel.
    all_slopes = slopes[:, 0] if slopes.shape[1] == 1 else slopes.sum(dim=1)
    entropy_slopes = grad_entropy if scoring.entropy_gradient else torch.zeros_like(entropy)
    return torch.stack([log_total, entropy, all_slopes, entropy_slopes]), slopes.contiguous()


def default_chunk_tokens(logits: torch.Tensor) -> int:
    """Return how many positions are scored at a time without a kernel: on CPU 16, to stay in its cache."""
    return 16 if logits.device.type == "cpu" else 64


def has_score_kernels(logits: torch.Tensor) -> bool:
    """Return whether kernels score these logits: on CUDA, and on the meta device, which stands for it in plans; rows
    are contiguous."""
    on_gpu = logits.device.type != "cpu" and logits.dtype != torch.float64
    return on_gpu and (logits.stride(1) == 1 or logits.shape[1] == 1) and is_on("scores")


def scores_of_sums(
    sums: torch.Tensor, target_logits: torch.Tensor, scoring: Scoring
) -> tuple[TokenScores, Distributions]:
    """Compute `score_logits` from `score_sums`, [4, N], and the targets' logits, [N] or [N, K]."""
    largest, total, weighted, squared = sums
    # With z = logits / temperature, m = max z and e = exp(z - m): log sum exp z = m + log sum e, and the entropy is log
    # sum e - sum e (z - m) / sum e.
    log_sum = total.log()
    entropy, log_total = log_sum - weighted / total, largest + log_sum
    squares = squared / total.square() if scoring.squares else None
    scaled = _scaled(target_logits, scoring.temperature)
    logprobs = scaled - (log_total if scaled.ndim == 1 else log_total[:, None])
    return TokenScores(logprobs, entropy, squares), Distributions(entropy, log_total)


def target_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the targets' logits, [N] or [N, K]."""
    return logits.gather(1, _columns(targets)).view(targets.shape)


def _columns(values: torch.Tensor) -> torch.Tensor:
    """View [N] or [N, K] as [N, K]."""
    return values[:, None] if values.ndim == 1 else values


class _TokenScoresFunction(torch.autograd.Function):
    """Handwritten gradients, so that no [N, V] softmax is saved. With z = logits / temperature:
    d logprob / d z = onehot - p, and d entropy / d z = -p * (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scoring: Scoring,
        chunk_tokens: int,
        overwrite_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        (logprobs, entropy, squares, _), distributions = score_logits(logits, targets, scoring, chunk_tokens)
        ctx.save_for_backward(logits, targets, *distributions)
        ctx.options = scoring, chunk_tokens, overwrite_logits
        fixed = [entropy] if not scoring.entropy_gradient else []
        ctx.mark_non_differentiable(*fixed, *([] if squares is None else [squares]))
        return logprobs, entropy, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits, targets, *distributions = ctx.saved_tensors
        scoring, chunk_tokens, overwrite_logits = ctx.options
        # `save_for_backward` notices the write, so a second backward pass fails instead of using gradients as logits.
        grad_logits = logits.detach() if overwrite_logits else torch.empty_like(logits)
        logits_gradient(
            logits.detach(),
            targets,
            Distributions(*distributions),
            (grad_logprobs, grad_entropy),
            scoring,
            chunk_tokens=chunk_tokens,
            out=grad_logits,
        )
        return grad_logits, None, None, None, None


_LEAST = -1e4
"""Log of a probability that is 0 in every dtype, and finite."""


def entropy_slope(
    logp: torch.Tensor, entropy: torch.Tensor, grad_entropy: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """Return the gradient by logits / temperature without the targets' own part, -p * (slopes + g * (log p + entropy)).

    Args:
        logp: [n, V], log probabilities.
        entropy: [n], as is its gradient g, `grad_entropy`.
        slopes: [n, 1], sums of the gradients by the logprobs of each position.
    """
    # A probability of 0 gives 0 times a finite number, where -inf would give NaN.
    factor = (logp.clamp(min=_LEAST) + entropy[:, None]).mul_(grad_entropy[:, None]).add_(slopes)
    return logp.exp().mul_(factor.neg_())


def _room(logits: torch.Tensor, tokens: int) -> torch.Tensor:
    """Allocate a buffer for results that all chunks share: fresh pages per chunk would cost a CPU more than the
    arithmetic."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(min(tokens, len(logits)), logits.shape[1], dtype=dtype)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits divided by the temperature, float32 or wider; at temperature 1 float32 is not copied."""
    scaled = widened(logits)
    return scaled if temperature == 1 else scaled / temperature
