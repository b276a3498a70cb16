"""Triton kernels of `block_kernels`; to be imported only where they run. Triton resolves annotations, so that
there are none but its own."""

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
    for token in range(program, tokens, programs):
        place = tl.cast(token, tl.int64) * dim + columns
        value = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + token)
        part += slope * value * inverse
        slope *= scale
        dot = tl.sum(slope * value, axis=0) / dim
        result = inverse * (slope - value * (inverse * inverse * dot))
        if ADDS:
            result += tl.load(residual + place, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=is_inside)
    tl.store(parts + program * dim + columns, part, mask=is_inside)


@triton.jit
def norm_rope_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    cache,
    out,
    heads,
    dim,
    eps,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Normalise a token's heads and rotate them, see `norm_rope`."""
    token = tl.program_id(0).to(tl.int64)
    half = dim // 2
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_inside = (head < heads) & (column < half)
    low_place = (token * heads + head) * dim + column
    kind = out.dtype.element_ty
    low = tl.load(x + low_place, mask=is_inside, other=0.0).to(tl.float32)
    high = tl.load(x + low_place + half, mask=is_inside, other=0.0).to(tl.float32)
    if NORMS:
        inverse = 1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / dim + eps)
        low_scale = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
        high_scale = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
        low = (low * inverse[:, None] * low_scale).to(kind).to(tl.float32)
        high = (high * inverse[:, None] * high_scale).to(kind).to(tl.float32)
    cos = tl.load(cache + token * 2 * dim + column, mask=column < half, other=0.0)
    sin = tl.load(cache + token * 2 * dim + dim + column, mask=column < half, other=0.0)
    tl.store(out + low_place, (low * cos - high * sin).to(kind), mask=is_inside)
    tl.store(out + low_place + half, (high * cos + low * sin).to(kind), mask=is_inside)


@triton.jit
def norm_rope_gradient_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    cache,
    grad,
    grad_x,
    parts,
    tokens,
    heads,
    dim,
    programs,
    eps,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write the gradients of every `programs`-th token, and this program's part of the weight's."""
    program = tl.program_id(0)
    half = dim // 2
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_inside = (head < heads) & (column < half)
    kind = grad_x.dtype.element_ty
    low_part = tl.zeros((1, HALF), tl.float32)
    high_part = tl.zeros((1, HALF), tl.float32)
    for token in range(program, tokens, programs):
        low_place = (tl.cast(token, tl.int64) * heads + head) * dim + column
        cos = tl.load(cache + token * 2 * dim + column, mask=column < half, other=0.0)
        sin = tl.load(cache + token * 2 * dim + dim + column, mask=column < half, other=0.0)
        low_turned = tl.load(grad + low_place, mask=is_inside, other=0.0).to(tl.float32)
        high_turned = tl.load(grad + low_place + half, mask=is_inside, other=0.0).to(tl.float32)
        low_slope = low_turned * cos + high_turned * sin
        high_slope = high_turned * cos - low_turned * sin
        if NORMS:
            low = tl.load(x + low_place, mask=is_inside, other=0.0).to(tl.float32)
            high = tl.load(x + low_place + half, mask=is_inside, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / dim + eps)
            inverse = inverse[:, None]
            low_part += tl.sum(low_slope * low * inverse, axis=0)[None, :]
            high_part += tl.sum(high_slope * high * inverse, axis=0)[None, :]
            low_slope *= tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
            high_slope *= tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
            dot = (tl.sum(low_slope * low, axis=1) + tl.sum(high_slope * high, axis=1))[:, None] / dim
            low_slope = inverse * (low_slope - low * (inverse * inverse * dot))
            high_slope = inverse * (high_slope - high * (inverse * inverse * dot))
        tl.store(grad_x + low_place, low_slope.to(kind), mask=is_inside)
        tl.store(grad_x + low_place + half, high_slope.to(kind), mask=is_inside)
    if NORMS:
        tl.store(parts + program * dim + column, low_part, mask=column < half)
        tl.store(parts + program * dim + half + column, high_part, mask=column < half)


@triton.jit
def swiglu_kernel(a, b, out, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write silu(a) b, see `swiglu`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < elements
    kind = out.dtype.element_ty
    gate = tl.load(a + place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(b + place, mask=is_inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + place, (silu * up).to(kind), mask=is_inside)


@triton.jit
def swiglu_gradient_kernel(  # type: ignore[no-untyped-def]
    a, b, grad, grad_a, grad_b, elements, BLOCK: tl.constexpr
):
    """Write both gradients of silu(a) b."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < elements
    kind = grad_a.dtype.element_ty
    gate = tl.load(a + place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(b + place, mask=is_inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(grad_a + place, (slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(kind), mask=is_inside)
    tl.store(grad_b + place, (slope * gate * sigmoid).to(kind), mask=is_inside)


@triton.jit
def sum_parts_kernel(parts, out, count, dim, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up a block of columns of all parts."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        values = tl.load(parts + part * dim + columns[None, :], mask=(part < count) & is_inside[None, :], other=0.0)
        total += tl.sum(values, axis=0)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=is_inside)
