"""Copies rows to the device, in one asynchronous copy each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from forge_rl.packing.rows import Row

_ALIGNMENT = 16
"""Alignment in bytes of the tensors in a buffer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRow:
    """A row on the device, with metadata known without a device sync."""

    row: Row
    own: slice
    """This rank's part of the row."""
    wanted: torch.Tensor
    """[n] int64, positions in that part whose targets are trained."""
    tokens: int
    """Number of trained targets in the whole row."""


def on_device(row: Row, own: slice, device: torch.device) -> DeviceRow:
    """Copy a row in host memory to the device."""
    tensors = {name: value for name, value in vars(row).items() if value is not None}
    tensors["wanted"], tokens = row.mask[own].nonzero()[:, 0], int(row.mask.sum())
    if device.type == "cuda":
        tensors = copied(tensors, device)
    wanted = tensors.pop("wanted")
    return DeviceRow(row=replace(row, **tensors), own=own, wanted=wanted, tokens=tokens)


def copied(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy tensors to a device in one buffer, pinned for a GPU; the results are views of it."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    held = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for piece, tensor in zip(held.split(sizes), tensors.values(), strict=True):
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = held.to(device, non_blocking=True)  # torch keeps the pinned memory until the copy is done
    return {
        name: piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), there.split(sizes), strict=True)
    }
