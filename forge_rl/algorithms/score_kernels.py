"""Statistics of tokens' distributions, and gradients by logits, in one pass over a GPU's logits each.

Each is one kernel, in Triton, and an operation of torch's, so that it can be counted on the meta device.
"""

from __future__ import annotations

import torch

_BLOCK = 4096
"""Maximum logits of a row that a program holds at a time."""


@torch.library.custom_op("forge_rl::score_sums", mutates_args=())
def score_sums(logits: torch.Tensor, temperature: float, squares: bool) -> torch.Tensor:
    """Reduce each row of z = logits / temperature to m = max z, and to the sums of e = exp(z - m), of e (z - m) and, if
    asked for, of e^2.

    Args:
        logits: [N, V], float32 or narrower, with contiguous rows.

    Returns:
        [4, N] float32; the last is 0 unless `squares`.
    """
    from forge_rl.algorithms.triton_scores import sums_kernel

    sums = _sums_like(logits)
    rows, vocab = logits.shape
    # One program reduces a whole row, block after block.
    sums_kernel[(rows,)](logits, sums, logits.stride(0), rows, vocab, temperature, SQUARES=squares, BLOCK=_block(vocab))
    return sums


@score_sums.register_fake
def _(logits: torch.Tensor, temperature: float, squares: bool) -> torch.Tensor:
    return _sums_like(logits)


@torch.library.custom_op("forge_rl::score_gradient", mutates_args=("grad",))
def score_gradient(
    logits: torch.Tensor,
    grad: torch.Tensor,
    statistics: torch.Tensor,
    places: torch.Tensor,
    slopes: torch.Tensor,
    temperature: float,
) -> None:
    """Write the gradient by logits / temperature, -p (s + g (log p + H)) with log p = logits / temperature - l, plus
    the targets' own slopes.

    Args:
        logits: [N, V], float32 or narrower, with contiguous rows.
        grad: [N, V], as are the logits, or the logits themselves if they are float32.
        statistics: [4, N] float32, each contiguous: l, H, s and g of each row.
        places: [N, K] int64, contiguous: columns of the K targets; those outside of the logits add nothing.
        slopes: [N, K] float32, contiguous.
    """
    from forge_rl.algorithms.triton_scores import gradient_kernel

    rows, vocab = logits.shape
    block = _block(vocab)
    # One program for each block of a row: its entries depend on nothing but the row's statistics.
    gradient_kernel[(rows, -(-vocab // block))](
        *(logits, grad, statistics, places, slopes, logits.stride(0), grad.stride(0)),
        *(statistics.stride(0), vocab, places.shape[1], temperature),
        BLOCK=block,
    )


@score_gradient.register_fake
def _(
    logits: torch.Tensor,
    grad: torch.Tensor,
    statistics: torch.Tensor,
    places: torch.Tensor,
    slopes: torch.Tensor,
    temperature: float,
) -> None:
    pass


def _sums_like(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(4, len(logits), dtype=torch.float32)


def _block(vocab: int) -> int:
    """Return a power of two of at most `_BLOCK`, as Triton needs."""
    return min(_BLOCK, 1 << max(0, vocab - 1).bit_length())
