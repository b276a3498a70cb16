"""Host memory for copies of a device's bytes, in buffers of one size, which whoever needs some next uses again."""

from __future__ import annotations

import torch

BUFFER_BYTES = 64 << 20
"""Bytes of a buffer: a power of two, to which torch rounds pinned memory up. It keeps that for the next buffer, so that
a checkpoint and an offloaded state that are not in memory together take the same."""


class HostCopies:
    """Copies tensors into host memory, one after the other, without gaps.

        copies = HostCopies()
        pieces = copies.of(weight)
        torch.cuda.synchronize()  # the bytes are there now
        values = joined(pieces, weight.dtype, weight.shape)

    Buffers are pinned for what comes from a GPU. They are free again when no piece of them is left.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return pieces, `[bytes] uint8` each, that hold the values in C order once the device's queue has run."""
        left = values.detach().contiguous().view(-1).view(torch.uint8)
        pieces = []
        while len(left):
            if not len(self._free):
                self._free = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=values.is_cuda)
            size = min(len(left), len(self._free))
            pieces.append(self._free[:size].copy_(left[:size], non_blocking=True))
            self._free, left = self._free[size:], left[size:]
        return pieces


def joined(pieces: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values that were copied, in memory of their own."""
    return torch.cat(pieces).view(dtype).view(shape)
