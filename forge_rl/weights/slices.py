"""Slices: the part of a tensor that a rank holds or a reader needs. Every parallel layout reduces to slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorSlice:
    """A block of a tensor: in every dim, a run of indices.

    TensorSlice(start=(2, 0), size=(3, 8)).of(tensor)  # tensor[2:5, 0:8]
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> TensorSlice:
        """All of a tensor."""
        return TensorSlice(start=(0,) * len(shape), size=tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: TensorSlice) -> TensorSlice:
        """Intersection of both; its numel is 0 if they do not overlap."""
        # In each dim from the later start to the earlier end; negative sizes mean no overlap.
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        return TensorSlice(start=start, size=tuple(max(0, end - first) for end, first in zip(ends, start, strict=True)))

    def relative_to(self, block: TensorSlice) -> TensorSlice:
        """Return this slice with a block's first element as the origin."""
        return TensorSlice(start=tuple(a - b for a, b in zip(self.start, block.start, strict=True)), size=self.size)

    def within(self, block: TensorSlice) -> TensorSlice:
        """Undo `relative_to`."""
        return TensorSlice(start=tuple(a + b for a, b in zip(self.start, block.start, strict=True)), size=self.size)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this block of a whole tensor."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


def tiling_error(shape: Sequence[int], slices: Sequence[TensorSlice]) -> str | None:
    """Describe why the slices do not hold every element of a tensor exactly once; None if they do."""
    whole_slice = TensorSlice.whole(shape)
    for index, tensor_slice in enumerate(slices):
        if tensor_slice.intersect(whole_slice) != tensor_slice:
            return f"{tensor_slice} reaches outside of shape {tuple(shape)}"
        for other in slices[:index]:
            if tensor_slice.intersect(other).numel:
                return f"{tensor_slice} overlaps {other}"
    # Within the shape and disjoint, slices tile the tensor exactly if their sizes add up to its size.
    count = sum(tensor_slice.numel for tensor_slice in slices)
    return None if count == whole_slice.numel else f"they hold {count} of {whole_slice.numel} elements"
