"""Fingerprints of tensors: cheap, exact over bytes, and additive over shards.

A tensor's fingerprint is the sum, modulo 2**64, of a mix of each word's bits with the word's global index. Runs of one
tensor can therefore be fingerprinted where they lie, and their fingerprints add up to that of the whole. It notices
changed, swapped, shifted and missing values; it is no defence against somebody who wants a collision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9, of splitmix64
_CHUNK_WORDS = 1 << 17  # 1 MiB: the temporaries stay in cache
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprint(run: torch.Tensor, shape: Sequence[int], *, start: int = 0) -> int:
    """Fingerprint of a contiguous run of whole rows of a tensor.

    A word is 8 bytes where a row (one index of dim 0) is a whole number of them, else one element, so that every
    split by rows gives the same words.

    Args:
        run: rows `start // row` onward of the tensor, any dtype; flattened in row-major order.
        shape: shape of the whole tensor.
        start: flat index, in the whole tensor, of the run's first element.

    Returns:
        An unsigned 64-bit integer; `combine` adds those of all runs up to that of the whole.
    """
    flat = run.detach().contiguous().view(-1)
    size = flat.element_size()
    row_bytes = math.prod(shape[1:]) * size
    if row_bytes % 8 == 0:
        words, first_word = flat.view(torch.int64), start * size // 8
    else:
        words, first_word = flat.view(_BITS[size]), start
    total = 0
    for offset in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[offset : offset + _CHUNK_WORDS]
        at = first_word + offset
        mixed = torch.arange(at, at + chunk.numel(), device=words.device).mul_(_GOLDEN)
        mixed = mixed.bitwise_xor_(chunk.to(torch.int64))
        mixed = mixed.bitwise_xor_(mixed >> 30).mul_(_MIX)
        total += int(mixed.bitwise_xor_(mixed >> 27).sum())
    return total % (1 << 64)


def combine(parts: Iterable[int]) -> int:
    """Fingerprint of a whole tensor from those of the runs that make it up."""
    return sum(parts) % (1 << 64)
