"""What a version of the weights consists of: written last, so that a reader sees a whole version or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forge_rl.errors import WeightsError
from forge_rl.weights.fingerprint import combine

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A run of whole rows of one tensor, and where its bytes lie."""

    bucket: str
    """Key of the bucket in the transport."""
    offset: int
    """Of its first byte in the bucket."""
    start: int
    """Flat index, in the whole tensor, of its first element."""
    elements: int


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One published tensor, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of it, such as "bfloat16"."""
    fingerprint: int
    """Of the published bytes; see fingerprint.py."""
    shards: tuple[Shard, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * _BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """What one trainer rank wrote of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    fingerprint: int
    """Of the elements that this rank wrote."""
    shard: Shard | None
    """None where other ranks hold all of the tensor."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole version."""

    version: int
    """Optimizer steps behind these weights."""
    tensors: tuple[TensorEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors)

    @property
    def buckets(self) -> tuple[str, ...]:
        """Keys of all its buckets, in the order in which they were written."""
        return tuple(dict.fromkeys(shard.bucket for entry in self.tensors for shard in entry.shards))


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What an engine holds after a load, as the engine itself says."""

    version: int
    fingerprints: dict[str, int]
    """By Hugging Face name, of what the engine read."""
    in_place: int
    """How many of them were computed over the live parameters. The rest are over what went into the loader: vLLM
    repacks those layers for the CPU, and the bytes as such exist no more."""


def merge_reports(version: int, ranks: Sequence[Sequence[ShardReport]]) -> Manifest:
    """The manifest of a version from what every rank wrote.

    Raises:
        WeightsError: the ranks disagree on a tensor, or together they did not write exactly all of it.
    """
    if not ranks or not ranks[0]:
        raise WeightsError(f"version {version} holds no tensors")
    if len({len(rank) for rank in ranks}) != 1:
        raise WeightsError(f"the trainer's ranks wrote different numbers of tensors for version {version}")
    return Manifest(version=version, tensors=tuple(_entry(version, reports) for reports in zip(*ranks, strict=True)))


def _entry(version: int, reports: Sequence[ShardReport]) -> TensorEntry:
    first = reports[0]
    if any((report.name, report.shape, report.dtype) != (first.name, first.shape, first.dtype) for report in reports):
        raise WeightsError(f"the trainer's ranks disagree on {first.name!r} of version {version}")
    shards = sorted((report.shard for report in reports if report.shard is not None), key=lambda shard: shard.start)
    at = 0
    for shard in shards:
        if shard.start != at:
            what = "overlap" if shard.start < at else "leave a gap"
            raise WeightsError(f"the ranks' shards of {first.name!r} for version {version} {what} at element {at}")
        at += shard.elements
    if at != math.prod(first.shape):
        raise WeightsError(
            f"the ranks wrote {at} of {math.prod(first.shape)} elements of {first.name!r} for version {version}"
        )
    return TensorEntry(
        name=first.name,
        shape=first.shape,
        dtype=first.dtype,
        fingerprint=combine(report.fingerprint for report in reports),
        shards=tuple(shards),
    )
