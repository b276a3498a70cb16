"""Linear layers of experts over rows sorted by expert, whose backward passes add weights' gradients up without a copy.

Results and the rows' gradients come from torch's grouped products. These cannot add to their output, so a weight's
gradient is a product in Triton, which adds to the float32 sum. Biases are added, and their gradients summed, by each
row's expert, without an index of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from forge_rl.engines.titan.block_kernels import has_kernels, power_of_two, swiglu_gradient, swiglu_values, warps
from forge_rl.engines.titan.gradient_sums import SumPlace, sum_place

_TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
"""Outputs and inputs of a weight whose gradient a program computes, and rows that it loads at a time."""
_OPTIONS = {"num_warps": 8, "num_stages": 3}
_COLUMNS = {"ROWS": 64, "BLOCK": 64}
"""Rows and columns that a program loads at a time to sum up a bias's gradient."""


def expert_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows, [R, inputs], by their experts' weights, [E, outputs, inputs]: [R, outputs].

    Args:
        ends: [E] int32, the end of each expert's rows; rows past the last end belong to none, and their results and
            gradients are undefined.
    """
    out: torch.Tensor = _ExpertLinear.apply(x, weight, ends)
    return out


def expert_bias(x: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, shares: int = 1) -> torch.Tensor:
    """Add to each row, [R, outputs], its expert's bias, [E, outputs], over `shares`; x must not be used again.

    The bias gets its gradient as if `shares` were 1, since that is how many ranks add their results up.
    """
    out: torch.Tensor = _ExpertBias.apply(x, bias, ends, shares)
    return out


def joint_swiglu(joint: torch.Tensor) -> torch.Tensor:
    """Return silu(a) b of rows that hold a and b one after the other, [R, 2 width]: [R, width]."""
    out: torch.Tensor = _JointSwiGLU.apply(joint)
    return out


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.place = sum_place(weight)
        return _rows_product(x, weight.transpose(-2, -1), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _rows_product(grad, weight, ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        if ctx.place is None:
            return grad_x, weight_gradient(grad, x, ends, weight.dtype), None
        # Joint weights have a sum each: along dim 1, parts of a common one would not be contiguous.
        for place, part in ctx.place.parts(grad):
            _add_gradient(place, part, x, ends)
        return grad_x, None, None


class _ExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, shares: int) -> torch.Tensor:
        ctx.save_for_backward(ends)
        ctx.place, ctx.dtype = sum_place(bias), bias.dtype
        # The product that made x does not need it for its backward pass, so it can be overwritten.
        ctx.mark_dirty(x)
        if has_kernels(x, "experts"):
            _add_bias(x, bias.contiguous(), ends, shares)
            return x
        return x.add_((bias / shares).to(x.dtype)[_row_experts(len(x), ends)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        grad = grad.contiguous()
        if has_kernels(grad, "experts"):
            bias_grad: torch.Tensor = _bias_gradient(
                grad, ends, ctx.dtype if ctx.place is None else ctx.place.sum.dtype
            )
        else:
            # The extra last row collects gradients of rows that belong to no expert, and is cut off.
            bias_grad = grad.new_zeros(len(ends) + 1, grad.shape[1])
            bias_grad = bias_grad.index_put_((_row_experts(len(grad), ends, len(ends)),), grad, accumulate=True)[:-1]
            bias_grad = bias_grad.to(ctx.dtype)
        if ctx.place is None:
            return grad, bias_grad, None, None
        ctx.place.add(bias_grad)
        return grad, None, None, None


class _JointSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(joint)
        out: torch.Tensor = swiglu_values(*joint.chunk(2, dim=-1))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (joint,) = ctx.saved_tensors
        joint_grad: torch.Tensor = swiglu_gradient(*joint.chunk(2, dim=-1), grad.contiguous())
        return joint_grad


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient by the weights of `expert_linear`, [E, outputs, inputs], whose sums are in float32.

    Args:
        grad: by the layer's results, [R, outputs].
        x: the layer's rows, [R, inputs].
    """
    if _has_gradient_kernel(grad):
        gradient: torch.Tensor = _expert_gradient(grad, x.contiguous(), ends, dtype)
        return gradient
    if grad.dtype == torch.float64:
        starts, stops = [0, *ends[:-1].tolist()], ends.tolist()
        return torch.stack([grad[a:b].t() @ x[a:b] for a, b in zip(starts, stops, strict=True)])
    if not len(x):  # which torch's refuses
        return grad.new_zeros(len(ends), grad.shape[1], x.shape[1], dtype=dtype)
    # torch's takes no other strides.
    return torch._grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends).to(dtype)


def _add_gradient(place: SumPlace, grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
    """Add a weight's gradient up in its place; the kernel's sums are not rounded before."""
    total = place.sum.total(place.member)
    if total is not None and total.is_contiguous() and _has_gradient_kernel(grad):
        _add_expert_gradient(total, grad, x.contiguous(), ends)
    else:
        place.add(weight_gradient(grad, x, ends, place.sum.dtype))


def _has_gradient_kernel(grad: torch.Tensor) -> bool:
    return grad.dtype.itemsize == 2 and has_kernels(grad, "expert_gradients")


def _rows_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows by their experts' matrices, [E, inputs, outputs]; see `expert_linear`."""
    if not len(x):  # whose strides torch's product may refuse
        return x.new_zeros(0, weight.shape[-1])
    if x.dtype != torch.float64:  # of which torch has no grouped product
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    starts, stops = [0, *ends[:-1].tolist()], ends.tolist()
    products = [x[a:b] @ matrix for a, b, matrix in zip(starts, stops, weight, strict=True)]
    return torch.cat([*products, x.new_zeros(len(x) - stops[-1], weight.shape[-1])])


def _row_experts(rows: int, ends: torch.Tensor, last: int | None = None) -> torch.Tensor:
    """Return each row's expert, [R] int64, and for rows of none `last`, by default the last expert."""
    places = torch.arange(rows, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1 if last is None else last)


def _launch_gradient(
    total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, *, adds: bool
) -> None:
    from forge_rl.engines.titan.triton_expert_products import expert_gradient_kernel

    experts, outputs, inputs = total.shape
    tiles = -(-outputs // _TILE["BLOCK_M"]) * -(-inputs // _TILE["BLOCK_N"])
    expert_gradient_kernel[(tiles, experts)](
        grad, x, ends, total, outputs, inputs, grad.stride(0), ADDS=adds, **_TILE, **_OPTIONS
    )


@torch.library.custom_op("forge_rl::expert_gradient", mutates_args=())
def _expert_gradient(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total: torch.Tensor = _expert_gradient_output(grad, x, ends, dtype)
    _launch_gradient(total, grad, x, ends, adds=False)
    return total


@_expert_gradient.register_fake
def _expert_gradient_output(
    grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return grad.new_empty(len(ends), grad.shape[1], x.shape[1], dtype=dtype)


@torch.library.custom_op("forge_rl::expert_gradient_", mutates_args=("total",))
def _add_expert_gradient(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
    _launch_gradient(total, grad, x, ends, adds=True)


@_add_expert_gradient.register_fake
def _(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
    pass


@torch.library.custom_op("forge_rl::expert_bias_", mutates_args=("x",))
def _add_bias(x: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, shares: int) -> None:
    from forge_rl.engines.titan.triton_expert_products import expert_bias_kernel

    outputs = x.shape[1]
    block = power_of_two(outputs)
    expert_bias_kernel[(len(x),)](
        x,
        bias,
        ends,
        len(ends),
        outputs,
        1 / shares,
        EXPERTS=power_of_two(len(ends)),
        BLOCK=block,
        num_warps=warps(block),
    )


@_add_bias.register_fake
def _(x: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, shares: int) -> None:
    pass


@torch.library.custom_op("forge_rl::expert_bias_gradient", mutates_args=())
def _bias_gradient(grad: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from forge_rl.engines.titan.triton_expert_products import expert_sums_kernel

    sums: torch.Tensor = _bias_gradient_output(grad, ends, dtype)
    expert_sums_kernel[(-(-grad.shape[1] // _COLUMNS["BLOCK"]), len(ends))](grad, ends, sums, grad.shape[1], **_COLUMNS)
    return sums


@_bias_gradient.register_fake
def _bias_gradient_output(grad: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty(len(ends), grad.shape[1], dtype=dtype)
