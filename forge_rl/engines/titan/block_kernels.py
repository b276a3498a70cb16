"""What is between a block's products, in few passes over a GPU's memory: norms with the residual, q and k, SwiGLU.

Each pass is one kernel, in Triton, and an operation of torch's, so that plans and counts see it on the meta device.
torch's own operations take about three times as many kernels and bytes. Sums are in float32, and results are rounded
where torch's own are.
"""

from __future__ import annotations

from typing import Any

import torch

from forge_rl.engines.devices import device_type
from forge_rl.system.kernels import is_on

_PROGRAMS = 528
"""Programs that share the tokens of a gradient: four for each multiprocessor of an H100. Each adds up its part of the
weight's gradient."""
_ELEMENTS = 4096
"""Elements of a program of SwiGLU."""


def has_kernels(x: torch.Tensor, kernel: str) -> bool:
    """Return whether a kernel of `system.kernels` that is on runs on a tensor like x: on CUDA in float32 or narrower,
    and in plans for it."""
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


def joint_linear(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return x W^T for each weight; the backward pass adds up x's gradient in its products."""
    outputs: tuple[torch.Tensor, ...] = _JointLinear.apply(x, *weights)
    return outputs


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed, inverses = _add_norm(x, delta, weight, eps)
        ctx.adds = delta is not None
        ctx.save_for_backward(total if ctx.adds else x, weight, inverses)
        ctx.set_materialize_grads(False)
        return (total if ctx.adds else x.view_as(x)), normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_total: torch.Tensor | None, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        if grad is None:
            return grad_total, grad_total if ctx.adds else None, None, None
        total, weight, inverses = ctx.saved_tensors
        residual = None if grad_total is None else grad_total.contiguous()
        grad_x, parts = _norm_gradient(total, weight, inverses, grad.contiguous(), residual)
        grad_weight = _sum_parts(parts, weight) if ctx.needs_input_grad[2] else None
        return grad_x, grad_x if ctx.adds else None, grad_weight, None


class _NormRoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, cache: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(None if weight is None else x, weight, cache)
        ctx.eps = eps
        out: torch.Tensor = _norm_rope(x.contiguous(), weight, cache.contiguous(), eps)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, cache = ctx.saved_tensors
        grad_x, parts = _norm_rope_gradient(x, weight, cache.contiguous(), grad.contiguous(), ctx.eps)
        grad_weight = _sum_parts(parts, weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


class _KernelSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        out: torch.Tensor = _swiglu(a.contiguous(), b.contiguous())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = _swiglu_gradient(a.contiguous(), b.contiguous(), grad.contiguous())
        return grad_a, grad_b


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            grad_x = grad_x.view_as(x)
        needs = ctx.needs_input_grad[1:]
        return grad_x, *(grad.t() @ rows if is_trained else None for grad, is_trained in zip(flat, needs, strict=True))


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
        BLOCK=_power_of_two(dim),
        num_warps=_warps(dim),
    )
    return total, normed, inverses


@_add_norm.register_fake
def _add_norm_outputs(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x.new_empty(0) if delta is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    inverses = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return total, torch.empty_like(x, memory_format=torch.contiguous_format), inverses


@torch.library.custom_op("forge_rl::norm_gradient", mutates_args=())
def _norm_gradient(
    x: torch.Tensor, weight: torch.Tensor, inverses: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient by x, plus `residual`, and parts that add up to the weight's."""
    from forge_rl.engines.titan.triton_blocks import norm_gradient_kernel

    x = x.contiguous()
    grad_x, parts = _norm_gradient_outputs(x, weight, inverses, grad, residual)
    dim = x.shape[-1]
    norm_gradient_kernel[(len(parts),)](
        *(x, weight, inverses, grad, residual, grad_x, parts, x.numel() // dim, dim, len(parts)),
        ADDS=residual is not None,
        BLOCK=_power_of_two(dim),
        num_warps=_warps(dim),
    )
    return grad_x, parts


@_norm_gradient.register_fake
def _norm_gradient_outputs(
    x: torch.Tensor, weight: torch.Tensor, inverses: torch.Tensor, grad: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = x.new_empty(_programs(inverses.numel()), x.shape[-1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), parts


@torch.library.custom_op("forge_rl::sum_parts", mutates_args=())
def _sum_parts(parts: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of [n, dim] float32 in the weight's dtype."""
    from forge_rl.engines.titan.triton_blocks import sum_parts_kernel

    total = torch.empty_like(weight)
    sum_parts_kernel[(-(-len(total) // 32),)](parts, total, *parts.shape, PARTS=64, BLOCK=32)
    return total


@_sum_parts.register_fake
def _(parts: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


@torch.library.custom_op("forge_rl::norm_rope", mutates_args=())
def _norm_rope(x: torch.Tensor, weight: torch.Tensor | None, cache: torch.Tensor, eps: float) -> torch.Tensor:
    from forge_rl.engines.titan.triton_blocks import norm_rope_kernel

    out = torch.empty_like(x)
    heads, dim = x.shape[-2:]
    norm_rope_kernel[(x.numel() // (heads * dim),)](
        *(x, weight, cache, out, heads, dim, eps),
        NORMS=weight is not None,
        HEADS=_power_of_two(heads),
        HALF=_power_of_two(dim // 2),
    )
    return out


@_norm_rope.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, cache: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("forge_rl::norm_rope_gradient", mutates_args=())
def _norm_rope_gradient(
    x: torch.Tensor | None, weight: torch.Tensor | None, cache: torch.Tensor, grad: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient by x, and parts that add up to the weight's."""
    from forge_rl.engines.titan.triton_blocks import norm_rope_gradient_kernel

    x = None if x is None else x.contiguous()
    grad_x, parts = _norm_rope_gradient_outputs(x, weight, cache, grad, eps)
    heads, dim = grad.shape[-2:]
    norm_rope_gradient_kernel[(len(parts),)](
        *(x, weight, cache, grad, grad_x, parts, grad.numel() // (heads * dim), heads, dim, len(parts), eps),
        NORMS=weight is not None,
        HEADS=_power_of_two(heads),
        HALF=_power_of_two(dim // 2),
    )
    return grad_x, parts


@_norm_rope_gradient.register_fake
def _norm_rope_gradient_outputs(
    x: torch.Tensor | None, weight: torch.Tensor | None, cache: torch.Tensor, grad: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dim = grad.shape[-2:]
    tokens = grad.numel() // (heads * dim)
    return torch.empty_like(grad), grad.new_empty(_programs(tokens), dim, dtype=torch.float32)


@torch.library.custom_op("forge_rl::swiglu", mutates_args=())
def _swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from forge_rl.engines.titan.triton_blocks import swiglu_kernel

    out = torch.empty_like(a)
    swiglu_kernel[(-(-a.numel() // _ELEMENTS),)](a, b, out, a.numel(), BLOCK=_ELEMENTS)
    return out


@_swiglu.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("forge_rl::swiglu_gradient", mutates_args=())
def _swiglu_gradient(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from forge_rl.engines.titan.triton_blocks import swiglu_gradient_kernel

    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    swiglu_gradient_kernel[(-(-a.numel() // _ELEMENTS),)](a, b, grad, grad_a, grad_b, a.numel(), BLOCK=_ELEMENTS)
    return grad_a, grad_b


@_swiglu_gradient.register_fake
def _(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


def _programs(tokens: int) -> int:
    return max(1, min(_PROGRAMS, tokens))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _warps(elements: int) -> int:
    """Return how many warps share a token's elements, so that each thread's fit its registers."""
    return max(4, min(16, _power_of_two(elements) // 512))
