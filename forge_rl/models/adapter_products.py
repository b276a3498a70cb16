"""Adds adapters' products to weights, with the same bits in every process, layout and device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FACTOR_BITS, _EXACT_BITS = 24, 53
"""Significant bits of float32 and float64."""
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of weights that are computed at a time, by kind of device: few enough to stay in a processor's cache, and
enough to keep a GPU from waiting for its next kernel."""


def merged_weight(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale B A, [outputs, inputs], in W's dtype; see `AdapterProduct`.

    Args:
        weight: W, whole; or a stack of experts' W, with a first dim of experts, as A and B then have.
        a: A, [rank, inputs].
        b: B, [outputs, rank].
        scale: factor on B A.
    """
    return AdapterProduct(a, b, scale).added_to(weight)


def merged_weights(
    weights: Mapping[str, torch.Tensor], factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]
) -> dict[str, torch.Tensor]:
    """Merge the factors into their weights, by name, as `merged_weight` does.

    Weights of one shape, such as a layer's experts, share one batched product.

    Args:
        weights: unsharded W by name.
        factors: A, B and scale by name.
    """
    import torch

    stacks: dict[object, list[str]] = {}
    for name, (a, b, scale) in factors.items():
        weight = weights[name]
        # Everything that a batched product must have in common.
        kind = weight.dtype, weight.device, weight.shape, a.dtype, a.shape, b.dtype, scale
        stacks.setdefault(kind, []).append(name)
    merged = dict[str, torch.Tensor]()
    for names in stacks.values():
        weight, (*_, scale) = weights[names[0]], factors[names[0]]
        # As many weights as a chunk holds; stacks are batched in themselves.
        count = 1 if weight.ndim == 3 else max(1, _chunk_elements(weight) // max(1, weight.numel()))
        for first in range(0, len(names), count):
            batch = names[first : first + count]
            if len(batch) == 1:
                merged[batch[0]] = merged_weight(weights[batch[0]], *factors[batch[0]])
                continue
            a, b = torch.stack([factors[name][0] for name in batch]), torch.stack([factors[name][1] for name in batch])
            sums = merged_weight(torch.stack([weights[name] for name in batch]), a, b, scale)
            merged |= zip(batch, sums, strict=True)
    return merged


def fits(weight: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether the product of factors of two shapes can be added to a weight of a third; see `merged_weight`."""
    return 2 <= len(weight) <= 3 and tuple(weight) == (*b[:-1], *a[-1:]) and tuple(a[:-1]) == (*b[:-2], *b[-1:])


class AdapterProduct:
    """scale B A, to be added to a weight or to slices of it.

        product = AdapterProduct(a, b, scale=2.0)
        top = product.added_to(weight[:8])

    Trainer and engines merge separately, and their results are compared bit for bit. Sums in float32 depend on their
    order, which differs between kernels and shapes. So A and B are first rounded to multiples of a power of two, by at
    most 2^-24 of their largest element (2^-23 for ranks above 32, 2^-22 above 128). This makes every product and sum
    exact in float64, in any order. The remaining steps are element-wise, and the result is rounded to W's dtype at the
    end.

    Weights in float64 are for comparisons with other code: nothing is rounded first.

    Args:
        a: A, [rank, inputs], whole; or a stack, [experts, rank, inputs].
        b: B, [outputs, rank], whole; or a stack, [experts, outputs, rank].
        scale: factor on B A.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        self._factors = a, b = (a, b) if a.ndim == 3 else (a[None], b[None])
        self._scale = scale
        # Sums of `rank` products of two such integers stay below 2**53, and are exact in float64 in any order.
        bits = min(_FACTOR_BITS, (_EXACT_BITS - math.ceil(math.log2(max(a.shape[1], 1)))) // 2)
        self._a, a_units = _multiples(a, bits)
        self._b, b_units = _multiples(b, bits)
        self._units = a_units * b_units

    def added_to(self, weight: torch.Tensor, *place: int) -> torch.Tensor:
        """Return a slice of W with its part of the product added, in the slice's dtype.

        Args:
            weight: slice of W, [rows, columns], or of a stack, [experts, rows, columns].
            place: index of its first element in W; 0 if left out.
        """
        import torch

        if weight.ndim == 2:
            return self.added_to(weight[None], 0, *(place or (0, 0)))[0]
        count, rows, columns = weight.shape
        first, row, column = place or (0, 0, 0)
        # A slice of W needs the rows of B and the columns of A that meet in it.
        experts, inputs = slice(first, first + count), slice(column, column + columns)
        if weight.dtype == torch.float64:
            a, b = (factor[experts].to(weight.dtype) for factor in self._factors)
            return weight + self._scale * (b[:, row : row + rows] @ a[..., inputs])
        a, b, units = self._a[experts, :, inputs], self._b[experts, row : row + rows], self._units[experts]
        merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
        elements = _chunk_elements(weight)
        expert_step, row_step = (max(1, elements // max(1, size)) for size in (rows * columns, columns))
        for expert, start in itertools.product(range(0, count, expert_step), range(0, rows, row_step)):
            stack, chunk = slice(expert, expert + expert_step), slice(start, start + row_step)
            # float64, exact up to here. Multiplying by powers of two is exact, too; scale, sum and the cast round
            # element by element.
            part = torch.bmm(b[stack, chunk], a[stack])
            part *= units[stack]
            part *= self._scale
            part += weight[stack, chunk]
            merged[stack, chunk] = part
        return merged


def _chunk_elements(weight: torch.Tensor) -> int:
    return _CHUNK_ELEMENTS.get(weight.device.type, _CHUNK_ELEMENTS["cuda"])


def _multiples(factor: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stack of factors as whole multiples, in float64, of powers of two, and these powers, [experts, 1, 1]."""
    import torch

    wide = factor.to(torch.float64)
    _, exponents = torch.frexp(wide.abs().amax((1, 2)))
    # In Python, as powers of two are not exact on every device.
    units = wide.new_tensor([math.ldexp(1.0, exponent - bits) for exponent in exponents.tolist()])[:, None, None]
    return (wide / units).round_(), units
