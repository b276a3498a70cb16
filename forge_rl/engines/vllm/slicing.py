"""Watches vLLM's loaders: which slice of each published tensor a worker copies, and where to.

Under tensor or expert parallelism, vLLM's layers take views of whole tensors. A version is in mapped memory, so a
worker reads only the bytes that are copied out of these views.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import ShardReport, TensorEntry
from forge_rl.weights.slices import TensorSlice


class _Memory(NamedTuple):
    """Addresses of a published tensor's bytes, in a bucket or in a partial copy."""

    begin: int
    end: int
    entry: TensorEntry
    block: TensorSlice
    """Slice of the whole tensor that these bytes hold."""


class _SliceValues(NamedTuple):
    """A slice of a published tensor, and its values."""

    memory: _Memory
    tensor_slice: TensorSlice
    values: torch.Tensor

    def are_shown_by(self, view: torch.Tensor) -> bool:
        """Return whether a view shows the values as they are: square ones may be transposed."""
        strides = zip(view.shape, view.stride(), self.values.stride(), strict=False)
        return view.shape == self.values.shape and all(count == 1 or step == stride for count, step, stride in strides)


class _Place(NamedTuple):
    """Part of a parameter."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SliceWatch(TorchDispatchMode):
    """Records and fingerprints the slices that loaders copy while it is entered.

        watch = SliceWatch(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
        with watch.reading(tensors_by_entry), watch:
            model.load_weights(tensors)
        watch.shards(), watch.repacked

    vLLM runs each loader twice: on meta tensors, to count elements, and, once a layer is complete, on its parameters.
    The first run shows which slices go to which parameters. Slices whose parameters keep the published bytes are
    fingerprinted there at the end; those that vLLM repacks, while they are copied.

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
        """Memory of published tensors, sorted by address."""
        self._entries: dict[str, TensorEntry] = {}
        self._places: dict[str, dict[TensorSlice, _Place | None]] = defaultdict(dict)
        """Destination of each needed slice, by tensor name; None if the slice is repacked."""
        self._fingerprints: dict[tuple[str, TensorSlice], int] = {}
        self._copied: dict[tuple[str, TensorSlice], Move] = {}
        """Slices yet to be fingerprinted, in batches: a single expert would occupy only one thread."""

    @property
    def bytes(self) -> int:
        """Bytes of all copied slices."""
        return sum(
            tensor_slice.numel * self._entries[name].torch_dtype.itemsize
            for name, slices in self._places.items()
            for tensor_slice in slices
        )

    @property
    def repacked(self) -> list[str]:
        """Names of tensors that were repacked, at least in part."""
        return [name for name, slices in self._places.items() if None in slices.values()]

    def shards(self) -> list[ShardReport]:
        """Copied slices with their fingerprints, taken of live parameters where these keep the published bytes."""
        live = dict(self._model.named_parameters())
        moves = {
            (name, tensor_slice): Move(
                None,
                live[place.parameter].detach().as_strided(place.size, place.stride, place.offset),
                self._entries[name].shape,
                tensor_slice,
            )
            for name, slices in self._places.items()
            for tensor_slice, place in slices.items()
            if place is not None and _format(live[place.parameter]) == _format(self._loading[place.parameter])
        }
        self._take_fingerprints()
        fingerprints = self._fingerprints | dict(zip(moves, move(list(moves.values())), strict=True))
        return [
            ShardReport(name=name, tensor_slice=tensor_slice, fingerprint=value)
            for (name, tensor_slice), value in fingerprints.items()
        ]

    @contextlib.contextmanager
    def reading(self, tensors: Mapping[TensorEntry, torch.Tensor]) -> Iterator[None]:
        """Recognise slices of these tensors while the body runs; they may be freed afterwards."""
        memories = [self._hold(entry, TensorSlice.whole(entry.shape), values) for entry, values in tensors.items()]
        self._entries |= {entry.name: entry for entry in tensors}
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
        entry, block = located.memory.entry, located.tensor_slice
        copy = torch.empty_like(values, memory_format=torch.contiguous_format)
        for needed_slice in self._places[entry.name]:
            if (part := needed_slice.intersect(block)).numel:
                local_slice = part.relative_to(block)
                local_slice.of(copy).copy_(local_slice.of(values))
        weakref.finalize(copy, self._memory.remove, self._hold(entry, block, copy))
        return copy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            if (located := self._locate(args[1])) is not None and self._copies(args[0], args[1], located):
                return args[0]
            if located is None and args[0].is_meta:
                self._overwritten(args[0])
        elif not func.is_view:
            for value in args:
                if isinstance(value, torch.Tensor) and (located := self._locate(value)) is not None:
                    self._fingerprint(located, None)
        return func(*args, **(kwargs or {}))

    def _copies(self, target: torch.Tensor, source: torch.Tensor, located: _SliceValues) -> bool:
        """Record a copy; returns True if it was also carried out."""
        entry, tensor_slice = located.memory.entry, located.tensor_slice
        places = self._places[entry.name]
        key = entry.name, tensor_slice
        is_same = located.are_shown_by(source)
        same_format = is_same and target.shape == source.shape and target.dtype == source.dtype
        if target.is_meta:
            name = self._names.get(id(target.untyped_storage()), "")
            keeps = same_format and self._keeps.get(name, False)
            place = _Place(name, tuple(target.shape), target.stride(), int(target.storage_offset())) if keeps else None
            places.setdefault(tensor_slice, place)
            return False
        if places.get(tensor_slice) is not None:
            return False
        if same_format and target.device.type == "cpu" and key not in self._fingerprints.keys() | self._copied.keys():
            self._fingerprint(located, target)
            return True
        places[tensor_slice] = None
        if key not in self._fingerprints:
            self._copied[key] = Move(None, located.values, entry.shape, tensor_slice)
        return False

    def _overwritten(self, target: torch.Tensor) -> None:
        """Count a parameter's slices as repacked, as its loader replaces them: Mamba's A_log by -exp(A_log)."""
        name = self._names.get(id(target.untyped_storage()))
        for slices in self._places.values():
            slices.update(
                (part, None) for part, place in slices.items() if place is not None and place.parameter == name
            )

    def _take_fingerprints(self) -> None:
        """Fingerprint copied slices while their bytes are still there."""
        self._fingerprints |= dict(zip(self._copied, move(list(self._copied.values())), strict=True))
        self._copied.clear()

    def _fingerprint(self, located: _SliceValues, target: torch.Tensor | None) -> None:
        """Fingerprint a slice that is repacked, copying it to the target if there is one."""
        entry, tensor_slice = located.memory.entry, located.tensor_slice
        self._places[entry.name][tensor_slice] = None
        if (entry.name, tensor_slice) not in self._fingerprints.keys() | self._copied.keys():
            (value,) = move([Move(target, located.values, entry.shape, tensor_slice)])
            self._fingerprints[entry.name, tensor_slice] = value

    def _hold(self, entry: TensorEntry, block: TensorSlice, values: torch.Tensor) -> _Memory:
        memory = _Memory(values.data_ptr(), values.data_ptr() + values.nbytes, entry, block)
        bisect.insort(self._memory, memory, key=lambda memory: memory.begin)
        return memory

    def _locate(self, values: torch.Tensor) -> _SliceValues | None:
        """Find the slice of a published tensor that a view shows; None for other tensors."""
        if values.is_meta or not values.numel():
            return None
        address = values.data_ptr()
        index = bisect.bisect_right(self._memory, address, key=lambda memory: memory.begin) - 1
        if index < 0 or address >= self._memory[index].end:
            return None
        memory = self._memory[index]
        dtype, block, storage = memory.entry.torch_dtype, memory.block, values.untyped_storage()
        offset = (memory.begin - storage.data_ptr()) // dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device=values.device)
        tensor.set_(storage, offset, block.size, _strides(block.size))
        view_slice = _slice_of(values, (address - memory.begin) // dtype.itemsize, block.size)
        if view_slice is None or values.dtype != dtype:
            return _SliceValues(memory, block, tensor)
        return _SliceValues(memory, view_slice.within(block), view_slice.of(tensor))


def _format(values: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return values.shape, values.stride(), values.dtype


def _slice_of(view: torch.Tensor, first: int, shape: Sequence[int]) -> TensorSlice | None:
    """Return the block of a contiguous tensor that a view covers; None if the view is not a block.

    Args:
        view: a view of the tensor.
        first: index of the view's first element in the flattened tensor.
        shape: shape of the tensor.
    """
    start, size, steps = [], [1] * len(shape), _strides(shape)
    for step in steps:
        start.append(first // step)
        first %= step
    for count, stride in zip(view.shape, view.stride(), strict=True):
        if count == 1:
            continue
        dims = [dim for dim, step in enumerate(steps) if step == stride and shape[dim] > 1]
        if len(dims) != 1 or size[dims[0]] != 1 or start[dims[0]] + count > shape[dims[0]]:
            return None
        size[dims[0]] = count
    return TensorSlice(start=tuple(start), size=tuple(size))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
