"""Host memory for copies of device tensors, in reusable buffers of one size."""

from __future__ import annotations

import torch

BUFFER_BYTES = 64 << 20
"""Bytes of a buffer: a power of two, to which torch rounds pinned memory up. torch keeps freed buffers for reuse, so a
checkpoint and an offloaded state share memory unless both are held at once."""


class HostCopies:
    """Copies tensors to host memory, contiguously one after the other.

        copies = HostCopies()
        pieces = copies.of(weight)
        torch.cuda.synchronize()  # the bytes are there now
        values = joined(pieces, weight.dtype, weight.shape)

    Buffers for GPU tensors are pinned. A buffer is freed with its last piece.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return pieces, `[bytes] uint8` each, that hold the values in C order once the device is synchronised."""
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
    """Return the copied values in new memory."""
    return torch.cat(pieces).view(dtype).view(shape)
