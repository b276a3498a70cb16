"""Products of adapters, added to weights with the same bits in every process, layout and device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FACTOR_BITS, _EXACT_BITS = 24, 53
"""Significant bits of float32 and float64."""
_CHUNK_ELEMENTS = 1 << 18
"""Elements of a weight that are computed at a time, so that they stay in a processor's cache."""


def merged_weight(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale B A, [outputs, inputs], in W's dtype; see `AdapterProduct`.

    Args:
        weight: W, whole; or a stack of experts' W, with a first dim of experts, as A and B then have.
        a: A, [rank, inputs].
        b: B, [outputs, rank].
        scale: factor on B A.
    """
    return AdapterProduct(a, b, scale).added_to(weight)


def fits(weight: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether a weight of a shape can have the product of factors of two shapes added; see `merged_weight`."""
    return 2 <= len(weight) <= 3 and tuple(weight) == (*b[:-1], *a[-1:]) and tuple(a[:-1]) == (*b[:-2], *b[-1:])


class AdapterProduct:
    """scale B A, to be added to a weight or to slices of it.

        product = AdapterProduct(a, b, scale=2.0)
        top = product.added_to(weight[:8])

    Trainer and engines merge separately, and their results are compared bit for bit. Sums in float32 depend on their
    order, which differs between kernels and shapes. So A and B are first rounded to multiples of a power of two, by at
    most 2^-24 of their largest element (2^-23 for ranks above 32), which makes every product and sum exact in float64,
    in any order. The rest is done element by element, and rounded to W's dtype at the end.

    Weights in float64 are for comparisons with other code: with them nothing is rounded first.

    Args:
        a: A, [rank, inputs], whole; or a stack, [experts, rank, inputs].
        b: B, [outputs, rank], whole; or a stack, [experts, outputs, rank].
        scale: factor on B A.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        self._stack = [AdapterProduct(*pair, scale) for pair in zip(a, b, strict=True)] if a.ndim == 3 else None
        if self._stack is not None:
            return
        self._factors = a, b
        self._scale = scale
        rank = len(a)
        bits = min(_FACTOR_BITS, (_EXACT_BITS - math.ceil(math.log2(max(rank, 1)))) // 2)
        self._a, a_unit = _multiples(a, bits)
        self._b, b_unit = _multiples(b, bits)
        self._unit = a_unit * b_unit

    def added_to(self, weight: torch.Tensor, *place: int) -> torch.Tensor:
        """Return a slice of W with its part of the product added, in the slice's dtype.

        Args:
            weight: slice of W, [rows, columns], or of a stack, [experts, rows, columns].
            place: index of its first element in W; 0 if left out.
        """
        import torch

        if self._stack is not None:
            first, *inner = place or (0, 0, 0)
            products = self._stack[first : first + len(weight)]
            parts = [product.added_to(part, *inner) for product, part in zip(products, weight, strict=True)]
            return torch.stack(parts)
        row, column = place or (0, 0)
        rows, columns = weight.shape
        if weight.dtype == torch.float64:
            a, b = (factor.to(weight.dtype) for factor in self._factors)
            return weight + self._scale * (b[row : row + rows] @ a[:, column : column + columns])
        merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
        a, step = self._a[:, column : column + columns], max(1, _CHUNK_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            part = self._b[row + start : row + min(start + step, rows)] @ a
            part *= self._unit
            part *= self._scale
            part += weight[start : start + step]
            merged[start : start + step] = part
        return merged


def _multiples(factor: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Return a factor as whole multiples, in float64, of a power of two, which is returned too."""
    import torch

    wide = factor.to(torch.float64)
    _, exponent = torch.frexp(wide.abs().max())
    unit = math.ldexp(1.0, int(exponent) - bits)
    return (wide / unit).round_(), unit
