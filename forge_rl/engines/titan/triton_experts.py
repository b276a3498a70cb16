"""Triton kernels of `expert_rows` and `expert_choice`. Import them only where they run. Parameters have no annotations
but Triton's own, as Triton resolves them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_kernel(x, places, rows, choices, dim, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a token to its places."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < dim
    value = tl.load(x + token * dim + columns, mask=is_inside, other=0.0)
    for choice in range(choices):
        place = tl.load(places + token * choices + choice)
        tl.store(rows + place * dim + columns, value, mask=is_inside)


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    rows, scores, places, out, choices, dim, WEIGHS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up the rows at a token's places, weighted by its scores."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(choices):
        place = tl.load(places + token * choices + choice)
        value = tl.load(rows + place * dim + columns, mask=is_inside, other=0.0).to(tl.float32)
        if WEIGHS:
            value *= tl.load(scores + token * choices + choice).to(tl.float32)
        total += value
    tl.store(out + token * dim + columns, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def sum_gradient_kernel(  # type: ignore[no-untyped-def]
    rows, scores, places, grad, grad_rows, grad_scores, choices, dim, BLOCK: tl.constexpr
):
    """Write the gradients by the rows at a token's places, and by its scores."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < dim
    slope = tl.load(grad + token * dim + columns, mask=is_inside, other=0.0).to(tl.float32)
    for choice in range(choices):
        index = token * choices + choice
        row = tl.load(places + index) * dim + columns
        value = tl.load(rows + row, mask=is_inside, other=0.0).to(tl.float32)
        score = tl.load(scores + index).to(tl.float32)
        tl.store(grad_rows + row, (slope * score).to(grad_rows.dtype.element_ty), mask=is_inside)
        tl.store(grad_scores + index, tl.sum(slope * value, axis=0).to(grad_scores.dtype.element_ty))


@triton.jit
def clamped_swiglu_kernel(hidden, out, elements, limit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write gpt-oss's activation, see `clamped_swiglu`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < elements
    gate = tl.load(hidden + 2 * place, mask=is_inside, other=0.0).to(tl.float32)
    linear = tl.load(hidden + 2 * place + 1, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    linear = tl.minimum(tl.maximum(linear, -limit), limit)
    # gate sigmoid(1.702 gate) (1 + linear), where the gate is clamped from above and the linear part on both sides.
    value = gate / (1.0 + tl.exp(-1.702 * gate)) * (1.0 + linear)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def clamped_swiglu_gradient_kernel(  # type: ignore[no-untyped-def]
    hidden, grad, grad_hidden, elements, limit, BLOCK: tl.constexpr
):
    """Write the gradient of gpt-oss's activation, which is 0 beyond the limits."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < elements
    kind = grad_hidden.dtype.element_ty
    raw_gate = tl.load(hidden + 2 * place, mask=is_inside, other=0.0).to(tl.float32)
    raw_linear = tl.load(hidden + 2 * place + 1, mask=is_inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.minimum(raw_gate, limit)
    linear = tl.minimum(tl.maximum(raw_linear, -limit), limit)
    sigmoid = 1.0 / (1.0 + tl.exp(-1.702 * gate))
    by_gate = slope * (1.0 + linear) * sigmoid * (1.0 + 1.702 * gate * (1.0 - sigmoid))
    by_linear = slope * gate * sigmoid
    tl.store(grad_hidden + 2 * place, tl.where(raw_gate <= limit, by_gate, 0.0).to(kind), mask=is_inside)
    is_free = (raw_linear >= -limit) & (raw_linear <= limit)
    tl.store(grad_hidden + 2 * place + 1, tl.where(is_free, by_linear, 0.0).to(kind), mask=is_inside)


@triton.jit
def _scores(logits, token, experts, column, SIGMOID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a token's scores of all experts, and 0 past the last one."""
    logit = tl.load(logits + token * experts + column, mask=column < experts, other=float("-inf"))
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    exp = tl.exp(logit - tl.max(logit, axis=0))
    return exp / tl.sum(exp, axis=0)


@triton.jit
def choice_kernel(  # type: ignore[no-untyped-def]
    logits,
    bias,
    weights,
    expert_ids,
    experts,
    choices,
    scale,
    bias_stride,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a token's experts and their weights, see `chosen_experts`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_expert = column < experts
    score = _scores(logits, token, experts, column, SIGMOID)
    rank = score
    if BIASED:
        rank += tl.load(bias + token * bias_stride + column, mask=is_expert, other=0.0)
    # Chosen experts are marked by -inf. All other values are finite, NaN first, so that choices are distinct experts
    # whatever the logits are.
    rank = tl.where(rank == rank, tl.maximum(rank, -3e38), 3.3e38)
    rank = tl.where(is_expert, rank, float("-inf"))
    place = tl.full((BLOCK,), -1, tl.int32)
    for choice in range(choices):
        is_next = column == tl.argmax(rank, axis=0)
        rank = tl.where(is_next, float("-inf"), rank)
        place = tl.where(is_next, choice, place)
    is_chosen = place >= 0
    if NORMALISES:
        score /= tl.sum(tl.where(is_chosen, score, 0.0), axis=0) + 1e-20
    tl.store(expert_ids + token * choices + place, column.to(tl.int64), mask=is_chosen)
    tl.store(weights + token * choices + place, score * scale, mask=is_chosen)


@triton.jit
def choice_gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    expert_ids,
    grad,
    grad_logits,
    experts,
    choices,
    scale,
    SIGMOID: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient by a token's logits, given that by the weights of its chosen experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    score = _scores(logits, token, experts, column, SIGMOID)
    first = token * choices
    slope = tl.zeros((BLOCK,), tl.float32)
    is_chosen = column < 0
    for choice in range(choices):
        is_expert = column == tl.load(expert_ids + first + choice)
        slope += tl.where(is_expert, tl.load(grad + first + choice) * scale, 0.0)
        is_chosen |= is_expert
    if NORMALISES:
        # For w_i = s_i / S with S the sum of the chosen scores: dL/ds_i = (g_i - sum_j g_j w_j) / S.
        total = tl.sum(tl.where(is_chosen, score, 0.0), axis=0) + 1e-20
        mean = tl.sum(slope * score, axis=0) / total
        slope = tl.where(is_chosen, (slope - mean) / total, 0.0)
    slope *= score
    # Sigmoid: ds/dx = s (1 - s). Softmax: dL/dx_i = s_i (g_i - sum_j g_j s_j).
    result = slope * (1.0 - score) if SIGMOID else slope - score * tl.sum(slope, axis=0)
    tl.store(grad_logits + token * experts + column, result, mask=column < experts)
