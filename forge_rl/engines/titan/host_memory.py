"""Moves storages and the inputs of layers to host memory and back, and copies tensors there, in reusable buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_rl.engines.titan.shards import local
from forge_rl.errors import ForgeError

BUFFER_BYTES = 64 << 20
"""Bytes of a buffer: a power of two, to which torch rounds pinned memory up. torch keeps freed buffers for reuse, so a
checkpoint and an offloaded state share memory unless both are held at once."""


@dataclass(frozen=True)
class HostCopy:
    """A copy of a tensor in pieces, `[bytes] uint8` each, which hold its values in C order."""

    pieces: list[torch.Tensor]
    dtype: torch.dtype
    shape: torch.Size

    def joined(self) -> torch.Tensor:
        """Return the values in new memory."""
        return torch.cat(self.pieces).view(self.dtype).view(self.shape)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return `count` rows of the first dim, in new memory."""
        width = self.dtype.itemsize * self.shape[1:].numel()
        start, end, place, parts = first * width, (first + count) * width, 0, list[torch.Tensor]()
        for piece in self.pieces:
            parts.append(piece[max(0, start - place) : max(0, end - place)])
            place += len(piece)
        return torch.cat(parts).view(self.dtype).view(count, *self.shape[1:])

    def on(self, device: torch.device) -> torch.Tensor:
        """Copy the values to a device; work queued on its current stream afterwards sees them."""
        values = torch.empty(self.shape, dtype=self.dtype, device=device)
        targets = values.view(-1).view(torch.uint8).split([len(piece) for piece in self.pieces])
        for target, piece in zip(targets, self.pieces, strict=True):
            target.copy_(piece, non_blocking=True)
        return values


class HostCopies:
    """Copies tensors to host memory, contiguously one after the other.

        copies = HostCopies()
        copy = copies.of(weight)
        torch.cuda.synchronize()  # the bytes are there now
        values = copy.joined()

    Buffers for GPU tensors are pinned. A buffer is freed with its last piece.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes copied so far."""
        self._free = torch.empty(0, dtype=torch.uint8)

    def of(self, values: torch.Tensor) -> HostCopy:
        """Return a copy that holds the values once the device is synchronised."""
        remaining = values.detach().contiguous().view(-1).view(torch.uint8)
        self.bytes += len(remaining)
        pieces = []
        while len(remaining):
            # Tensors fill buffers one after the other, and may span several.
            if not len(self._free):
                self._free = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=values.is_cuda)
            size = min(len(remaining), len(self._free))
            pieces.append(self._free[:size].copy_(remaining[:size], non_blocking=True))
            self._free, remaining = self._free[size:], remaining[size:]
        return HostCopy(pieces, values.dtype, values.shape)


class OffloadedTensors:
    """Holds offloaded storages.

        offloaded = OffloadedTensors(model.parameters())  # the device's memory is free now
        offloaded.bring_back()

    Until brought back, the storages are empty and must not be read. Tensors, views, DTensor shards, FSDP's flat views
    and optimizer state keep their storages, which then hold the same bytes again.

    Args:
        tensors: local tensors. The whole storage of each is moved, shared ones once. On CUDA, host memory is pinned,
            and the device's memory is released to other processes too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        copies = HostCopies()
        self._left = [(storage, copies.of(_bytes_of(storage)).pieces) for storage in storages.values()]
        self.bytes = sum(storage.nbytes() for storage, _ in self._left)
        _finish_copies()
        for storage, _ in self._left:  # only now, so that running out of host memory changes nothing
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Refill the storages. Can be retried after an error.

        Raises:
            ForgeError: the device is out of memory.
        """
        # Entries leave the list one by one, so a call that failed can be retried.
        while self._left:
            storage, copies = self._left[-1]
            try:
                storage.resize_(sum(copy.nbytes for copy in copies))
            except torch.OutOfMemoryError as error:
                raise ForgeError(
                    f"no room to bring the trainer's state back to {storage.device}: {error}",
                    hint="lower --generator.gpu-memory-utilization if engines share this device",
                ) from error
            for piece, copy in zip(_bytes_of(storage).split(list(map(len, copies))), copies, strict=True):
                piece.copy_(copy, non_blocking=True)
            self._left.pop()
        _finish_copies()


def offload_inputs(layers: Iterable[nn.Module]) -> HostCopies:
    """Have recomputed layers keep their inputs in host memory, pinned for CUDA, between forward and backward pass.

    Returns the copies, which count their bytes.

    The copies are made on the current stream, in which nothing waits for the CPU. A buffer is freed once all layers
    whose inputs it holds are recomputed.

    Args:
        layers: modules that save only their inputs, as under full activation checkpointing.
    """
    copies = HostCopies()

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not tensor.is_floating_point():  # positions, which all layers share
            return lambda: tensor
        values = local(tensor)
        device, copy = values.device, copies.of(values)
        if not isinstance(tensor, DTensor):
            return lambda: copy.on(device)
        # Uneven local parts do not tell a DTensor's shape and strides, so these are kept.
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return lambda: DTensor.from_local(
            copy.on(device), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def wrapped(compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda bring_back: bring_back()):
                return compute(*args, **kwargs)

        return forward

    for layer in layers:
        # Hooks apply only while the layer runs, so only its saved inputs are packed.
        layer.forward = wrapped(layer.forward)
    return copies


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a storage, `[bytes] uint8`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
