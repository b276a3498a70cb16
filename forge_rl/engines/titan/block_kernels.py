"""The operations between a block's products, in few passes over a GPU's memory: norms with the residual, RoPE, SwiGLU.

Each pass is one kernel, in Triton, and an operation of torch's, so plans and counts see it on the meta device. torch's
own operations take about three times as many kernels and bytes. Sums are in float32, and results are rounded where
torch's own are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge_rl.engines.devices import device_type
from forge_rl.engines.titan.gradient_sums import room_for_parts, sum_place, summed_parts
from forge_rl.system.kernels import is_on

_PROGRAMS = 528
"""Programs that share the tokens of a gradient: four for each multiprocessor of an H100. Each adds up its part of the
weight's gradient."""
_ELEMENTS = 4096
"""Elements that one program of SwiGLU computes."""


def has_kernels(x: torch.Tensor, kernel: str) -> bool:
    """Return whether a kernel of `system.kernels` is on and runs on tensors like x: on CUDA, in float32 or narrower, or
    in a plan for CUDA."""
    on_gpu = x.is_cuda or (x.is_meta and device_type() == "cuda")
    return on_gpu and type(x) is torch.Tensor and x.dtype.itemsize <= 4 and is_on(kernel)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, or x without a delta, and its RMSNorm; all are [..., dim].

    Use the first result in place of x, so that the gradients of both are added in the same pass.
    """
    total, normed = _AddNorm.apply(x, delta, weight, eps)
    return total, normed


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, cache: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm over each head if there is a weight, and rotate-half RoPE.

    Args:
        x: [1, L, heads, head_dim].
        weight: [head_dim].
        cache: [1, L, 1, 2 head_dim] float32: cosines, then sines, each repeated for both halves.
    """
    out: torch.Tensor = _NormRoPE.apply(x, weight, cache, eps)
    return out


def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return silu(a) b, elementwise."""
    out: torch.Tensor = _KernelSwiGLU.apply(a, b)
    return out


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed, inverses = _add_norm(x, delta, weight, eps)
        ctx.adds, ctx.place = delta is not None, sum_place(weight)
        # Save what was normalised: with a residual, the sum.
        ctx.save_for_backward(total if ctx.adds else x, weight, inverses)
        ctx.set_materialize_grads(False)
        return (total if ctx.adds else x.view_as(x)), normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_total: torch.Tensor | None, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        # Only the sum was used, so the residual's gradient passes through.
        if grad is None:
            return grad_total, grad_total if ctx.adds else None, None, None
        total, weight, inverses = ctx.saved_tensors
        # Gradient of the residual path; the kernel adds it to the norm's in the same pass.
        residual = None if grad_total is None else grad_total.contiguous()
        # Each program writes its part of the weight's gradient; atomic additions would make the sum's order vary.
        parts = room_for_parts((ctx.place,), (weight,), programs_of(inverses.numel()))
        grad_x = _norm_gradient(total, weight, inverses, grad.contiguous(), residual, parts)
        (grad_weight,) = summed_parts(parts, (ctx.place,), (weight,)) if ctx.needs_input_grad[2] else (None,)
        return grad_x, grad_x if ctx.adds else None, grad_weight, None


class _NormRoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, cache: torch.Tensor, eps: float
    ) -> torch.Tensor:
        # A rotation alone has a gradient that does not depend on x.
        ctx.save_for_backward(None if weight is None else x, weight, cache)
        ctx.eps, ctx.place = eps, sum_place(weight)
        out: torch.Tensor = rotated_heads(x.contiguous(), (weight, None), cache, x.shape[-2], eps)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, cache = ctx.saved_tensors
        parts = None if weight is None else room_for_parts((ctx.place,), (weight,), programs_of(grad.shape[1]))
        grad_x = heads_gradient(
            None if x is None else x.contiguous(),
            (weight, None),
            cache,
            (grad.contiguous(), None, None),
            parts,
            ctx.eps,
        )
        grad_weight = None
        if parts is not None and ctx.needs_input_grad[1]:
            (grad_weight,) = summed_parts(parts, (ctx.place,), (weight,))
        return grad_x, grad_weight, None, None


class _KernelSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        out: torch.Tensor = swiglu_values(a.contiguous(), b.contiguous())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = ctx.saved_tensors
        # One kernel writes both gradients into the halves of a tensor.
        return tuple(swiglu_gradient(a.contiguous(), b.contiguous(), grad.contiguous()).chunk(2, dim=-1))


@torch.library.custom_op("forge_rl::add_norm", mutates_args=())
def _add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum (empty without a delta), its norm, and the factor of each token."""
    from forge_rl.engines.titan.triton_blocks import add_norm_kernel

    x, delta = x.contiguous(), None if delta is None else delta.contiguous()
    total, normed, inverses = _add_norm_outputs(x, delta, weight, eps)
    dim = x.shape[-1]
    add_norm_kernel[(x.numel() // dim,)](
        *(x, delta, weight, total, normed, inverses, dim, eps),
        ADDS=delta is not None,
        BLOCK=power_of_two(dim),
        num_warps=warps(dim),
    )
    return total, normed, inverses


@_add_norm.register_fake
def _add_norm_outputs(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # An operation has the same outputs in every call, so a missing sum is an empty tensor.
    total = x.new_empty(0) if delta is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    inverses = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return total, torch.empty_like(x, memory_format=torch.contiguous_format), inverses


@torch.library.custom_op("forge_rl::norm_gradient", mutates_args=("parts",))
def _norm_gradient(
    x: torch.Tensor,
    weight: torch.Tensor,
    inverses: torch.Tensor,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    parts: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient by x, plus `residual`; writes parts that add up to the weight's, [programs, dim] float32."""
    from forge_rl.engines.titan.triton_blocks import norm_gradient_kernel

    x = x.contiguous()
    grad_x = torch.empty_like(x)
    dim = x.shape[-1]
    norm_gradient_kernel[(len(parts),)](
        *(x, weight, inverses, grad, residual, grad_x, parts, x.numel() // dim, dim, parts.stride(0), len(parts)),
        ADDS=residual is not None,
        BLOCK=power_of_two(dim),
        num_warps=warps(dim),
    )
    return grad_x


@_norm_gradient.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    inverses: torch.Tensor,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    parts: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


NormWeights = tuple[torch.Tensor | None, torch.Tensor | None]
"""Weights of the norms of a token's first heads and of its other heads; None without a norm, or without other heads."""


def rotated_heads(
    x: torch.Tensor, weights: NormWeights, cache: torch.Tensor, first: int, eps: float, copied: int = 0
) -> torch.Tensor:
    """Return heads normalised and rotated, [1, L, heads, head_dim].

    Args:
        x: [1, L, heads, head_dim]; a token's heads are contiguous.
        first: number of heads to which the first weight belongs.
        copied: number of the last heads, which are only copied.
    """
    out: torch.Tensor = _norm_rope(x, weights, cache.contiguous(), first, eps, copied)
    return out


def heads_gradient(
    x: torch.Tensor | None,
    weights: NormWeights,
    cache: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    parts: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return the gradient by the input of `rotated_heads`, and write partial sums of the weights' gradients to `parts`.

    Args:
        x: the input of `rotated_heads`; None without weights.
        grads: gradients by the first heads, by the others, and by the heads that were only copied; contiguous,
            [1, L, n, head_dim] each.
        parts: [programs, head_dim, or twice that with other heads] float32; None without weights.
    """
    grad_x: torch.Tensor = _norm_rope_gradient(x, weights, cache.contiguous(), grads, parts, eps)
    return grad_x


@torch.library.custom_op("forge_rl::norm_rope", mutates_args=())
def _norm_rope(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    cache: torch.Tensor,
    first: int,
    eps: float,
    copied: int,
) -> torch.Tensor:
    from forge_rl.engines.titan.triton_blocks import norm_rope_kernel

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, dim = x.shape[1:]
    norm_rope_kernel[(tokens,)](
        *(x, *weights, cache, out, heads - copied, first, copied * dim, dim, x.stride(1), eps),
        NORMS=weights[0] is not None,
        OTHERS=heads - copied > first,
        COPIES=copied > 0,
        HEADS=power_of_two(heads - copied),
        HALF=power_of_two(dim // 2),
        COPIED=power_of_two(copied * dim),
        num_warps=warps(power_of_two(heads - copied) * dim),
    )
    return out


@_norm_rope.register_fake
def _(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    cache: torch.Tensor,
    first: int,
    eps: float,
    copied: int,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("forge_rl::norm_rope_gradient", mutates_args=("parts",))
def _norm_rope_gradient(
    x: torch.Tensor | None,
    weights: Sequence[torch.Tensor | None],
    cache: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    parts: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    from forge_rl.engines.titan.triton_blocks import norm_rope_gradient_kernel

    grad_x = _all_heads(grads)
    tokens, dim = grad_x.shape[1], grad_x.shape[-1]
    # Counts of heads follow from the gradients' shapes; None means none of that kind.
    first, num_others, copied = (0 if grad is None else grad.shape[-2] for grad in grads)
    # Without norms there are no parts, and any number of programs will do.
    programs, stride = (programs_of(tokens), 0) if parts is None else (len(parts), parts.stride(0))
    norm_rope_gradient_kernel[(programs,)](
        *(x, *weights, cache, *grads, grad_x, parts, tokens),
        *(first, num_others, copied * dim, dim, 0 if x is None else x.stride(1), stride, programs, eps),
        NORMS=weights[0] is not None,
        OTHERS=num_others > 0,
        COPIES=copied > 0,
        HEADS=power_of_two(first + num_others),
        HALF=power_of_two(dim // 2),
        COPIED=power_of_two(copied * dim),
        num_warps=warps(power_of_two(first + num_others) * dim),
    )
    return grad_x


@_norm_rope_gradient.register_fake
def _(
    x: torch.Tensor | None,
    weights: Sequence[torch.Tensor | None],
    cache: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    parts: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    return _all_heads(grads)


def _all_heads(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    heads = sum(0 if grad is None else grad.shape[-2] for grad in grads)
    assert grads[0] is not None, "there are heads"
    return grads[0].new_empty(*grads[0].shape[:-2], heads, grads[0].shape[-1])


@torch.library.custom_op("forge_rl::swiglu", mutates_args=())
def swiglu_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return silu(a) b, contiguous; a and b are [..., width], and may be the two halves of one tensor."""
    from forge_rl.engines.titan.triton_blocks import swiglu_kernel

    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    strides = a.flatten(0, -2).stride(0), b.flatten(0, -2).stride(0)
    swiglu_kernel[(-(-a.numel() // _ELEMENTS),)](a, b, out, a.numel(), a.shape[-1], *strides, BLOCK=_ELEMENTS)
    return out


@swiglu_values.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@torch.library.custom_op("forge_rl::swiglu_gradient", mutates_args=())
def swiglu_gradient(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradients of silu(a) b by a and b, [..., 2 width]; a and b are as in `swiglu_values`."""
    from forge_rl.engines.titan.triton_blocks import swiglu_gradient_kernel

    joint = grad.new_empty(*grad.shape[:-1], 2 * grad.shape[-1])
    strides = a.flatten(0, -2).stride(0), b.flatten(0, -2).stride(0)
    swiglu_gradient_kernel[(-(-a.numel() // _ELEMENTS),)](
        *(a, b, grad, joint, a.numel(), a.shape[-1], *strides), BLOCK=_ELEMENTS
    )
    return joint


@swiglu_gradient.register_fake
def _(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(*grad.shape[:-1], 2 * grad.shape[-1])


def programs_of(tokens: int) -> int:
    """Return how many programs share tokens of a gradient."""
    return max(1, min(_PROGRAMS, tokens))


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << max(0, size - 1).bit_length()


def warps(elements: int) -> int:
    """Return how many warps share a token's elements, so that each thread's fit its registers."""
    return max(4, min(16, power_of_two(elements) // 512))
