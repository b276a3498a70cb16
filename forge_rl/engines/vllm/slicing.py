"""Watches vLLM's loaders to learn which slice of each published tensor a worker copies, and where to.

Under tensor or expert parallelism, vLLM's layers take views of whole tensors. A version is in mapped memory, so a
worker reads only the bytes that are copied out of these views.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import ShardReport, TensorEntry
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.stacks import Stack


class _Memory(NamedTuple):
    """Addresses of a stack's bytes, in a bucket or in a partial copy."""

    begin: int
    end: int
    entries: tuple[TensorEntry, ...]
    block: TensorSlice
    """Slice of the whole stack that these bytes hold."""
    strides: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the stack: its first tensor's."""
        return self.entries[0].name


class _SliceValues(NamedTuple):
    """A slice of a stack, and its values."""

    memory: _Memory
    tensor_slice: TensorSlice
    values: torch.Tensor
    """`[tensors, ...]`: the same part of each tensor."""

    @property
    def key(self) -> tuple[str, TensorSlice]:
        """Stack and slice, by which copies and fingerprints are recorded."""
        return self.memory.name, self.tensor_slice

    def are_shown_by(self, view: torch.Tensor) -> bool:
        """Return whether a view shows the values untransposed: square ones may be transposed."""
        values = self.values if view.ndim == self.values.ndim or len(self.values) != 1 else self.values[0]
        strides = zip(view.shape, view.stride(), values.stride(), strict=False)
        return view.shape == values.shape and all(count == 1 or step == stride for count, step, stride in strides)


class _Place(NamedTuple):
    """Part of a parameter."""

    parameter: str
    size: tuple[int, ...]
    """`[tensors, ...]`."""
    stride: tuple[int, ...]
    offset: int


class SliceWatch(TorchDispatchMode):
    """Records and fingerprints the slices that loaders copy while it is entered.

        watch = SliceWatch(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
        with watch.reading(stacks), watch:
            model.load_weights(tensors)
        watch.shards(), watch.repacked

    vLLM runs each loader twice: on meta tensors, to count elements, and, once a layer is complete, on its parameters.
    The first run shows which slices go to which parameters. Slices whose parameters keep the published bytes are
    fingerprinted there at the end; those that vLLM repacks, while they are copied. A slice of a stack is tracked as
    one, but reported with a fingerprint for each of its tensors.

    Args:
        model: vLLM's model, once a reload has begun.
        before: its parameters before the reload, by name; those with an unchanged format keep the published bytes.
    """

    def __init__(self, model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._model = model
        self._loading = dict(model.named_parameters())
        storages = {name: value.untyped_storage() for name, value in self._loading.items()}
        self._storages = list(storages.values())  # keeps their ids from being reused
        self._names = {id(storage): name for name, storage in storages.items()}
        self._keeps = {
            name: _format(value) == _format(before[name]) for name, value in self._loading.items() if name in before
        }
        self._memory: list[_Memory] = []
        """Memory of stacks, sorted by address."""
        self._entries: dict[str, tuple[TensorEntry, ...]] = {}
        """Tensors of each stack, by its name."""
        self._places: dict[str, dict[TensorSlice, _Place | None]] = defaultdict(dict)
        """Destination of each needed slice, by the stack's name; None if the slice is repacked."""
        self._fingerprints: dict[tuple[str, TensorSlice], list[int]] = {}
        """Fingerprint of each tensor of a slice."""
        self._copied: dict[tuple[str, TensorSlice], list[Move]] = {}
        """Slices yet to be fingerprinted, in batches: a single expert would occupy only one thread."""

    @property
    def bytes(self) -> int:
        """Bytes of all copied slices."""
        return sum(
            tensor_slice.numel * self._entries[name][0].torch_dtype.itemsize
            for name, slices in self._places.items()
            for tensor_slice in slices
        )

    @property
    def repacked(self) -> list[str]:
        """Names of tensors that were repacked, at least in part."""
        names = (
            entry.name
            for name, slices in self._places.items()
            for tensor_slice, place in slices.items()
            if place is None
            for entry in self._entries_of(name, tensor_slice)
        )
        return list(dict.fromkeys(names))

    def shards(self) -> list[ShardReport]:
        """Return copied slices with their fingerprints, taken from live parameters where those keep the published
        bytes."""
        live = dict(self._model.named_parameters())
        # Slices whose parameters still have the format of the loading phase hold the published bytes; fingerprint them
        # in place.
        moves = {
            (name, tensor_slice): self._moves(
                name,
                tensor_slice,
                live[place.parameter].detach().as_strided(place.size, place.stride, place.offset),
            )
            for name, slices in self._places.items()
            for tensor_slice, place in slices.items()
            if place is not None and _format(live[place.parameter]) == _format(self._loading[place.parameter])
        }
        self._take_fingerprints()
        return [
            ShardReport(name=entry.name, tensor_slice=inner_slice, fingerprint=value)
            for (name, tensor_slice), values in (self._fingerprints | _fingerprints(moves)).items()
            for inner_slice in [_inner_slice(tensor_slice)]
            for entry, value in zip(self._entries_of(name, tensor_slice), values, strict=True)
        ]

    @contextlib.contextmanager
    def reading(self, stacks: Sequence[Stack]) -> Iterator[None]:
        """Recognise slices of these stacks while the body runs; they may be freed afterwards."""
        memories = [self._hold(stack.entries, TensorSlice.whole(stack.shape), stack.values) for stack in stacks]
        self._entries |= {memory.name: memory.entries for memory in memories}
        try:
            yield
            self._take_fingerprints()
        finally:
            for memory in memories:
                self._memory.remove(memory)

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """Copy the needed slices of a tensor that is about to be freed; the rest takes no memory."""
        located = self._locate(values)
        if located is None or not located.are_shown_by(values):
            with self:
                return values.clone()
        name, block = located.key
        # Unneeded rows of this copy are never written, and pages that are never written take no memory.
        copy = torch.empty_like(located.values, memory_format=torch.contiguous_format)
        for needed_slice in self._places[name]:
            if (part := needed_slice.intersect(block)).numel:
                local_slice = part.relative_to(block)
                local_slice.of(copy).copy_(local_slice.of(located.values))
        view = copy if values.ndim == copy.ndim else copy[0]
        # The copy is recognised as these slices until vLLM drops it.
        weakref.finalize(view, self._memory.remove, self._hold(located.memory.entries, block, copy))
        return view

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Copies carry a slice as it is. Any other operation on published bytes, except views, makes something else of
        # it.
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if (located := self._locate(source)) is not None:
                if self._copies(target, source, located):
                    return target
                if not target.is_meta and target.shape == source.shape == located.values.shape:
                    _copy_parts(target, source)
                    return target
            if located is None and args[0].is_meta:
                self._overwritten(args[0])
        elif not func.is_view:
            for value in args:
                if isinstance(value, torch.Tensor) and (located := self._locate(value)) is not None:
                    self._fingerprint(located, None)
        return func(*args, **(kwargs or {}))

    def _copies(self, target: torch.Tensor, source: torch.Tensor, located: _SliceValues) -> bool:
        """Record a copy; returns True if it was also carried out."""
        # Called in both runs of a loader; the target tells which one it is.
        key, places = located.key, self._places[located.memory.name]
        tensor_slice = located.tensor_slice
        is_same = located.are_shown_by(source)
        same_format = is_same and target.shape == source.shape and target.dtype == source.dtype
        if target.is_meta:
            name = self._names.get(id(target.untyped_storage()), "")
            # First run, on meta tensors: only note the slice's place, or that it has none of its own.
            keeps = same_format and self._keeps.get(name, False)
            stacked = target if target.ndim == located.values.ndim else target[None]
            place = (
                _Place(name, tuple(stacked.shape), stacked.stride(), int(target.storage_offset())) if keeps else None
            )
            places.setdefault(tensor_slice, place)
            return False
        # Second run. Slices that keep their bytes are fingerprinted at their place once the load is over.
        if places.get(tensor_slice) is not None:
            return False
        # To be repacked, on CPU: copy and fingerprint in one pass over memory.
        if same_format and target.device.type == "cpu" and key not in self._fingerprints.keys() | self._copied.keys():
            self._fingerprint(located, target)
            return True
        places[tensor_slice] = None
        if key not in self._fingerprints:
            self._copied[key] = self._moves(*key, located.values)
        return False

    def _overwritten(self, target: torch.Tensor) -> None:
        """Mark a parameter's slices as repacked because its loader replaces the values: Mamba's A_log becomes
        -exp(A_log)."""
        name = self._names.get(id(target.untyped_storage()))
        for slices in self._places.values():
            slices.update(
                (part, None) for part, place in slices.items() if place is not None and place.parameter == name
            )

    def _take_fingerprints(self) -> None:
        """Fingerprint copied slices while their bytes are still there."""
        self._fingerprints |= _fingerprints(self._copied)
        self._copied.clear()

    def _fingerprint(self, located: _SliceValues, target: torch.Tensor | None) -> None:
        """Fingerprint a slice that is repacked, copying it to the target if there is one."""
        name, tensor_slice = located.key
        self._places[name][tensor_slice] = None
        if located.key not in self._fingerprints.keys() | self._copied.keys():
            if target is not None and target.ndim < located.values.ndim:
                target = target[None]
            self._fingerprints |= _fingerprints({located.key: self._moves(*located.key, located.values, target)})

    def _entries_of(self, name: str, tensor_slice: TensorSlice) -> tuple[TensorEntry, ...]:
        """Return the entries of the tensors that a slice of a stack covers."""
        return self._entries[name][tensor_slice.start[0] : tensor_slice.start[0] + tensor_slice.size[0]]

    def _moves(
        self, name: str, tensor_slice: TensorSlice, values: torch.Tensor, target: torch.Tensor | None = None
    ) -> list[Move]:
        """Return the moves that fingerprint each tensor of a slice of a stack, and copy it to its target, if any."""
        entries, inner_slice = self._entries_of(name, tensor_slice), _inner_slice(tensor_slice)
        targets: Sequence[torch.Tensor | None] = [None] * len(entries) if target is None else target.unbind()
        return [
            Move(place, part, entry.shape, inner_slice)
            for entry, part, place in zip(entries, values.unbind(), targets, strict=True)
        ]

    def _hold(self, entries: tuple[TensorEntry, ...], block: TensorSlice, values: torch.Tensor) -> _Memory:
        begin = values.data_ptr()
        size = 1 + sum(step * (count - 1) for step, count in zip(values.stride(), values.shape, strict=True))
        end = begin + size * values.itemsize if values.numel() else begin
        memory = _Memory(begin, end, entries, block, values.stride())
        bisect.insort(self._memory, memory, key=lambda memory: memory.begin)
        return memory

    def _locate(self, values: torch.Tensor) -> _SliceValues | None:
        """Find the slice of a stack that a view shows; None for other tensors."""
        if values.is_meta or not values.numel():
            return None
        address = values.data_ptr()
        # The last memory that begins at or before the address.
        index = bisect.bisect_right(self._memory, address, key=lambda memory: memory.begin) - 1
        if index < 0 or address >= self._memory[index].end:
            return None
        memory = self._memory[index]
        dtype, block, storage = memory.entries[0].torch_dtype, memory.block, values.untyped_storage()
        # The whole stack again, as a view of the same storage, of which the slice below is taken.
        offset = (memory.begin - storage.data_ptr()) // dtype.itemsize
        stack = torch.empty(0, dtype=dtype, device=values.device)
        stack.set_(storage, offset, block.size, memory.strides)
        view_slice = _slice_of(values, (address - memory.begin) // dtype.itemsize, block.size, memory.strides)
        # Not a block, such as every other row: count all of the stack as read.
        if view_slice is None or values.dtype != dtype:
            return _SliceValues(memory, block, stack)
        return _SliceValues(memory, view_slice.within(block), view_slice.of(stack))


def _copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a slice of a stack; to another device, tensor by tensor unless the slice is contiguous.

    torch would first gather its rows in memory from which a device copies at a fraction of the link's rate.
    """
    if target.device == source.device or source.is_contiguous():
        target.copy_(source)
        return
    for target_part, source_part in zip(target, source, strict=True):
        target_part.copy_(source_part)


def _fingerprints(moves: Mapping[tuple[str, TensorSlice], list[Move]]) -> dict[tuple[str, TensorSlice], list[int]]:
    """Return the fingerprint of each tensor of slices, all taken at once."""
    values = iter(move(list(itertools.chain.from_iterable(moves.values()))))
    return {key: list(itertools.islice(values, len(slice_moves))) for key, slice_moves in moves.items()}


def _inner_slice(tensor_slice: TensorSlice) -> TensorSlice:
    """Return the part of each tensor that a slice of a stack covers."""
    return TensorSlice(start=tensor_slice.start[1:], size=tensor_slice.size[1:])


def _format(values: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return values.shape, values.stride(), values.dtype


def _slice_of(view: torch.Tensor, first: int, shape: Sequence[int], strides: Sequence[int]) -> TensorSlice | None:
    """Return the block of a tensor that a view covers; None if the view is not a block.

    Args:
        view: a view of the tensor.
        first: index of the view's first element in the tensor's memory.
        shape: shape of the tensor.
        strides: its strides, the largest first; between the tensors of a stack there may be a gap.
    """
    start, size = [], [1] * len(shape)
    # From an offset in memory to an index in each dim, by strides from the largest to the smallest.
    for step in strides:
        start.append(first // step)
        first %= step
    for count, stride in zip(view.shape, view.stride(), strict=True):
        if count == 1:
            continue
        # A view's dim is the tensor's dim of the same stride; two of them, or none, make it no block.
        dims = [dim for dim, step in enumerate(strides) if step == stride and shape[dim] > 1]
        if len(dims) != 1 or size[dims[0]] != 1 or start[dims[0]] + count > shape[dims[0]]:
            return None
        size[dims[0]] = count
    return TensorSlice(start=tuple(start), size=tuple(size))
