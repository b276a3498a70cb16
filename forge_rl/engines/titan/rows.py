"""Copies rows to the device, in one asynchronous copy each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    """[n] int64, positions in that part whose targets are scored: the trained ones, and observations if wanted."""
    tokens: int
    """Number of trained targets in the whole row."""


def on_device(row: Row, own: slice, device: torch.device, *, observations: bool = False) -> DeviceRow:
    """Copy a row in host memory to the device; `observations` are then wanted, too."""
    scored = row.mask | row.observed if observations else row.mask
    wanted, tokens = scored[own].nonzero()[:, 0], int(row.mask.sum())
    if device.type != "cuda":
        return DeviceRow(row=row, own=own, wanted=wanted, tokens=tokens)
    tensors = row.tensors() | {f".{name}": each for name, each in row.columns.items()} | {".wanted": wanted}
    there = copied(tensors, device)
    wanted = there.pop(".wanted")
    moved: dict[str, Any] = {name: there.pop(f".{name}") for name in row.columns}
    return DeviceRow(row=replace(row, **there, columns=moved), own=own, wanted=wanted, tokens=tokens)


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
