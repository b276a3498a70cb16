"""Logprobs of chosen tokens from logits, in at least float32, without a float32 copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

from forge_rl.errors import ConfigError


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    chunk_tokens: int | None = None,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprob of each target, and the entropy of its distribution softmax(logits / temperature).

    Logits at position t score token t+1. Packed rows already hold that token as targets[t], so nothing is shifted here:
    entry t of both results belongs to targets[t].

    Computes in float32, or float64 for float64 logits, in chunks, forward and backward; saves only the logits for the
    backward pass.

    Args:
        logits: [N, V], any float dtype.
        targets: [N] int64; any valid token id at positions without a target.
        temperature: the engine's sampling temperature, so that logprobs are comparable with behaviour logprobs.
        chunk_tokens: positions per chunk; float32 temporaries are [chunk_tokens, V]. By default 16 on CPU, to stay in
            its cache, else 64.
        overwrite_logits: overwrite the logits with the gradient in the backward pass, which saves their size in memory.
            Only for logits that nothing else reads; a second backward pass fails.

    Returns:
        logprobs [N] with gradient, entropy [N] in nats without gradient; float32, or float64 for float64 logits.

    Raises:
        ConfigError: the temperature is not above 0.
    """
    if not 0 < temperature < float("inf"):
        raise ConfigError(
            f"the sampling temperature is {temperature}",
            hint="train on episodes sampled at a temperature above 0: greedy decoding has no logprobs to correct by",
        )
    chunk_tokens = chunk_tokens or (16 if logits.device.type == "cpu" else 64)
    assert logits.ndim == 2, f"logits have shape {list(logits.shape)}, not [N, V]"
    assert targets.shape == logits.shape[:1], f"targets {list(targets.shape)}, logits {list(logits.shape)}"
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature, chunk_tokens, overwrite_logits)
    return logprobs, entropy


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
    largest = gap.max() if gap.numel() else gap.new_zeros(())
    return {"abs_sum": gap.sum(), "max": largest, "count": mask.sum().to(torch.float32)}


class _TokenLogprobs(torch.autograd.Function):
    """Handwritten gradient, so that no [N, V] softmax is saved: d logprob / d logits = (onehot - p) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        overwrite_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropy = (logits.new_empty(len(targets), dtype=wide) for _ in range(2))
        room = _room(logits, chunk_tokens), _room(logits, chunk_tokens)
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            scaled = _scaled(logits[rows], temperature)
            logp, p = (each[: len(scaled)] for each in room)
            torch.log_softmax(scaled, dim=1, out=logp)
            logprobs[rows] = logp.gather(1, targets[rows, None]).squeeze(1)
            torch.exp(logp, out=p)
            # The bound avoids 0 * -inf in the sum; it only changes entries of probability 0.
            entropy[rows] = -p.mul_(logp.clamp_(min=-1e4)).sum(dim=1)
        ctx.save_for_backward(logits, targets)
        ctx.options = temperature, chunk_tokens, overwrite_logits
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits, targets = ctx.saved_tensors
        temperature, chunk_tokens, overwrite_logits = ctx.options
        grad_logits = logits.detach() if overwrite_logits else torch.empty_like(logits)
        room = _room(logits, chunk_tokens)
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            scaled, slope = _scaled(logits[rows], temperature), grad_logprobs[rows, None] / temperature
            grad = torch.softmax(scaled, dim=1, out=room[: len(scaled)])
            grad_logits[rows] = grad.mul_(-slope).scatter_add_(1, targets[rows, None], slope)
        return grad_logits, None, None, None, None


def _room(logits: torch.Tensor, tokens: int) -> torch.Tensor:
    """Allocate a buffer for results that all chunks share: fresh pages per chunk would cost a CPU more than the
    arithmetic."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(min(tokens, len(logits)), logits.shape[1], dtype=wide)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits divided by the temperature, float32 or wider; at temperature 1 float32 is not copied."""
    scaled = widened(logits)
    return scaled if temperature == 1 else scaled / temperature
