"""The shared-memory transport: trainers write a version into segments that every engine on the host maps.

Every other host pulls each bucket once, by RDMA, into segments of its own, and serves it on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge_rl.errors import WeightsError
from forge_rl.system.tasks import TaskGroup
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Bucket, Manifest, SegmentRef, ShardReport, TensorEntry
from forge_rl.weights.segment import SegmentBucket, check, writable
from forge_rl.weights.transports.protocol import LocalShard, to_write
from forge_rl.weights.transports.remote import ask
from forge_rl.weights.volume import writing


class SharedMemoryTransport:
    """Client of the store's volumes: a `Transport`.

    Args:
        host: host of this client; it writes and reads segments there.
        volumes: actor that owns each host's volume, by host, with the endpoints of WeightStoreActor.
    """

    def __init__(self, host: str, volumes: Mapping[str, Any]) -> None:
        self._host = host
        self._volumes = dict(volumes)

    async def reserve(self, drafted: Manifest) -> Manifest:
        # Hosts that write nothing are asked too: they then drop the memory that no version needs.
        sizes: dict[str, dict[str, int]] = {bucket.host or self._host: {} for bucket in drafted.buckets}
        for bucket in drafted.written:
            sizes[bucket.host or self._host][bucket.key] = bucket.bytes
        reserved: dict[str, tuple[str, SegmentRef]] = {}
        try:
            for host, host_sizes in sizes.items():
                refs = await self._ask(host, "reserve", host_sizes)
                reserved |= {key: (host, ref) for key, ref in refs.items()}
        except BaseException:
            # A host without room fails the version; what other hosts have reserved for it is given back.
            await self.free(reserved)
            raise
        placed_buckets = {
            bucket.key: replace(bucket, host=reserved[bucket.key][0], segment=reserved[bucket.key][1])
            for bucket in drafted.written
        }
        return replace(drafted, buckets=tuple(placed_buckets.get(bucket.key, bucket) for bucket in drafted.buckets))

    async def write(self, drafted: Manifest, shards: Iterable[LocalShard], *, rank: int) -> list[ShardReport]:
        return await asyncio.to_thread(self._write, drafted, list(to_write(drafted, shards)))

    async def prefetch(self, manifest: Manifest) -> None:
        # `pull` only starts the transfers, which outlive this call; `local` waits for each.
        if remote_keys := [bucket.key for bucket in manifest.buckets if bucket.host != self._host]:
            await self._ask(self._host, "pull", manifest)
            for key in remote_keys:
                await self._ask(self._host, "local", key, moves=manifest.bytes)

    async def fetch(self, manifest: Manifest) -> AsyncGenerator[SegmentBucket, None]:
        # Start all transfers first, so that later buckets arrive while the first ones are loaded.
        if any(bucket.host != self._host for bucket in manifest.buckets):
            await self._ask(self._host, "pull", manifest)
        entries = manifest.entries
        for bucket in manifest.buckets:
            segment = bucket.segment
            if bucket.host != self._host:
                segment = await self._ask(self._host, "local", bucket.key, moves=manifest.bytes)
            assert segment is not None, "reserve gave every bucket its place"
            yield SegmentBucket(segment=segment, entries=entries[bucket.key])

    async def free(self, keys: Collection[str]) -> None:
        if keys:
            async with TaskGroup() as group:
                for host in self._volumes:
                    group.create_task(self._free(host, tuple(keys)))

    async def _free(self, host: str, keys: Sequence[str]) -> None:
        try:
            await self._ask(host, "free", keys)
        except WeightsError:
            if host == self._host:  # copies on another host have ended with its process
                raise

    def _write(self, drafted: Manifest, writes: Sequence[tuple[TensorEntry, LocalShard]]) -> list[ShardReport]:
        # Map only the buckets that this rank writes to; other hosts' segments cannot be opened here.
        bucket_keys = {entry.bucket for entry, _ in writes}
        buckets = {bucket.key: _place(bucket, self._host) for bucket in drafted.written if bucket.key in bucket_keys}
        with contextlib.ExitStack() as stack:
            for folder in {Path(ref.path).parent for ref in buckets.values()}:
                # Lock first, check after: `writable` and `check` then refuse a segment that was freed before the lock,
                # and none that is freed later is reused under it.
                stack.enter_context(writing(folder))
            memory = {key: writable(ref) for key, ref in buckets.items()}
            fingerprints = move(
                [
                    Move(
                        shard.tensor_slice.of(entry.of(memory[entry.bucket])),
                        shard.values.detach(),
                        entry.shape,
                        shard.tensor_slice,
                    )
                    for entry, shard in writes
                ]
            )
            for ref in buckets.values():  # the publish may have been given up meanwhile
                check(ref)
        return [
            ShardReport(name=shard.name, tensor_slice=shard.tensor_slice, fingerprint=value)
            for (_, shard), value in zip(writes, fingerprints, strict=True)
        ]

    async def _ask(self, host: str, method: str, *args: object, moves: int = 0) -> Any:
        actor_name = f"the weight store on host {host!r}"
        return await ask(self._volumes[host], method, *args, actor_name=actor_name, moves=moves)


def _place(bucket: Bucket, host: str) -> SegmentRef:
    if bucket.segment is None or bucket.host != host:
        raise WeightsError(
            f"bucket {bucket.key} was reserved on host {bucket.host!r}, and this rank is on {host!r}",
            hint="publish with the hosts of all ranks",
        )
    return bucket.segment
