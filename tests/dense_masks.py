"""The attention mask of a packed row as a whole matrix, which the trainer never makes: what it must equal."""

from __future__ import annotations

import torch

from forge_rl.packing.rows import Row, attends


def dense_mask(row: Row, first: int = 0, end: int | None = None) -> torch.Tensor:
    """Return the attention mask of a row, [L, L] bool: True where the query (first dim) sees the key (second dim).

    With `first` and `end`, return the mask among those tokens only.
    """
    index = torch.arange(first, len(row) if end is None else end, device=row.trees.device)
    return attends(row.until, index[:, None], index[None, :])
