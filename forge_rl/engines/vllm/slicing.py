"""Watches vLLM's loaders: which slice of each published tensor a worker copies, and where to.

Each of vLLM's layers cuts its own part out of a whole tensor, by tensor or expert parallelism, as a view. A version
lies in memory that is mapped, so that a worker reads no more than what is copied out of such a view in the end.
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
    """Bytes of a published tensor, in a bucket or in a copy of a part of it."""

    begin: int
    end: int
    entry: TensorEntry
    block: TensorSlice
    """Place of what lies there in the whole tensor."""


class _Located(NamedTuple):
    """A slice of a published tensor, and its values."""

    memory: _Memory
    tensor_slice: TensorSlice
    values: torch.Tensor


class _Place(NamedTuple):
    """Part of a parameter."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SliceWatch(TorchDispatchMode):
    """Notes the slices that loaders copy while it is entered, and fingerprints them.

        watch = SliceWatch(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
        with watch.reading(tensors_by_entry), watch:
            model.load_weights(tensors)
        watch.shards(), watch.repacked

    vLLM runs each loader twice: on meta tensors, to count the elements, and once a layer is complete, for its
    parameters. The first run tells which slices are wanted, and for which parameters. A slice whose parameter keeps the
    published bytes is fingerprinted there, at the end. Others, which vLLM repacks, are fingerprinted as they are
    copied.

    Args:
        model: vLLM's model, once a reload has begun.
        before: its parameters before that, by name: those that have the same format now keep the bytes as they are.
    """

    def __init__(self, model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._model = model
        self._loading = dict(model.named_parameters())
        storages = {name: value.untyped_storage() for name, value in self._loading.items()}
        self._storages = list(storages.values())  # so that no other one gets an id of theirs
        self._names = {id(storage): name for name, storage in storages.items()}
        self._keeps = {
            name: _format(value) == _format(before[name]) for name, value in self._loading.items() if name in before
        }
        self._memory: list[_Memory] = []
        """Where bytes of published tensors lie, in the order of their addresses."""
        self._entries: dict[str, TensorEntry] = {}
        self._places: dict[str, dict[TensorSlice, _Place | None]] = defaultdict(dict)
        """Slices that are wanted, by name, with where each goes; None where it does not stay as it is."""
        self._fingerprints: dict[tuple[str, TensorSlice], int] = {}
        self._copied: dict[tuple[str, TensorSlice], Move] = {}
        """Slices whose fingerprints are yet to be taken, of many at a time: an expert's alone would keep one thread."""

    @property
    def bytes(self) -> int:
        """Bytes of all slices that were copied."""
        return sum(
            found.numel * self._entries[name].torch_dtype.itemsize
            for name, slices in self._places.items()
            for found in slices
        )

    @property
    def repacked(self) -> list[str]:
        """Names of tensors of which some bytes as such exist no more."""
        return [name for name, slices in self._places.items() if None in slices.values()]

    def shards(self) -> list[ShardReport]:
        """Slices that were copied, with their fingerprints: of live parameters where these keep the bytes."""
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
        found = self._fingerprints | dict(zip(moves, move(list(moves.values())), strict=True))
        return [
            ShardReport(name=name, tensor_slice=tensor_slice, fingerprint=value)
            for (name, tensor_slice), value in found.items()
        ]

    @contextlib.contextmanager
    def reading(self, tensors: Mapping[TensorEntry, torch.Tensor]) -> Iterator[None]:
        """Know what lies in these tensors while the body runs; nothing of them is needed afterwards."""
        held = [self._hold(entry, TensorSlice.whole(entry.shape), values) for entry, values in tensors.items()]
        self._entries |= {entry.name: entry for entry in tensors}
        try:
            yield
            self._take_fingerprints()
        finally:
            for memory in held:
                self._memory.remove(memory)

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """Copy what is wanted of a tensor whose bytes are about to go; the rest takes no memory."""
        found = self._locate(values)
        if found is None or found.tensor_slice.size != tuple(values.shape):
            with self:
                return values.clone()
        entry, block = found.memory.entry, found.tensor_slice
        kept = torch.empty_like(values, memory_format=torch.contiguous_format)
        for wanted in self._places[entry.name]:
            if (part := wanted.intersect(block)).numel:
                here = part.relative_to(block)
                here.of(kept).copy_(here.of(values))
        weakref.finalize(kept, self._memory.remove, self._hold(entry, block, kept))
        return kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            if (found := self._locate(args[1])) is not None and self._copies(args[0], args[1], found):
                return args[0]
        elif not func.is_view:
            for value in args:
                if isinstance(value, torch.Tensor) and (found := self._locate(value)) is not None:
                    self._fingerprint(found, None)
        return func(*args, **(kwargs or {}))

    def _copies(self, target: torch.Tensor, source: torch.Tensor, found: _Located) -> bool:
        """Note a copy; returns True if it was done on the way."""
        entry, tensor_slice = found.memory.entry, found.tensor_slice
        places = self._places[entry.name]
        key = entry.name, tensor_slice
        same = tuple(target.shape) == tuple(source.shape) == tensor_slice.size and target.dtype == source.dtype
        if target.is_meta:
            name = self._names.get(id(target.untyped_storage()), "")
            keeps = same and self._keeps.get(name, False)
            place = _Place(name, tuple(target.shape), target.stride(), int(target.storage_offset())) if keeps else None
            places.setdefault(tensor_slice, place)
            return False
        if places.get(tensor_slice) is not None:
            return False
        if same and target.device.type == "cpu" and key not in self._fingerprints.keys() | self._copied.keys():
            self._fingerprint(found, target)
            return True
        places[tensor_slice] = None
        if key not in self._fingerprints:
            self._copied[key] = Move(None, found.values, entry.shape, tensor_slice)
        return False

    def _take_fingerprints(self) -> None:
        """Take the fingerprints of copied slices, while their bytes are there."""
        self._fingerprints |= dict(zip(self._copied, move(list(self._copied.values())), strict=True))
        self._copied.clear()

    def _fingerprint(self, found: _Located, target: torch.Tensor | None) -> None:
        """Fingerprint a slice that does not stay as it is, and copy it, if it goes somewhere."""
        entry, tensor_slice = found.memory.entry, found.tensor_slice
        self._places[entry.name][tensor_slice] = None
        if (entry.name, tensor_slice) not in self._fingerprints.keys() | self._copied.keys():
            (value,) = move([Move(target, found.values, entry.shape, tensor_slice)])
            self._fingerprints[entry.name, tensor_slice] = value

    def _hold(self, entry: TensorEntry, block: TensorSlice, values: torch.Tensor) -> _Memory:
        memory = _Memory(values.data_ptr(), values.data_ptr() + values.nbytes, entry, block)
        bisect.insort(self._memory, memory, key=lambda each: each.begin)
        return memory

    def _locate(self, values: torch.Tensor) -> _Located | None:
        """Find which slice of which published tensor a view is; None for other tensors."""
        if values.is_meta or not values.numel():
            return None
        address = values.data_ptr()
        place = bisect.bisect_right(self._memory, address, key=lambda each: each.begin) - 1
        if place < 0 or address >= self._memory[place].end:
            return None
        memory = self._memory[place]
        dtype, block, storage = memory.entry.torch_dtype, memory.block, values.untyped_storage()
        offset = (memory.begin - storage.data_ptr()) // dtype.itemsize
        whole = torch.empty(0, dtype=dtype, device=values.device)
        whole.set_(storage, offset, block.size, _strides(block.size))
        here = _slice_of(values, (address - memory.begin) // dtype.itemsize, block.size)
        if here is None or values.dtype != dtype:
            return _Located(memory, block, whole)
        return _Located(memory, here.within(block), here.of(whole))


def _format(values: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return values.shape, values.stride(), values.dtype


def _slice_of(view: torch.Tensor, first: int, shape: Sequence[int]) -> TensorSlice | None:
    """Return the block of a contiguous tensor that a view of it is; None if it is no block.

    Args:
        first: number of the view's first element in the tensor.
        shape: of the tensor.
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
