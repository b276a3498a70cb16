"""Triton kernels of `fused_products`. Import them only where they run. Parameters have no annotations but Triton's own,
as Triton resolves them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    a, b, row, column, inner, a_stride, column_stride, inner_stride, BLOCK_K: tl.constexpr
):
    """Return a tile of a b in float32, from rows of a, [., inner], and columns of b, which may have any strides."""
    place = tl.arange(0, BLOCK_K)
    left = a + row[:, None].to(tl.int64) * a_stride + place[None, :]
    right = b + column[None, :].to(tl.int64) * column_stride + place[:, None] * inner_stride
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(0, inner, BLOCK_K):
        is_inside = place < inner - start
        left_values = tl.load(left, mask=is_inside[None, :], other=0.0)
        right_values = tl.load(right, mask=is_inside[:, None], other=0.0)
        total = tl.dot(left_values, right_values, total)
        left += BLOCK_K
        right += BLOCK_K * inner_stride
    return total


@triton.jit
def linear_sums_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    places,
    sums,
    target_logits,
    rows,
    vocab,
    dim,
    hidden_stride,
    weight_stride,
    targets,
    split_columns,
    temperature,
    SQUARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Reduce one split of a block of rows' logits by online softmax, see `linear_sums`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    is_row = row < rows
    # Not -inf: masked columns must not give -inf - -inf.
    largest = tl.full((BLOCK_M,), -3e38, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    weighted = tl.zeros((BLOCK_M,), tl.float32)
    squared = tl.zeros((BLOCK_M,), tl.float32)
    end = tl.minimum(vocab, (split + 1) * split_columns)
    for first in range(split * split_columns, end, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        # `_tile` masks only the inner dimension: indices past the end are clamped, and their results never stored.
        logits = _tile(
            hidden,
            weight,
            tl.minimum(row, rows - 1),
            tl.minimum(column, vocab - 1),
            dim,
            hidden_stride,
            weight_stride,
            1,
            BLOCK_K,
        )
        is_inside = column < end
        for target in range(targets):
            place = tl.load(places + row * targets + target, mask=is_row, other=-1)
            # The target's logit, if its column lies in this tile; the comparison selects at most one element per row.
            value = tl.sum(tl.where(column[None, :] == place[:, None], logits, 0.0), axis=1)
            is_here = is_row & (place >= first) & (place < tl.minimum(first + BLOCK_N, end))
            tl.store(target_logits + row * targets + target, value, mask=is_here)
        scaled = tl.where(is_inside[None, :], logits / temperature, float("-inf"))
        # Online softmax over x = logit / temperature, with running maximum m: the sums of e^(x-m), (x-m) e^(x-m) and
        # e^(2(x-m)) are carried over to the new maximum. Masked columns have x = -inf, where 0 * -inf would be NaN.
        maximum = tl.maximum(largest, tl.max(scaled, axis=1))
        factor = tl.exp(largest - maximum)
        shifted = scaled - maximum[:, None]
        exp = tl.exp(shifted)
        weighted = factor * (weighted + total * (largest - maximum))
        weighted += tl.sum(tl.where(exp == 0.0, 0.0, exp * shifted), axis=1)
        total = factor * total + tl.sum(exp, axis=1)
        if SQUARES:
            squared = factor * factor * squared + tl.sum(exp * exp, axis=1)
        largest = maximum
    out = sums + split * rows + row
    size = tl.num_programs(1) * rows
    tl.store(out, largest, mask=is_row)
    tl.store(out + size, total, mask=is_row)
    tl.store(out + 2 * size, weighted, mask=is_row)
    tl.store(out + 3 * size, squared, mask=is_row)


@triton.jit
def linear_gradient_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    statistics,
    places,
    slopes,
    grad,
    rows,
    columns,
    dim,
    hidden_stride,
    weight_stride,
    targets,
    temperature,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of the gradient by the logits of a part of the vocabulary, see `linear_gradient`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < rows
    # Clamped for `_tile`, as in `linear_sums_kernel`.
    logits = _tile(
        hidden,
        weight,
        tl.minimum(row, rows - 1),
        tl.minimum(column, columns - 1),
        dim,
        hidden_stride,
        weight_stride,
        1,
        BLOCK_K,
    )
    # Gradient by a logit: each target's slope at its column, less p times the sum of slopes (`slope`),
    # and -p (log p + H) times the slope of the entropy H. The clamp keeps 0 * -inf out.
    logp = logits / temperature - tl.load(statistics + row, mask=is_row, other=0.0)[:, None]
    entropy = tl.load(statistics + rows + row, mask=is_row, other=0.0)[:, None]
    slope = tl.load(statistics + 2 * rows + row, mask=is_row, other=0.0)[:, None]
    entropy_slope = tl.load(statistics + 3 * rows + row, mask=is_row, other=0.0)[:, None]
    value = -tl.exp(logp) * (slope + entropy_slope * (tl.maximum(logp, -1e4) + entropy))
    for target in range(targets):
        place = tl.load(places + row * targets + target, mask=is_row, other=-1)
        target_slope = tl.load(slopes + row * targets + target, mask=is_row, other=0.0)
        value += tl.where(column[None, :] == place[:, None], target_slope[:, None], 0.0)
    out = grad + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out, value.to(grad.dtype.element_ty), mask=is_row[:, None] & (column < columns)[None, :])


@triton.jit
def gated_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    joint,
    hidden,
    rows,
    width,
    dim,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of both products and of silu(a) b, see `gated_values`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Columns of both weights alternate, so that one tile has the two that belong together.
    first = tl.program_id(1) * (BLOCK_N // 2)
    pair = tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(first + pair // 2, width - 1) + (pair % 2) * width
    products = _tile(x, weight, tl.minimum(row, rows - 1), weight_row, dim, x_stride, dim, 1, BLOCK_K)
    gate, up = tl.split(tl.reshape(products, (BLOCK_M, BLOCK_N // 2, 2)))
    # Rounded like the results of a separate product, so that both ways give the same values.
    kind = hidden.dtype.element_ty
    gate = gate.to(kind)
    up = up.to(kind)
    column = first + tl.arange(0, BLOCK_N // 2)
    is_inside = (row < rows)[:, None] & (column < width)[None, :]
    out = joint + row[:, None].to(tl.int64) * 2 * width + column[None, :]
    tl.store(out, gate, mask=is_inside)
    tl.store(out + width, up, mask=is_inside)
    gate = gate.to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    value = (silu * up.to(tl.float32)).to(kind)
    tl.store(hidden + row[:, None].to(tl.int64) * width + column[None, :], value, mask=is_inside)


@triton.jit
def gated_gradient_kernel(  # type: ignore[no-untyped-def]
    grad,
    weight,
    joint,
    joint_grad,
    rows,
    width,
    dim,
    grad_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of both gradients of silu(a) b, see `gated_gradient`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The tile of dL/d hidden = grad W, rounded as the separate product would round it.
    slope = _tile(
        grad,
        weight,
        tl.minimum(row, rows - 1),
        tl.minimum(column, width - 1),
        dim,
        grad_stride,
        1,
        width,
        BLOCK_K,
    )
    kind = joint_grad.dtype.element_ty
    slope = slope.to(kind).to(tl.float32)
    is_inside = (row < rows)[:, None] & (column < width)[None, :]
    # With a = gate, b = up and s = sigmoid(a): dL/da = g b s (1 + a (1 - s)), and dL/db = g a s.
    place = row[:, None].to(tl.int64) * 2 * width + column[None, :]
    gate = tl.load(joint + place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(joint + place + width, mask=is_inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    out = joint_grad + place
    tl.store(out, (slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(kind), mask=is_inside)
    tl.store(out + width, (slope * gate * sigmoid).to(kind), mask=is_inside)
