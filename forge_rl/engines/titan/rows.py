"""Copies rows to the device, in one asynchronous copy each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from forge_rl.engines.titan.balance import Split
from forge_rl.engines.titan.row_attention import Sequences, sequences
from forge_rl.packing.rows import Row

_ALIGNMENT = 16
"""Alignment in bytes of the tensors in a buffer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRow:
    """A row on the device, with metadata known without a device sync."""

    row: Row
    local_indices: torch.Tensor
    """Positions of this rank's tokens in the row, int64."""
    scored_indices: torch.Tensor
    """[n] int64, indices among this rank's tokens of those to score: trained ones, and observations on request."""
    tokens: int
    """Number of trained targets in the whole row."""
    split: Split | None = None
    """How ranks split the row, in host memory; None if each has the whole."""
    order: torch.Tensor | None = None
    """`Split.order`, on the device."""
    sequences: Sequences | None = None
    """The row's sequences, on the device; None if some share a prefix, or ranks split the row."""

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a row's values, [L, ...]."""
        return values if self.split is None else values[self.local_indices]


def on_device(
    row: Row,
    local_indices: torch.Tensor,
    device: torch.device,
    *,
    split: Split | None = None,
    observations: bool = False,
) -> DeviceRow:
    """Copy a row in host memory to the device.

    Args:
        local_indices: positions of this rank's tokens, int64.
        split: how ranks split the row; None if each has the whole.
        observations: score observations, too.
    """
    is_scored = row.mask | row.observed if observations else row.mask
    # Counted while the row is in host memory; on the device, this would be a sync.
    tokens = int(row.mask.sum())
    parts = {"local_indices": local_indices, "scored_indices": is_scored[local_indices].nonzero()[:, 0]}
    if split is not None and split.order is not None:
        parts["order"] = split.order
    row_sequences = None
    if device.type == "cuda":
        row_sequences = sequences(row) if split is None else None
        if row_sequences is not None:
            parts["ends"] = row_sequences.ends
        # Prefixes keep columns and parts apart from the row's own tensors in the shared buffer.
        columns = {f"column.{name}": column for name, column in row.columns.items()}
        device_tensors = copied(
            row.tensors() | columns | {f"part.{name}": part for name, part in parts.items()}, device
        )
        parts = {name: device_tensors.pop(f"part.{name}") for name in parts}
        device_columns: dict[str, Any] = {name: device_tensors.pop(f"column.{name}") for name in row.columns}
        row = replace(row, **device_tensors, columns=device_columns)
        if row_sequences is not None:
            row_sequences = replace(row_sequences, ends=parts.pop("ends"))
    return DeviceRow(row=row, tokens=tokens, split=split, sequences=row_sequences, **parts)


def copied(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy tensors to a device in one buffer, pinned for a GPU; the results are views of it."""
    # Viewing bytes as another dtype requires an aligned start.
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for piece, tensor in zip(buffer.split(sizes), tensors.values(), strict=True):
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    device_buffer = buffer.to(device, non_blocking=True)  # torch keeps the pinned memory until the copy is done
    return {
        name: piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), device_buffer.split(sizes), strict=True)
    }
