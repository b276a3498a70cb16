"""Encodes the changes of a tensor from one version to the next, without loss.

The change of a tensor is a list of indices and differences of bit patterns. Indices are stored as gaps from one changed
element to the next. Differences are modulo the word's size, with the sign in the lowest bit, so that the frequent steps
to a neighbouring value are small numbers. Both are stored byte plane by byte plane, all lowest bytes first, and
compressed with zstd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.unsignedinteger[Any]]
"""Bit patterns of a tensor's elements, `[numel]`, little-endian."""
Kind = Literal["same", "changed", "whole"]

_DENSE = 0.5
"""A tensor is encoded whole if its change, before compression, takes more than this share of its size."""
_CODEC = pa.Codec("zstd", compression_level=3)


@dataclass(frozen=True, kw_only=True)
class EncodedChange:
    """A tensor's change."""

    kind: Kind
    data: bytes = b""
    """Compressed; empty if nothing changed."""
    changes: int = 0
    """Number of changed elements."""
    gap_bytes: int = 1
    """Size of an index."""


def words_of(tensor: torch.Tensor) -> Words:
    """Return a contiguous CPU tensor's bit patterns, as a view of its memory."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8).numpy().view(f"<u{tensor.dtype.itemsize}")


def encode(new: Words, old: Words | None) -> EncodedChange:
    """Encode a tensor's bit patterns, `[numel]`, as a change from its old ones, or whole without old ones."""
    if old is not None:
        indices = np.flatnonzero(new != old)
        if not len(indices):
            return EncodedChange(kind="same")
        # Unchanged elements before each changed one: small numbers, where absolute indices would need 4 bytes or more.
        gaps = np.diff(indices, prepend=-1) - 1
        gap_bytes = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * size)
        if len(indices) * (gap_bytes + new.itemsize) <= _DENSE * new.nbytes:
            # Zigzag: 0, -1, 1, -2 … become 0, 1, 2, 3 …, so that small steps of either sign have zero high bytes.
            steps = (new[indices] - old[indices]).view(f"<i{new.itemsize}")
            signed = ((steps << 1) ^ (steps >> (8 * new.itemsize - 1))).view(new.dtype)
            data = _CODEC.compress(_planes(gaps.astype(f"<u{gap_bytes}")) + _planes(signed), asbytes=True)
            return EncodedChange(kind="changed", data=data, changes=len(indices), gap_bytes=gap_bytes)
    return EncodedChange(kind="whole", data=_CODEC.compress(_planes(new), asbytes=True))


def decode_whole(data: memoryview, *, numel: int, item_bytes: int) -> Words:
    """Decode a whole tensor's bit patterns, `[numel]`.

    Raises:
        OSError: the data has another size than the tensor.
    """
    planes = memoryview(pa.decompress(pa.py_buffer(data), decompressed_size=numel * item_bytes, codec="zstd"))
    return _from_planes(planes, item_bytes)


def apply_change(data: memoryview, words: Words, *, changes: int, gap_bytes: int) -> None:
    """Apply a tensor's change to its old bit patterns, in place.

    Raises:
        OSError: the data does not have exactly `changes` changes.
        ValueError: an index is beyond the tensor.
    """
    # Checked before memory is allocated for them: anybody may have written this file.
    if changes > len(words):
        raise ValueError(f"{changes} of {len(words)} elements cannot have changed")
    size = changes * (gap_bytes + words.itemsize)
    planes = memoryview(pa.decompress(pa.py_buffer(data), decompressed_size=size, codec="zstd"))
    gaps = _from_planes(planes[: changes * gap_bytes], gap_bytes)
    # Each gap alone, as a sum of large ones could wrap around to a valid index.
    if changes and int(gaps.max()) >= len(words):
        raise ValueError(f"there are {len(words)} elements, and no change {gaps.max()} after another")
    indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if changes and int(indices[-1]) >= len(words):
        raise ValueError(f"there is no element {indices[-1]} of {len(words)}")
    signed = _from_planes(planes[changes * gap_bytes :], words.itemsize)
    # Indices are distinct, as each gap adds at least 1, so that `+=` applies every change. 0 - x is -x modulo the
    # word's size.
    words[indices] += (signed >> 1) ^ (0 - (signed & 1))


def most_bytes(numel: int, item_bytes: int) -> int:
    """Maximum size of a tensor's encoded change."""
    return numel * item_bytes + math.ceil(numel * item_bytes / 128) + 1024


def _planes(values: Words) -> bytes:
    # High bytes are mostly zero, and zstd finds that best if they lie together.
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(data: memoryview, item_bytes: int) -> Words:
    planes = np.frombuffer(data, np.uint8).reshape(item_bytes, -1)
    # A copy even of a single element, whose transpose is contiguous already: `data` is read-only.
    return planes.T.copy().reshape(-1).view(f"<u{item_bytes}")
