"""Triton kernels of `score_kernels`; to be imported only where they run. Triton resolves annotations, so that
there are none but its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums_kernel(  # type: ignore[no-untyped-def]
    logits,
    out,
    stride,
    rows,
    vocab,
    temperature,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce a row of logits, see `score_sums`, as an online softmax."""
    # int64, as row * stride may exceed 32 bits.
    row = tl.program_id(0).to(tl.int64)
    # Not -inf: a block of masked logits must not give -inf - -inf.
    largest = tl.full((), -3e38, tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    squared = tl.zeros((), tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        loaded = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
        scaled = loaded.to(tl.float32) / temperature
        maximum = tl.maximum(largest, tl.max(scaled, axis=0))
        factor = tl.exp(largest - maximum)
        shifted = scaled - maximum
        exp = tl.exp(shifted)
        # A larger maximum scales the sums of e by `factor`, and shifts each (z - m) in the weighted one.
        weighted = factor * (weighted + total * (largest - maximum))
        # 0 * -inf would be NaN for masked logits.
        weighted += tl.sum(tl.where(exp == 0.0, 0.0, exp * shifted), axis=0)
        total = factor * total + tl.sum(exp, axis=0)
        if SQUARES:
            squared = factor * factor * squared + tl.sum(exp * exp, axis=0)
        largest = maximum
    tl.store(out + row, largest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, squared)


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    grad,
    statistics,
    places,
    slopes,
    stride,
    grad_stride,
    statistics_stride,
    vocab,
    targets,
    temperature,
    BLOCK: tl.constexpr,
):
    """Write a block of a row's gradient, see `score_gradient`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < vocab
    loaded = tl.load(logits + row * stride + columns, mask=is_inside, other=0.0)
    logp = loaded.to(tl.float32) / temperature - tl.load(statistics + row)
    entropy = tl.load(statistics + statistics_stride + row)
    slope = tl.load(statistics + 2 * statistics_stride + row)
    entropy_slope = tl.load(statistics + 3 * statistics_stride + row)
    value = -tl.exp(logp) * (slope + entropy_slope * (tl.maximum(logp, -1e4) + entropy))
    for target in range(targets):
        place = tl.load(places + row * targets + target)
        # The targets' own slopes; a place outside of this block matches no column.
        value += tl.where(columns == place, tl.load(slopes + row * targets + target), 0.0)
    tl.store(grad + row * grad_stride + columns, value.to(grad.dtype.element_ty), mask=is_inside)
