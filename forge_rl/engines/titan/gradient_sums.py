"""Sums of weights' gradients over an update's rows, in float32, to which products and kernels add without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from forge_rl.engines.devices import device_type
from forge_rl.system.kernels import is_on


class GradientSum:
    """Adds up gradients of weights that lie one after the other; the sums are the gradients of their masters.

    A sum starts with the first gradient after the masters' gradients were set to None, and takes no memory before.

    Args:
        masters: the weights that the optimizer trains. Their shapes may differ only in the dimension along which they
            are joined, see `joint_dim`.
    """

    def __init__(self, masters: Sequence[nn.Parameter]) -> None:
        self._masters = masters
        self._dim = joint_dim(masters)
        self._lengths = [master.shape[self._dim] for master in masters]
        self._total: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._parts: torch.Tensor | None = None
        self._written: set[int] = set()

    @property
    def dtype(self) -> torch.dtype:
        """The sums' dtype."""
        return self._masters[0].dtype

    def total(self, member: int | None) -> torch.Tensor | None:
        """Return the sum so far of one weight's gradients, or of all weights', [sum of lengths, ...]; None before the
        first gradient."""
        if member is not None:
            return self._masters[member].grad
        # A caller may have replaced a master's gradient, by None or another tensor. The optimizer then reads that,
        # not its part of the joint sum.
        is_whole = bool(self._views) and all(
            master.grad is view for master, view in zip(self._masters, self._views, strict=True)
        )
        return self._total if is_whole else None

    def add(self, values: torch.Tensor, member: int | None) -> None:
        """Add a gradient of one weight, or of all; the first one becomes the sum, if it has its dtype."""
        if (total := self.total(member)) is not None:
            total.add_(values)
        elif member is not None:
            # The optimizer's kernels take no gradient with strides of its own.
            self._masters[member].grad = values.to(self.dtype).contiguous()
        # Joined along a later dimension, or next to gradients that exist already, each master gets its own part.
        elif self._dim > 0 or any(master.grad is not None for master in self._masters):
            for index, part in enumerate(self.split(values, self._dim)):
                self.add(part, index)
        else:
            # The first gradient becomes the sum, and the masters' gradients views of it.
            self._total = values.to(self.dtype)
            self._views = list(self._total.split(self._lengths))
            for master, view in zip(self._masters, self._views, strict=True):
                master.grad = view

    def split(self, values: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        """Split values into the parts that belong to each weight."""
        parts: Sequence[torch.Tensor] = values.split(self._lengths, dim)
        return parts

    def room(self, members: range, programs: int) -> torch.Tensor:
        """Return room for parts of the gradients by vectors, [programs, sum of lengths], which `end_parts` adds up; all
        vectors of this sum share it, so that it takes one pass."""
        # Parts for another number of programs cannot share the room, and where not all vectors write parts, those of
        # the row before are still there; settle what is there first.
        if self._parts is None or len(self._parts) != programs or not self._written.isdisjoint(members):
            self.settle()
            self._parts = self._masters[0].new_empty(programs, sum(self._lengths), dtype=torch.float32)
        first, end = sum(self._lengths[: members.start]), sum(self._lengths[: members.stop])
        return self._parts[:, first:end]

    def end_parts(self, members: range) -> None:
        """Record that these vectors' parts are written; sum the parts once every vector has written its own."""
        self._written |= {*members}
        # Wait for the vectors that share the room: one pass sums all of them.
        if len(self._written) < len(self._masters):
            return
        parts, self._parts = self._parts, None
        self._written.clear()
        assert parts is not None, "part gave the room"
        self._add_parts(parts, None)

    def settle(self) -> None:
        """Add up the parts that are there, although others are not."""
        if self._parts is not None:
            for member in self._written:
                self._add_parts(self._parts.split(self._lengths, dim=1)[member], member)
        self._parts = None
        self._written.clear()

    def _add_parts(self, parts: torch.Tensor, member: int | None) -> None:
        if (total := self.total(member)) is not None:
            _sum_parts(parts, total, True)
        else:
            self.add(_summed(parts, self.dtype), member)


@dataclass(frozen=True, eq=False)
class SumPlace:
    """Where the gradients of a weight, or of several at once, are added up."""

    sum: GradientSum
    member: int | None
    """Index of the weight in the sum; None for all."""

    def add(self, values: torch.Tensor) -> None:
        """Add a gradient."""
        self.sum.add(values, self.member)

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product of two matrices; on a GPU the product's own sums are not rounded before."""
        total, dtype = self.sum.total(self.member), self.sum.dtype
        # This product is rounded to its operands' dtype in any case, and widened only when it is added.
        if not keeps_sums(a) and a.dtype != dtype:
            self.add(torch.mm(a, b))
        elif total is None:
            self.add(added(None, a, b, dtype))
        else:
            added(total, a, b, dtype)

    def parts(self, grad: torch.Tensor) -> Iterator[tuple[SumPlace, torch.Tensor]]:
        """Split the gradient by the joint results, [..., outputs]: yield each weight's place with its own part."""
        if self.member is not None:
            yield self, grad
            return
        for index, part in enumerate(self.sum.split(grad, -1)):
            yield SumPlace(self.sum, index), part

    def add_rows(self, places: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Add rows, [n, dim], to the rows `places`, [n] int64, of a gradient with `length` rows; deterministic."""
        if (total := self.sum.total(self.member)) is None:
            # Most rows of an embedding get no gradient, so rows are added to zeros.
            self.add(total := values.new_zeros(length, values.shape[1], dtype=self.sum.dtype))
        total.index_put_((places,), values.to(total.dtype), accumulate=True)


def joint_dim(weights: Sequence[torch.Tensor]) -> int:
    """Return the dimension along which weights are joined so that one product reads them: their outputs, which are the
    second dimension of experts' weights, [E, outputs, inputs]."""
    return 1 if weights[0].ndim == 3 and len(weights) > 1 else 0


def room_for_parts(places: Sequence[SumPlace | None], vectors: Sequence[torch.Tensor], programs: int) -> torch.Tensor:
    """Return room for parts of the gradients by vectors, [programs, sum of lengths] float32, in which each program
    writes what its tokens add. `summed_parts` adds them up.

    Args:
        places: of each vector.
    """
    if (span := _span(places)) is not None:
        return span[0].room(span[1], programs)
    return vectors[0].new_empty(programs, sum(map(len, vectors)), dtype=torch.float32)


def summed_parts(
    parts: torch.Tensor, places: Sequence[SumPlace | None], vectors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Add up the parts in the room for them; returns the gradients that autograd adds up, in the vectors' dtype."""
    if (span := _span(places)) is not None:
        span[0].end_parts(span[1])
        return [None] * len(vectors)
    return list(_summed(parts, vectors[0].dtype).split([len(vector) for vector in vectors]))


def _span(places: Sequence[SumPlace | None]) -> tuple[GradientSum, range] | None:
    """Return the sum that vectors share, and which they are, if they lie one after the other in it."""
    first = places[0]
    if first is None or first.member is None:
        return None
    members = range(first.member, first.member + len(places))
    is_span = all(
        place is not None and place.sum is first.sum and place.member == member
        for place, member in zip(places, members, strict=True)
    )
    return (first.sum, members) if is_span else None


def sum_place(weight: torch.Tensor | None) -> SumPlace | None:
    """Return where to add up a weight's gradients; None if autograd does, or the weight has no gradient."""
    return getattr(weight, "sum_place", None)


def keeps_sums(operand: torch.Tensor) -> bool:
    """Return whether products of such matrices can keep their float32 sums: on CUDA, and in plans for it."""
    on_gpu = operand.is_cuda or (operand.is_meta and device_type() == "cuda")
    return operand.dtype.itemsize < 4 and on_gpu and is_on("head")


def added(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add a product to a total in a dtype, in place; None counts as 0."""
    if a.device.type == "cpu":  # where products have their operands' dtype
        a, b = a.to(dtype), b.to(dtype)
    if total is None:
        return torch.mm(a, b) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    if a.dtype == dtype:
        return total.addmm_(a, b)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


def write_product(room: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write a product to room for it, whose dtype may be wider."""
    if a.device.type == "cpu":
        a, b = a.to(room.dtype), b.to(room.dtype)
    if a.dtype == room.dtype:
        torch.mm(a, b, out=room)
    else:
        torch.mm(a, b, out_dtype=room.dtype, out=room)


def _summed(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of [n, dim] float32 in a dtype."""
    total = parts.new_empty(parts.shape[1], dtype=dtype)
    _sum_parts(parts, total, False)
    return total


@torch.library.custom_op("forge_rl::sum_parts", mutates_args=("total",))
def _sum_parts(parts: torch.Tensor, total: torch.Tensor, adds: bool) -> None:
    """Write the sum of [n, dim] float32 to `total`, or add it."""
    from forge_rl.engines.titan.triton_blocks import sum_parts_kernel

    count, dim = parts.shape
    sum_parts_kernel[(-(-dim // 32),)](parts, total, count, dim, parts.stride(0), ADDS=adds, PARTS=64, BLOCK=32)


@_sum_parts.register_fake
def _(parts: torch.Tensor, total: torch.Tensor, adds: bool) -> None:
    pass
