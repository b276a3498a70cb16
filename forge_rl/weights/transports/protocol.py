"""Protocol of transports of weights; they share one conformance test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Bucket, Manifest, ShardReport, TensorEntry, is_of
from forge_rl.weights.slices import TensorSlice

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """Slice of one tensor that a trainer rank holds, and no other rank writes."""

    name: str
    tensor_slice: TensorSlice
    values: torch.Tensor
    """Values, of the slice's size, any dtype, on any device, contiguous in the last dim."""


class TensorBucket(Protocol):
    """Named tensors of a version that arrive together, wherever their bytes lie: shared memory, or a GPU.

    It pickles, and any process of this host can open it:

        async for bucket in transport.fetch(manifest):
            with bucket.open() as tensors:
                for entry in bucket.entries:
                    model[entry.name].copy_(tensors[entry.name])
    """

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Name, shape and dtype of each tensor."""

    def open(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Make the tensors readable, by name, while the block runs; nobody may write to them or keep them.

        Raises:
            WeightsError: the bytes are gone, or, at the end of the block, were replaced while it ran: what was read
                must not be used.
        """


def to_write(drafted: Manifest, shards: Iterable[LocalShard]) -> Iterator[tuple[TensorEntry, LocalShard]]:
    """A rank's shards of the tensors that the version writes, with their places.

    Raises:
        WeightsError: a shard is of a tensor that the draft does not have.
    """
    entries = {entry.name: entry for entry in drafted.tensors}
    for shard in shards:
        entry = entries.get(shard.name)
        if entry is None:
            raise WeightsError(f"version {drafted.version} was not to hold {shard.name!r}, which a rank writes")
        if is_of(entry.bucket, drafted.version):
            yield entry, shard


def to_read(manifest: Manifest, names: Collection[str] | None) -> list[tuple[Bucket, tuple[TensorEntry, ...]]]:
    """The buckets that hold the named tensors (all by default), with those tensors, in the manifest's order."""
    held: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        if names is None or entry.name in names:
            held.setdefault(entry.bucket, []).append(entry)
    return [(bucket, tuple(held[bucket.key])) for bucket in manifest.buckets if bucket.key in held]


class Transport(Protocol):
    """Moves versions between processes. An instance is bound to one host and pickles: it works in any process there."""

    async def reserve(self, drafted: Manifest) -> Manifest:
        """Make room for the buckets that a version writes; called once, before any rank writes.

        Returns:
            The draft, its buckets with their places.

        Raises:
            WeightsError: there is no room; nothing was taken, and the message has the bytes needed and free.
        """

    async def write(self, drafted: Manifest, shards: Iterable[LocalShard], *, rank: int) -> list[ShardReport]:
        """Cast one rank's shards and write those that the version writes; called in each trainer process.

        Raises:
            WeightsError: a shard is of a tensor that the draft does not have, or the version was given up meanwhile.
        """

    def fetch(self, manifest: Manifest, names: Collection[str] | None = None) -> AsyncGenerator[TensorBucket, None]:
        """The buckets that hold the named tensors (all by default), one after the other as they come.

        A bucket may be gone as soon as the next one is asked for. The caller holds a lease on the version, and closes
        the generator (contextlib.aclosing).
        """

    async def free(self, keys: Collection[str]) -> None:
        """Free buckets; nothing happens for one that is not there."""
