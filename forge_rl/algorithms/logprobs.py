"""Logprobs of chosen tokens from logits, in float32 or more and without a copy of the logits in that format."""

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

    Logits at position t score token t+1. The packed rows already hold that token as targets[t], so nothing is shifted
    here: entry t of both results is about targets[t].

    The arithmetic is float32, or float64 where the logits are. It goes chunk by chunk, forward and backward, and keeps
    only the logits for the backward pass.

    Args:
        logits: [N, V], any float dtype.
        targets: [N] int64; any id of the vocabulary at positions without a target.
        temperature: the engine's sampling temperature, so that logprobs compare with behaviour logprobs.
        chunk_tokens: positions worked on at a time; float32 temporaries are [chunk_tokens, V]. By default 16 on a CPU,
            where they should stay in its cache, else 64.
        overwrite_logits: write the gradient over the logits in the backward pass, which saves as many bytes. For logits
            that nothing else reads, then or later; a second backward pass fails.

    Returns:
        logprobs [N] with gradient, entropy [N] in nats without gradient; float32, or float64 where the logits are.

    Raises:
        ConfigError: the temperature or chunk_tokens is not above 0.
    """
    if not 0 < temperature < float("inf"):
        raise ConfigError(
            f"the sampling temperature is {temperature}",
            hint="train on episodes sampled at a temperature above 0: greedy decoding has no logprobs to correct by",
        )
    if chunk_tokens is None:
        chunk_tokens = 16 if logits.device.type == "cpu" else 64
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}", hint="set it to 1 or more")
    assert logits.ndim == 2, f"logits have shape {list(logits.shape)}, not [N, V]"
    assert targets.shape == logits.shape[:1], f"targets {list(targets.shape)}, logits {list(logits.shape)}"
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature, chunk_tokens, overwrite_logits)
    return logprobs, entropy


def widened(values: torch.Tensor) -> torch.Tensor:
    """Convert narrower formats to float32; keep float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def logprob_gap(trainer: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure how far the trainer's logprobs are from the engine's, on the same tokens.

    Both are of any shape, and `mask` bool of the same shape; entry t is about the same token in all three.

    Returns:
        Detached scalars, float32 or wider: "abs_sum" and "max" of the absolute differences, and "count" of the tokens.
        Sums and counts add over rows and ranks, and the max takes the max.
    """
    gap = widened(torch.where(mask, trainer.detach() - behaviour, 0.0).abs())
    largest = gap.max() if gap.numel() else gap.new_zeros(())
    return {"abs_sum": gap.sum(), "max": largest, "count": mask.sum().to(torch.float32)}


class _TokenLogprobs(torch.autograd.Function):
    """Gradient by hand, so that no [N, V] softmax is saved: d logprob / d logits = (onehot - p) / temperature."""

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
            # The bound keeps 0 * -inf out of the sum; what it changes has a probability of 0.
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
    """Memory of a chunk's results, which all chunks use: fresh pages for each would cost a CPU more than the sums."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(min(tokens, len(logits)), logits.shape[1], dtype=wide)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits divided by the temperature, float32 or wider; at 1 float32 is not copied."""
    scaled = widened(logits)
    return scaled if temperature == 1 else scaled / temperature
