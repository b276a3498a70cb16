"""Products whose results are used where they are computed, so that they never travel through a GPU's memory.

The head's logits are reduced to a few sums of each token, and their gradient is written in its final dtype; SwiGLU and
its gradient are computed within the products before them. Each is one kernel, in Triton, and an operation of torch's.
A Triton product may lose more to cuBLAS than the saved traffic is worth, so the trainer times both at its start, see
`kernel_speed`.
"""

from __future__ import annotations

import torch

from forge_rl.engines.titan.block_kernels import has_kernels

_TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
"""Rows and columns that a program computes, and elements of the sums that it loads at a time."""
_OPTIONS = {"num_warps": 8, "num_stages": 3}
_SPLITS = 16
"""Parts of a vocabulary whose programs run side by side."""


def has_fused_products(x: torch.Tensor, kernel: str) -> bool:
    """Return whether fused products serve tensors like x: "products" of layers or "logits", 16 bits wide, on CUDA.

    Plans count torch's own products, which take more memory: which ones are faster is measured at the start.
    """
    # Unlike `has_kernels`, this excludes the meta device of plans.
    return x.is_cuda and x.dtype.itemsize == 2 and has_kernels(x, kernel)


def linear_sums(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, squares: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `score_sums` of parts of the logits hidden weight^T, [4, parts, N] float32, and the targets' logits,
    float32.

    Args:
        hidden: [N, dim].
        weight: [V, dim], contiguous.
        targets: [N] or [N, K] int64, in [0, V).
    """
    sums, target_logits = _linear_sums(hidden, weight, targets.contiguous(), temperature, squares)
    return sums, target_logits


def linear_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    statistics: torch.Tensor,
    places: torch.Tensor,
    slopes: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient by the logits of a part of the vocabulary, hidden weight^T: [N, columns], in hidden's dtype.

    Args:
        hidden: [N, dim].
        weight: [columns, dim], contiguous.
        statistics: as `score_gradient` takes it, contiguous.
        places: as `score_gradient` takes them, less the part's first column.
        slopes: as `score_gradient` takes them.
    """
    grad: torch.Tensor = _linear_gradient(hidden, weight, statistics, places, slopes, temperature)
    return grad


def gated_values(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x A^T and x B^T, one after the other, [..., 2 width], and silu(x A^T) x B^T, [..., width].

    Args:
        weight: A and B, one after the other, [2 width, dim], contiguous.
    """
    joint, hidden = _gated_values(x, weight)
    return joint, hidden


def gated_gradient(grad: torch.Tensor, weight: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """Return the gradient by both products of `gated_values`, [..., 2 width], given the gradient by the next product.

    Args:
        grad: gradient by (second result of `gated_values`) weight^T, [..., dim].
        weight: [dim, width], contiguous.
        joint: the first result of `gated_values`.
    """
    joint_grad: torch.Tensor = _gated_gradient(grad, weight, joint)
    return joint_grad


@torch.library.custom_op("forge_rl::linear_sums", mutates_args=())
def _linear_sums(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, squares: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from forge_rl.engines.titan.triton_products import linear_sums_kernel

    # The kernels index by one stride and assume unit stride within a row.
    hidden, weight = hidden.contiguous(), weight.contiguous()
    sums, target_logits = _linear_sums_outputs(hidden, weight, targets, temperature, squares)
    (rows, dim), vocab = hidden.shape, len(weight)
    columns = _split_columns(vocab)
    linear_sums_kernel[(-(-rows // _TILE["BLOCK_M"]), sums.shape[1])](
        *(hidden, weight, targets, sums, target_logits, rows, vocab, dim, dim, dim),
        # Targets per row: 1, or K.
        *(targets[:1].numel(), columns, temperature),
        SQUARES=squares,
        **_TILE,
        **_OPTIONS,
    )
    return sums, target_logits


@_linear_sums.register_fake
def _linear_sums_outputs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, squares: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    splits = -(-len(weight) // _split_columns(len(weight)))
    sums = hidden.new_empty(4, splits, len(hidden), dtype=torch.float32)
    return sums, hidden.new_empty(targets.shape, dtype=torch.float32)


@torch.library.custom_op("forge_rl::linear_gradient", mutates_args=())
def _linear_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    statistics: torch.Tensor,
    places: torch.Tensor,
    slopes: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    from forge_rl.engines.titan.triton_products import linear_gradient_kernel

    hidden, weight, statistics = hidden.contiguous(), weight.contiguous(), statistics.contiguous()
    (rows, dim), columns = hidden.shape, len(weight)
    grad = hidden.new_empty(rows, columns)
    linear_gradient_kernel[(-(-rows // _TILE["BLOCK_M"]), -(-columns // _TILE["BLOCK_N"]))](
        *(hidden, weight, statistics, places.contiguous(), slopes.contiguous(), grad, rows, columns, dim, dim, dim),
        *(places.shape[1], temperature),
        **_TILE,
        **_OPTIONS,
    )
    return grad


@_linear_gradient.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    statistics: torch.Tensor,
    places: torch.Tensor,
    slopes: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    return hidden.new_empty(len(hidden), len(weight))


@torch.library.custom_op("forge_rl::gated_values", mutates_args=())
def _gated_values(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from forge_rl.engines.titan.triton_products import gated_kernel

    x, weight = x.contiguous(), weight.contiguous()
    joint, hidden = _gated_outputs(x, weight)
    (rows, dim), width = x.flatten(0, -2).shape, hidden.shape[-1]
    gated_kernel[(-(-rows // _TILE["BLOCK_M"]), -(-width // (_TILE["BLOCK_N"] // 2)))](
        x, weight, joint, hidden, rows, width, dim, dim, **_TILE, **_OPTIONS
    )
    return joint, hidden


@_gated_values.register_fake
def _gated_outputs(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape, width = x.shape[:-1], len(weight)
    return x.new_empty(*shape, width), x.new_empty(*shape, width // 2)


@torch.library.custom_op("forge_rl::gated_gradient", mutates_args=())
def _gated_gradient(grad: torch.Tensor, weight: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    from forge_rl.engines.titan.triton_products import gated_gradient_kernel

    grad, weight, joint = grad.contiguous(), weight.contiguous(), joint.contiguous()
    joint_grad = torch.empty_like(joint)
    (rows, dim), width = grad.flatten(0, -2).shape, weight.shape[1]
    gated_gradient_kernel[(-(-rows // _TILE["BLOCK_M"]), -(-width // _TILE["BLOCK_N"]))](
        grad, weight, joint, joint_grad, rows, width, dim, dim, **_TILE, **_OPTIONS
    )
    return joint_grad


@_gated_gradient.register_fake
def _(grad: torch.Tensor, weight: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(joint, memory_format=torch.contiguous_format)


def _split_columns(vocab: int) -> int:
    """Return how many logits of a token one program reduces, a multiple of a tile's columns."""
    # Whole tiles, so that no tile belongs to two splits.
    tiles = -(-vocab // _TILE["BLOCK_N"])
    return -(-tiles // _SPLITS) * _TILE["BLOCK_N"]
