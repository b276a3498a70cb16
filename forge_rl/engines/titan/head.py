"""Output heads: float32 logits, with chunked scoring of targets that never holds a row's logits; and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common import Linear

from forge_rl.algorithms.logprobs import (
    DEFAULT_SCORING,
    Distributions,
    Scoring,
    TokenScores,
    default_chunk_tokens,
    has_score_kernels,
    kernel_statistics,
    logits_gradient,
    score_logits,
    scores_of_sums,
    target_logits,
    token_scores,
    widened,
)
from forge_rl.algorithms.score_kernels import score_gradient, score_sums
from forge_rl.engines.devices import device_type
from forge_rl.engines.platform import gpu_bytes
from forge_rl.engines.titan.adapter_switch import AdapterSwitch, rounded_factor
from forge_rl.engines.titan.fused_head import score_in_products
from forge_rl.engines.titan.fused_products import has_fused_products
from forge_rl.engines.titan.gradient_sums import added, keeps_sums, sum_place
from forge_rl.engines.titan.shards import local
from forge_rl.engines.titan.vocabulary import split_token_scores

HEAD_CHUNK_BYTES = 256 << 20
"""Maximum bytes of logits held at a time on CPU, and on small GPUs; float32 gradients overwrite them."""
_MAX_CHUNK_BYTES = 2 << 30
"""Maximum bytes of logits on large GPUs: products of so many rows run at full speed, and the weight's gradient, which
each chunk reads and writes whole, takes no noticeable time."""
_CHUNK_SHARE = 40
"""Logits take at most 1/40 of a GPU's memory, 2 GiB of 80."""


class FloatHead(Linear):
    """Output projection in float32, as in the engine, or float64 for a float64 model: logits of 20 rounded to bfloat16
    would be off by up to 0.06."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What the model does to its logits, [N, V], before they are scored; elementwise, as ranks may split V."""
    adapters: AdapterSwitch | None = None
    """Whether its adapter acts; None without one."""
    adapter_name: str = ""  # a plan's models are not named
    lora_A: torch.Tensor
    lora_B: torch.Tensor

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None, scoring: Scoring = DEFAULT_SCORING
    ) -> torch.Tensor | TokenScores:
        """Project [..., dim] to [..., V], float32 or float64; or score `targets` from [N, dim], see `token_scores`.

        Many targets are scored in chunks, whose logits are recomputed for the backward pass, so that [N, V] is never
        held.
        """
        weight, adapter = local(self.weight), self._adapter(hidden)
        if targets is None:
            logits: torch.Tensor = _product(hidden.flatten(0, -2), _factor(weight)).unflatten(0, hidden.shape[:-1])
            return logits if adapter is None else logits + adapter[0] @ adapter[1].t()

        def score(logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
            if self.transform is not None:
                logits = self.transform(logits)
            if isinstance(self.weight, DTensor):
                return split_token_scores(logits, targets, scoring, self.weight.device_mesh, self.out_features)
            if self.transform is not None:
                return token_scores(logits, targets, scoring)
            return token_scores(logits, targets, scoring, overwrite_logits=True)

        tokens = _chunk_tokens(len(targets), self.weight.shape[0])
        is_wide = keeps_sums(weight)  # torch gives such a product no gradient
        if len(targets) <= tokens and not is_wide:
            logits = _product(hidden, _factor(weight))
            return score(logits if adapter is None else logits + adapter[0] @ adapter[1].t(), targets)
        # Plain logits have a closed-form gradient. Transformed logits, or a vocabulary split over ranks, go through
        # autograd.
        is_plain = self.transform is None and not isinstance(self.weight, DTensor)
        # Fused products need the plain matrix in 16 bits: no transform, no adapter, and all of the vocabulary here.
        if is_plain and adapter is None and has_fused_products(hidden, "logits") and is_wide:
            return score_in_products(hidden, weight, targets, scoring)
        scorer: ChunkScorer = _PlainScorer(scoring) if is_plain else _TracedScorer(score, scoring)
        return TokenScores(*_ChunkedScores.apply(hidden, weight, targets, scorer, tokens, *(adapter or ())))

    def _adapter(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the factors of the adapter's logits, [..., rank] and [V, rank], in float32 or float64: the scaled
        product of [..., dim] and A, and this rank's part of B. None if no adapter acts."""
        if self.adapters is None or not self.adapters.on:
            return None
        a, b = (rounded_factor(factor, self.adapters.lora) for factor in (self.lora_A, self.lora_B))
        if isinstance(a, DTensor):  # tensor-parallel ranks each have the gradient of their part of the vocabulary
            a = a.to_local(grad_placements=[Partial()])
        inputs = widened(self.adapters.dropped(self.adapter_name, hidden))
        return self.adapters.lora.scale * (inputs @ widened(a).t()), widened(local(b))


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


class _PlainScorer:
    """Scores chunks of logits, whose gradient needs nothing but the logits and two numbers per token."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return what `scores` needs of a chunk; each [n, ...]."""
        if has_score_kernels(logits):
            sums = score_sums(logits, self.scoring.temperature, self.scoring.squares)
            return sums.t(), target_logits(logits, targets)
        (logprobs, entropy, squares, _), _ = score_logits(logits, targets, self.scoring, default_chunk_tokens(logits))
        return logprobs, entropy, squares

    def scores(self, parts: Sequence[torch.Tensor | None]) -> tuple[TokenScores, Sequence[torch.Tensor | None]]:
        """Return the scores of all chunks from the joined results of `score`, and the statistics that `gradient`
        needs."""
        # Two parts mean that the kernel ran: its sums for each token, and the targets' logits.
        if len(parts) == 2:
            sums, logits = parts
            assert sums is not None
            assert logits is not None
            return scores_of_sums(sums.t(), logits, self.scoring)
        logprobs, entropy, squares = parts
        assert logprobs is not None
        assert entropy is not None
        return TokenScores(logprobs, entropy, squares), (entropy, None)

    def prepared(
        self, statistics: Sequence[torch.Tensor | None], grads: tuple[torch.Tensor, torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Return what `gradient` needs of all tokens, given the gradients by logprobs and entropy; each [N, ...]."""
        if statistics[1] is None:
            return *grads, *statistics
        kernel_parts, slopes = kernel_statistics(Distributions(*statistics), grads, self.scoring)  # type: ignore[arg-type]
        return kernel_parts.t(), slopes

    def gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, parts: Sequence[torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient by a chunk's logits in a dtype, given the chunk of `prepared`."""
        # The logits are not read again, so their gradient overwrites them if the dtype allows.
        grad = logits if dtype == logits.dtype else logits.new_empty(logits.shape, dtype=dtype)
        if len(parts) == 2:
            kernel_parts, slopes = parts
            assert kernel_parts is not None
            assert slopes is not None
            places = targets.reshape(slopes.shape)
            score_gradient(logits, grad, kernel_parts.t(), places, slopes, self.scoring.temperature)
            return grad
        grad_logprobs, grad_entropy, *statistics = parts
        logits_gradient(
            logits,
            targets,
            Distributions(*statistics),  # type: ignore[arg-type]
            (grad_logprobs, grad_entropy),  # type: ignore[arg-type]
            self.scoring,
            chunk_tokens=default_chunk_tokens(logits),
            out=grad,
        )
        return grad


class _TracedScorer:
    """Scores chunks of logits by any function, which autograd traces again for the gradient."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], TokenScores], scoring: Scoring) -> None:
        self._function, self.scoring = function, scoring

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Score a chunk."""
        return self._function(logits, targets)[:3]

    def scores(self, parts: Sequence[torch.Tensor | None]) -> tuple[TokenScores, Sequence[torch.Tensor | None]]:
        """Return the scores of all chunks, and no statistics: `gradient` recomputes everything."""
        return TokenScores(*parts), ()  # type: ignore[arg-type]

    def prepared(
        self, statistics: Sequence[torch.Tensor | None], grads: tuple[torch.Tensor, torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients by logprobs and entropy."""
        return grads

    def gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, parts: Sequence[torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient by a chunk's logits in a dtype, given its gradients by logprobs and entropy."""
        with torch.enable_grad():
            logprobs, entropy, *_ = self._function(logits.requires_grad_(), targets)
        outputs = [logprobs, entropy] if self.scoring.entropy_gradient else [logprobs]
        (grad,) = torch.autograd.grad(outputs, logits, parts[: len(outputs)])
        return grad.to(dtype)


ChunkScorer = _PlainScorer | _TracedScorer


def score_in_chunks(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, tokens: int) -> TokenScores:
    """Score [N] targets from [N, dim] and [V, dim], a chunk of tokens at a time."""
    return TokenScores(*_ChunkedScores.apply(hidden, weight, targets, _PlainScorer(DEFAULT_SCORING), tokens))


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
        scorer: ChunkScorer,
        tokens: int,
        *adapter: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Score [N] or [N, K] targets from [N, dim] and [V, dim], a chunk of tokens at a time.

        Args:
            adapter: factors of an adapter's logits, [N, rank] and [V, rank] in the logits' dtype; none without one.
        """
        factor = _factor(weight)
        chunks, buffer = zip(hidden.split(tokens), targets.split(tokens), strict=True), _room(hidden, factor, tokens)
        parts, logits = list[tuple[torch.Tensor | None, ...]](), None
        for number, (rows, chunk_targets) in enumerate(chunks):
            logits = None  # before the next ones take its memory
            logits = _product(rows, factor, buffer)
            if adapter:
                logits.addmm_(adapter[0][number * tokens : (number + 1) * tokens], adapter[1].t())
            parts.append(scorer.score(logits, chunk_targets))
        (logprobs, entropy, squares, _), statistics = scorer.scores(
            [_joined(part) for part in zip(*parts, strict=True)]
        )
        ctx.save_for_backward(hidden, weight, targets, *adapter, *statistics)
        ctx.num_factors = len(adapter)
        # The backward pass begins with the last chunk, which it need not compute again. On CPU, it would take a second
        # buffer.
        ctx.logits = logits if buffer is None and any(ctx.needs_input_grad) else None
        ctx.scorer, ctx.tokens, ctx.place = scorer, tokens, sum_place(weight)
        fixed = (squares,) if scorer.scoring.entropy_gradient else (entropy, squares)
        ctx.mark_non_differentiable(*(tensor for tensor in fixed if tensor is not None))
        return logprobs, entropy, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, *tensors = ctx.saved_tensors
        adapter, statistics = tensors[: ctx.num_factors], tensors[ctx.num_factors :]
        adapter_grads = [torch.zeros_like(factor) for factor in adapter]
        factor, grad_hidden = _factor(weight), torch.empty_like(hidden)
        grad_weight, buffer = None, _room(hidden, factor, ctx.tokens)
        sum_dtype = widened(hidden[:0]).dtype
        # Statistics of all tokens are prepared at once; each chunk takes its slice.
        prepared = ctx.scorer.prepared(statistics, (grad_logprobs, grad_entropy))
        logits, ctx.logits = ctx.logits, None
        # The last chunk comes first, as the forward pass may have kept its logits.
        for start in reversed(range(0, len(targets), ctx.tokens)):
            chunk = slice(start, start + ctx.tokens)
            rows = hidden[chunk]
            parts = [None if values is None else values[chunk] for values in prepared]
            if logits is None:
                logits = _product(rows, factor, buffer)
                if adapter:
                    logits.addmm_(adapter[0][chunk], adapter[1].t())
            # The adapter's gradients are computed before rounding; only the weight's product takes the narrower
            # gradient.
            dtype = logits.dtype if adapter else factor.dtype
            grad, logits = ctx.scorer.gradient(logits, targets[chunk], parts, dtype), None
            if adapter:
                torch.mm(grad, adapter[1], out=adapter_grads[0][chunk])
                adapter_grads[1].addmm_(grad.t(), adapter[0][chunk])
                grad = grad.to(factor.dtype)
            if factor.dtype == hidden.dtype:
                torch.mm(grad, factor, out=grad_hidden[chunk])
            else:
                grad_hidden[chunk] = grad.mm(factor)
            # A place accumulates in float32 over all rows of the update; gradients that autograd adds up are rounded
            # for each row.
            if ctx.needs_input_grad[1] and ctx.place is not None:
                ctx.place.add_product(grad.t(), rows.to(grad.dtype))
            elif ctx.needs_input_grad[1]:
                grad_weight = added(grad_weight, grad.t(), rows.to(grad.dtype), sum_dtype)
            # Free it before the next chunk's logits are allocated.
            del grad
        return grad_hidden, grad_weight, None, None, None, *adapter_grads


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Join the chunks of a tensor, None if they have none."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _chunk_tokens(targets: int, vocab: int) -> int:
    """Return how many targets to score at a time: as many as the device's memory allows, in chunks of about equal
    size."""
    chunk_bytes = max(HEAD_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, gpu_bytes() // _CHUNK_SHARE))
    tokens = max(1, chunk_bytes // (4 * vocab))
    even = -(-targets // max(1, -(-targets // tokens)))
    return min(tokens, -(-even // _TILE) * _TILE) if device_type() == "cuda" else tokens


_TILE = 128
"""Rows of a product that a GPU computes together."""


def _factor(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the dtype that `_product` needs: unchanged where products have float32 sums."""
    return weight if keeps_sums(weight) else widened(weight)


def _room(hidden: torch.Tensor, factor: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Allocate the logits of a chunk, which all chunks share; on CUDA, torch's allocator does that as well."""
    return None if keeps_sums(factor) else factor.new_empty(min(tokens, len(hidden)), len(factor))


def _product(hidden: torch.Tensor, factor: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits, [N, V] float32, or float64 for float64 inputs; in the first rows of `buffer`, if given.

    On CUDA, products of bfloat16 keep their float32 sums unrounded, as in vLLM's head.
    """
    if factor.dtype in (torch.float32, torch.float64):
        out = None if buffer is None else buffer[: len(hidden)]
        return torch.mm(hidden.to(factor.dtype), factor.t(), out=out)
    return torch.mm(hidden, factor.t(), out_dtype=torch.float32)
