"""Triton kernels of `block_kernels`. Import them only where they run. Parameters have no annotations but Triton's own,
as Triton resolves them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    delta,
    weight,
    total,
    out,
    inverses,
    dim,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a token's two vectors and normalise the sum, see `add_norm`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < dim
    place = token * dim + columns
    kind = out.dtype.element_ty
    value = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + place, mask=is_inside, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(total + place, rounded, mask=is_inside)
        # The norm must see the rounded sum, the value that later layers read.
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
    scale = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * inverse * scale).to(kind), mask=is_inside)
    tl.store(inverses + token, inverse)


@triton.jit
def norm_gradient_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    inverses,
    grad,
    residual,
    grad_x,
    parts,
    tokens,
    dim,
    parts_stride,
    programs,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of every `programs`-th token, and this program's part of the weight's."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < dim
    scale = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    # Programs stride over tokens, so each sums its part of the weight's gradient in registers and writes it once.
    for token in range(program, tokens, programs):
        place = tl.cast(token, tl.int64) * dim + columns
        value = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + token)
        part += slope * value * inverse
        slope *= scale
        # With r the inverse RMS and g = dL/dy: dL/dw = sum g x r, and dL/dx = r w g - x r^3 mean(w g x).
        dot = tl.sum(slope * value, axis=0) / dim
        result = inverse * (slope - value * (inverse * inverse * dot))
        if ADDS:
            result += tl.load(residual + place, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=is_inside)
    tl.store(parts + program * parts_stride + columns, part, mask=is_inside)


@triton.jit
def norm_rope_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    other_weight,
    cache,
    out,
    heads,
    first,
    copied,
    dim,
    stride,
    eps,
    NORMS: tl.constexpr,
    OTHERS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Normalise a token's heads and rotate them, see `rotated_heads`."""
    token = tl.program_id(0).to(tl.int64)
    half = dim // 2
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_inside = (head < heads) & (column < half)
    place = head * dim + column
    kind = out.dtype.element_ty
    low = tl.load(x + token * stride + place, mask=is_inside, other=0.0).to(tl.float32)
    high = tl.load(x + token * stride + place + half, mask=is_inside, other=0.0).to(tl.float32)
    if NORMS:
        inverse = 1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / dim + eps)
        low_scale = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
        high_scale = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
        if OTHERS:
            other_low = tl.load(other_weight + column, mask=column < half, other=0.0).to(tl.float32)
            other_high = tl.load(other_weight + half + column, mask=column < half, other=0.0).to(tl.float32)
            low_scale = tl.where(head < first, low_scale, other_low)
            high_scale = tl.where(head < first, high_scale, other_high)
        # Rounded between norm and rotation, where torch's separate operations round.
        low = (low * inverse[:, None] * low_scale).to(kind).to(tl.float32)
        high = (high * inverse[:, None] * high_scale).to(kind).to(tl.float32)
    cos = tl.load(cache + token * 2 * dim + column, mask=column < half, other=0.0)
    sin = tl.load(cache + token * 2 * dim + dim + column, mask=column < half, other=0.0)
    token_out = out + token * (heads * dim + copied)
    # Rotate-half RoPE: (low, high) -> (low cos - high sin, high cos + low sin).
    tl.store(token_out + place, (low * cos - high * sin).to(kind), mask=is_inside)
    tl.store(token_out + place + half, (high * cos + low * sin).to(kind), mask=is_inside)
    if COPIES:
        element = heads * dim + tl.arange(0, COPIED)
        is_copied = element < heads * dim + copied
        tl.store(token_out + element, tl.load(x + token * stride + element, mask=is_copied, other=0.0), mask=is_copied)


@triton.jit
def norm_rope_gradient_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    other_weight,
    cache,
    grad,
    other_grad,
    copied_grad,
    grad_x,
    parts,
    tokens,
    first,
    num_others,
    copied,
    dim,
    stride,
    parts_stride,
    programs,
    eps,
    NORMS: tl.constexpr,
    OTHERS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Write the gradients of every `programs`-th token, and this program's part of the weights', see
    `heads_gradient`."""
    program = tl.program_id(0)
    half = dim // 2
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_first = (head < first) & (column < half)
    is_other = (head >= first) & (head < first + num_others) & (column < half)
    is_inside = is_first | is_other
    place = head * dim + column
    kind = grad_x.dtype.element_ty
    low_part = tl.zeros((1, HALF), tl.float32)
    high_part = tl.zeros((1, HALF), tl.float32)
    other_low_part = tl.zeros((1, HALF), tl.float32)
    other_high_part = tl.zeros((1, HALF), tl.float32)
    for index in range(program, tokens, programs):
        token = tl.cast(index, tl.int64)
        cos = tl.load(cache + token * 2 * dim + column, mask=column < half, other=0.0)
        sin = tl.load(cache + token * 2 * dim + dim + column, mask=column < half, other=0.0)
        grad_place = token * first * dim + place
        low_turned = tl.load(grad + grad_place, mask=is_first, other=0.0).to(tl.float32)
        high_turned = tl.load(grad + grad_place + half, mask=is_first, other=0.0).to(tl.float32)
        if OTHERS:
            other_place = token * num_others * dim + place - first * dim
            low_turned += tl.load(other_grad + other_place, mask=is_other, other=0.0).to(tl.float32)
            high_turned += tl.load(other_grad + other_place + half, mask=is_other, other=0.0).to(tl.float32)
        # The transpose of the rotation.
        low_slope = low_turned * cos + high_turned * sin
        high_slope = high_turned * cos - low_turned * sin
        if NORMS:
            low = tl.load(x + token * stride + place, mask=is_inside, other=0.0).to(tl.float32)
            high = tl.load(x + token * stride + place + half, mask=is_inside, other=0.0).to(tl.float32)
            # Recomputed from x, which is loaded anyway, instead of being saved per head.
            inverse = 1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / dim + eps)
            inverse = inverse[:, None]
            low_share = low_slope * low * inverse
            high_share = high_slope * high * inverse
            low_part += tl.sum(tl.where(is_first, low_share, 0.0), axis=0)[None, :]
            high_part += tl.sum(tl.where(is_first, high_share, 0.0), axis=0)[None, :]
            low_scale = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
            high_scale = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
            if OTHERS:
                other_low_part += tl.sum(tl.where(is_other, low_share, 0.0), axis=0)[None, :]
                other_high_part += tl.sum(tl.where(is_other, high_share, 0.0), axis=0)[None, :]
                other_low = tl.load(other_weight + column, mask=column < half, other=0.0).to(tl.float32)
                other_high = tl.load(other_weight + half + column, mask=column < half, other=0.0).to(tl.float32)
                low_scale = tl.where(head < first, low_scale, other_low)
                high_scale = tl.where(head < first, high_scale, other_high)
            low_slope *= low_scale
            high_slope *= high_scale
            dot = (tl.sum(low_slope * low, axis=1) + tl.sum(high_slope * high, axis=1))[:, None] / dim
            # The gradient of RMSNorm, as in `norm_gradient_kernel`, over one head's elements.
            low_slope = inverse * (low_slope - low * (inverse * inverse * dot))
            high_slope = inverse * (high_slope - high * (inverse * inverse * dot))
        heads_dim = (first + num_others) * dim
        out = grad_x + token * (heads_dim + copied)
        tl.store(out + place, low_slope.to(kind), mask=is_inside)
        tl.store(out + place + half, high_slope.to(kind), mask=is_inside)
        if COPIES:
            element = tl.arange(0, COPIED)
            values = tl.load(copied_grad + token * copied + element, mask=element < copied, other=0.0)
            tl.store(out + heads_dim + element, values, mask=element < copied)
    if NORMS:
        room = parts + program * parts_stride
        tl.store(room + column, low_part, mask=column < half)
        tl.store(room + half + column, high_part, mask=column < half)
        if OTHERS:
            tl.store(room + dim + column, other_low_part, mask=column < half)
            tl.store(room + dim + half + column, other_high_part, mask=column < half)


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    a, b, out, elements, width, a_stride, b_stride, BLOCK: tl.constexpr
):
    """Write silu(a) b, see `swiglu_values`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < elements
    row, column = place // width, place % width
    kind = out.dtype.element_ty
    gate = tl.load(a + row * a_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(b + row * b_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    # Rounded after silu, as torch's separate operations do.
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + place, (silu * up).to(kind), mask=is_inside)


@triton.jit
def swiglu_gradient_kernel(  # type: ignore[no-untyped-def]
    a, b, grad, joint, elements, width, a_stride, b_stride, BLOCK: tl.constexpr
):
    """Write both gradients of silu(a) b, one after the other in each row."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < elements
    row, column = place // width, place % width
    kind = joint.dtype.element_ty
    gate = tl.load(a + row * a_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(b + row * b_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
    # With s = sigmoid(gate): dL/d gate = g up s (1 + gate (1 - s)), and dL/d up = g gate s.
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    out = joint + row * 2 * width + column
    tl.store(out, (slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(kind), mask=is_inside)
    tl.store(out + width, (slope * gate * sigmoid).to(kind), mask=is_inside)


@triton.jit
def sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts, out, count, dim, stride, ADDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the sum of a block of columns of all parts, or add it."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < dim
    total = tl.zeros((BLOCK,), tl.float32)
    if ADDS:
        total += tl.load(out + columns, mask=is_inside, other=0.0).to(tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        values = tl.load(parts + part * stride + columns[None, :], mask=(part < count) & is_inside[None, :], other=0.0)
        total += tl.sum(values, axis=0)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=is_inside)
