"""Triton kernels of `expert_products`. Import them only where they run. Parameters have no annotations but Triton's
own, as Triton resolves them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_gradient_kernel(  # type: ignore[no-untyped-def]
    grad,
    x,
    ends,
    total,
    outputs,
    inputs,
    grad_stride,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of an expert's gradient, see `weight_gradient`, or add it; 0 for an expert without rows."""
    # Each program computes one tile of grad^T x, [outputs, inputs], over the rows of one expert.
    tiles = tl.cdiv(inputs, BLOCK_N)
    expert = tl.program_id(1)
    output = (tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < outputs
    is_column = column < inputs
    first = 0
    if expert > 0:
        first = tl.load(ends + expert - 1)
    end = tl.load(ends + expert)
    place = tl.arange(0, BLOCK_K)
    # In 64 bits: rows times their stride may exceed 2^31 elements.
    row = first + place.to(tl.int64)
    left = grad + row[None, :] * grad_stride + output[:, None]
    right = x + row[:, None] * inputs + column[None, :]
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, end - first, BLOCK_K):
        is_row = place < end - first - start
        left_values = tl.load(left, mask=is_output[:, None] & is_row[None, :], other=0.0)
        right_values = tl.load(right, mask=is_row[:, None] & is_column[None, :], other=0.0)
        product = tl.dot(left_values, right_values, product)
        left += BLOCK_K * grad_stride
        right += BLOCK_K * inputs
    out = total + (expert.to(tl.int64) * outputs + output[:, None]) * inputs + column[None, :]
    is_inside = is_output[:, None] & is_column[None, :]
    if ADDS:
        product += tl.load(out, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out, product.to(total.dtype.element_ty), mask=is_inside)


@triton.jit
def expert_bias_kernel(  # type: ignore[no-untyped-def]
    x, bias, ends, experts, outputs, share, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add a share of its expert's bias to a row; a row of no expert keeps its values."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EXPERTS)
    # A row's expert is the number of experts whose rows end at or before it; the count reaches `experts` for no expert.
    stops = tl.load(ends + index, mask=index < experts, other=2147483647)
    expert = tl.sum((stops <= row).to(tl.int32), axis=0)
    column = tl.arange(0, BLOCK)
    is_inside = column < tl.where(expert < experts, outputs, 0)
    place = x + row * outputs + column
    value = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    added = (tl.load(bias + expert * outputs + column, mask=is_inside, other=0.0).to(tl.float32) * share).to(kind)
    tl.store(place, (value + added.to(tl.float32)).to(kind), mask=is_inside)


@triton.jit
def expert_sums_kernel(  # type: ignore[no-untyped-def]
    grad, ends, sums, outputs, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the sum of an expert's rows for a block of columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < outputs
    expert = tl.program_id(1)
    first = 0
    if expert > 0:
        first = tl.load(ends + expert - 1)
    end = tl.load(ends + expert)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        values = tl.load(grad + row * outputs + column[None, :], mask=(row < end) & is_inside[None, :], other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    tl.store(sums + expert * outputs + column, total.to(sums.dtype.element_ty), mask=is_inside)
