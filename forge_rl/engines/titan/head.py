"""Output heads: float32 logits, with chunked scoring of targets that never holds a row's logits; and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from forge_rl.algorithms.logprobs import DEFAULT_SCORING, Scoring, TokenScores, token_scores, widened
from forge_rl.engines.titan.shards import local
from forge_rl.engines.titan.vocabulary import split_token_scores

HEAD_CHUNK_BYTES = 256 << 20
"""Maximum bytes of logits held at a time; their gradient overwrites them."""


class FloatHead(Linear):
    """Output projection in float32, as in the engine, or float64 for a float64 model: logits of 20 rounded to bfloat16
    would be off by up to 0.06."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The model's own change of its logits, [N, V], before they are scored."""

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None, scoring: Scoring = DEFAULT_SCORING
    ) -> torch.Tensor | TokenScores:
        """Project [..., dim] to [..., V], float32 or float64; or score `targets` from [N, dim], see `token_scores`.

        Many targets are scored in chunks, whose logits are recomputed for the backward pass, so that [N, V] is never
        held.
        """
        weight = local(self.weight)
        if targets is None:
            logits: torch.Tensor = _product(hidden.flatten(0, -2), _factor(weight)).unflatten(0, hidden.shape[:-1])
            return logits

        def score(logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
            if isinstance(self.weight, DTensor):
                return split_token_scores(logits, targets, scoring, self.weight.device_mesh, self.out_features)
            if self.transform is not None:
                return token_scores(self.transform(logits), targets, scoring)
            return token_scores(logits, targets, scoring, overwrite_logits=True)

        tokens = max(1, HEAD_CHUNK_BYTES // (4 * self.weight.shape[0]))
        keeps_sums = hidden.is_cuda and hidden.dtype.itemsize < 4  # torch gives such a product no gradient
        if len(targets) <= tokens and not keeps_sums:
            return score(_product(hidden, _factor(weight)), targets)
        return TokenScores(*_ChunkedScores.apply(hidden, weight, targets, score, tokens, scoring.entropy_gradient))


class ValueHead(Linear):
    """Projection to one number for each token, computed in float32, or float64 for a float64 model.

    Tensor-parallel ranks each hold and compute all of it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None, scoring: Scoring = DEFAULT_SCORING
    ) -> torch.Tensor | TokenScores:
        """Project [..., dim] to [...]; with `targets`, [N, dim] to scores whose values alone mean something.

        The values do not depend on `scoring`, and so not on the sampling temperature.
        """
        values = widened(hidden) @ widened(local(self.weight))[0]
        if targets is None:
            return values
        return TokenScores(values.new_zeros(targets.shape), values.new_zeros(len(values)), None, values)


class _ChunkedScores(torch.autograd.Function):
    """Scores of targets in chunks of their logits, which the backward pass recomputes.

    The weight's gradient is summed over the chunks in float32 and rounded to the weight's dtype once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        score: _Scorer,
        tokens: int,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Score [N] or [N, K] targets from [N, dim] and [V, dim], a chunk of tokens at a time."""
        factor = _factor(weight)
        chunks, buffer = zip(hidden.split(tokens), targets.split(tokens), strict=True), _room(hidden, factor, tokens)
        chunk_scores = [score(_product(rows, factor, buffer), chunk_targets) for rows, chunk_targets in chunks]
        logprobs, entropy = (
            torch.cat([scores.logprobs for scores in chunk_scores]),
            torch.cat([scores.entropy for scores in chunk_scores]),
        )
        squares = [scores.squares for scores in chunk_scores if scores.squares is not None]
        outputs = logprobs, entropy, torch.cat(squares) if squares else None
        ctx.save_for_backward(hidden, weight, targets)
        ctx.score, ctx.tokens, ctx.entropy_gradient = score, tokens, entropy_gradient
        fixed = outputs[2 if entropy_gradient else 1 :]
        ctx.mark_non_differentiable(*(tensor for tensor in fixed if tensor is not None))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        factor, grad_hidden = _factor(weight), torch.empty_like(hidden)
        grad_weight, buffer = None, _room(hidden, factor, ctx.tokens)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=widened(hidden[:0]).dtype, device=weight.device)
        for start in range(0, len(targets), ctx.tokens):
            chunk = slice(start, start + ctx.tokens)
            rows = hidden[chunk]
            logits = _product(rows, factor, buffer).requires_grad_()
            with torch.enable_grad():
                logprobs, entropy, *_ = ctx.score(logits, targets[chunk])
            outputs, grads = [logprobs], [grad_logprobs[chunk]]
            if ctx.entropy_gradient:
                outputs.append(entropy)
                grads.append(grad_entropy[chunk])
            (grad,) = torch.autograd.grad(outputs, logits, grads)
            del logprobs, entropy, outputs, logits
            if factor.dtype == hidden.dtype:
                grad = grad.to(hidden.dtype)
            grad_hidden[chunk] = grad.mm(factor)
            if grad_weight is not None:
                if grad.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.t(), rows.to(grad.dtype))
                else:
                    grad_weight += torch.mm(grad.t(), rows, out_dtype=torch.float32)
            del grad
        return grad_hidden, grad_weight, None, None, None, None


_Scorer = Callable[[torch.Tensor, torch.Tensor], TokenScores]
"""Scores targets from their logits."""


def _factor(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the dtype that `_product` needs: on CUDA unchanged, as products there have float32 sums."""
    return weight if weight.is_cuda else widened(weight)


def _room(hidden: torch.Tensor, factor: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Allocate the logits of a chunk, which all chunks share; on CUDA, torch's allocator does that as well."""
    return None if hidden.is_cuda else factor.new_empty(min(tokens, len(hidden)), len(factor))


def _product(hidden: torch.Tensor, factor: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits, [N, V] float32, or float64 for float64 inputs; in the first rows of `buffer`, if given.

    On CUDA, products of bfloat16 keep their float32 sums unrounded, as in vLLM's head.
    """
    if factor.dtype in (torch.float32, torch.float64):
        out = None if buffer is None else buffer[: len(hidden)]
        return torch.mm(hidden.to(factor.dtype), factor.t(), out=out)
    return torch.mm(hidden, factor.t(), out_dtype=torch.float32)
