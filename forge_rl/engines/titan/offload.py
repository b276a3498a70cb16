"""Moves bytes from their device to host memory and back in place, so that all views of them stay valid."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from forge_rl.engines.titan.host_memory import HostCopies
from forge_rl.errors import ForgeError


class OffloadedState:
    """Holds bytes that have left their device.

        offloaded = OffloadedState(model.parameters())  # the device's memory is free now
        offloaded.bring_back()

    Until they are back, their storages are empty and nothing may read them. Tensors, their views, the shards of
    DTensors, FSDP's flat views and the optimizer's state keep their storages, and find the same bytes there again.

    Args:
        tensors: local tensors. The whole storage of each leaves, once however many share it. On CUDA, host memory is
            pinned and the device's memory is given back to other processes too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        copies = HostCopies()
        self._left = [(storage, copies.of(_bytes_of(storage))) for storage in storages.values()]
        self.bytes = sum(storage.nbytes() for storage, _ in self._left)
        _finish_copies()
        for storage, _ in self._left:  # only now: if host memory runs out before, nothing has changed
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Fill the storages again. After an error it can be called once more.

        Raises:
            ForgeError: the device has no room.
        """
        while self._left:
            storage, copies = self._left[-1]
            try:
                storage.resize_(sum(copy.nbytes for copy in copies))
            except torch.OutOfMemoryError as error:
                raise ForgeError(
                    f"the trainer's state finds no room when it comes back to {storage.device}: {error}",
                    hint="lower --generator.memory-share, if engines live on the same device",
                ) from error
            for piece, copy in zip(_bytes_of(storage).split(list(map(len, copies))), copies, strict=True):
                piece.copy_(copy, non_blocking=True)
            self._left.pop()
        _finish_copies()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a storage, `[bytes] uint8`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
