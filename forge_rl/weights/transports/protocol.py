"""Protocol of weight transports. All of them must pass the same conformance test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Manifest, ShardReport, TensorEntry, is_of
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
    """Named tensors of a version that arrive together, in shared memory or on a GPU.

    It can be pickled and opened in any process on this host:

        async for bucket in transport.fetch(manifest):
            with bucket.open() as tensors:
                for entry in bucket.entries:
                    model[entry.name].copy_(tensors[entry.name])
    """

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Name, shape and dtype of each tensor."""

    def open(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Make the tensors readable by name while the block runs; they must not be written or kept.

        Raises:
            WeightsError: the bytes are gone or, when the block ends, were replaced meanwhile: the data read must not be
                used.
        """


def to_write(drafted: Manifest, shards: Iterable[LocalShard]) -> Iterator[tuple[TensorEntry, LocalShard]]:
    """Yield a rank's shards of the tensors that the version writes, with their entries.

    Raises:
        WeightsError: a shard's tensor is not in the draft.
    """
    entries = {entry.name: entry for entry in drafted.tensors}
    for shard in shards:
        entry = entries.get(shard.name)
        if entry is None:
            raise WeightsError(f"version {drafted.version} was not to hold {shard.name!r}, which a rank writes")
        # Other tensors are unchanged and stay in an older version's bucket.
        if is_of(entry.bucket, drafted.version):
            yield entry, shard


class Transport(Protocol):
    """Moves versions between processes. An instance is bound to one host; pickled, it works in any process there."""

    async def reserve(self, drafted: Manifest) -> Manifest:
        """Reserve memory for the buckets that a version writes; called once, before any rank writes.

        Returns:
            The draft with its buckets' segments.

        Raises:
            WeightsError: out of memory; nothing was reserved, and the message has the bytes needed and free.
        """

    async def write(self, drafted: Manifest, shards: Iterable[LocalShard], *, rank: int) -> list[ShardReport]:
        """Cast one rank's shards and write those that the version writes; called in each trainer process.

        Raises:
            WeightsError: a shard's tensor is not in the draft, or the version was abandoned meanwhile.
        """

    async def prefetch(self, manifest: Manifest) -> None:
        """Copy a version to this host ahead of `fetch`, if the transport copies versions to hosts.

        The caller holds a lease on the version.

        Raises:
            WeightsError: a bucket cannot be had.
        """

    def fetch(self, manifest: Manifest) -> AsyncGenerator[TensorBucket, None]:
        """Yield a version's buckets as they arrive.

        A bucket may be gone once the next one is requested. The caller holds a lease on the version and closes the
        generator (contextlib.aclosing).
        """

    async def free(self, keys: Collection[str]) -> None:
        """Free buckets; missing ones are ignored."""
