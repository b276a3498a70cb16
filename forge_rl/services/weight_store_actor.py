"""One process of the WeightStore service: a host's volume, and on the first host also the index of versions."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint
from monarch.rdma import RDMABuffer

from forge_rl.errors import WeightsError
from forge_rl.runtime.processes import process_space, when_process_ends
from forge_rl.runtime.service import ServiceActor
from forge_rl.weights.fanout import Fanout
from forge_rl.weights.manifest import Bucket, Manifest, SegmentRef
from forge_rl.weights.transports.remote import Puller, SegmentBuffers, ask
from forge_rl.weights.versions import VersionIndex
from forge_rl.weights.volume import Volume


@dataclass(frozen=True)
class Holder:
    """A process that holds leases of versions; they end with it at the latest."""

    pid: int
    space: str
    """Its `process_space`: in another one, the same pid is another process."""

    @staticmethod
    def this_process() -> Holder:
        return Holder(os.getpid(), process_space())


class _PeerVolumes:
    """Calls the other hosts' volumes on behalf of this host; the first one has the index."""

    def __init__(
        self, host: str, volumes: Mapping[str, Any], drop: Callable[[Collection[str]], Coroutine[Any, Any, None]]
    ) -> None:
        self._host = host
        self._volumes = volumes
        self.drop = drop

    async def join(self, buckets: Sequence[Bucket], failed: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        reply: tuple[dict[str, str], tuple[str, ...]]
        reply = await self._ask(next(iter(self._volumes)), "join", self._host, tuple(buckets), tuple(failed))
        return reply

    async def share(self, host: str, bucket: Bucket, moves: int) -> RDMABuffer:
        return await self._ask(host, "share", bucket.key, moves=moves)

    async def watch(self, host: str) -> object:
        return await self._volumes[host].never.call_one()

    async def _ask(self, host: str, method: str, *args: object, moves: int = 0) -> Any:
        target = f"the weight store on host {host!r}"
        return await ask(self._volumes[host], method, *args, actor_name=target, moves=moves)


class WeightStoreActor(ServiceActor):
    """Holds a host's volume; the first host's actor also holds the index of versions.

    Args:
        host: host that it runs on.
        shm: shared-memory folder for the host's volume.
        keep_versions: number of newest versions to keep.
        keep_bytes: maximum memory of kept versions.
    """

    def __init__(self, host: str, shm: Path, keep_versions: int, keep_bytes: int) -> None:
        self._host = host
        self._shm = shm
        self._index = VersionIndex(keep_versions=keep_versions, keep_bytes=keep_bytes)
        self._fanout = Fanout(1)
        self._leases: dict[str, Holder] = {}
        """Holder of each lease, by name."""
        self._unneeded: list[str] = []
        """Keys of buckets that the next publisher frees before it begins: the holder of an ended lease may be dead and
        cannot free them."""
        self._watched: set[Holder] = set()
        self._volumes: dict[str, Any] = {}
        """Actor of each host's volume, the index's first."""
        self._volume: Volume | None = None
        self._puller: Puller | None = None
        self._shared = SegmentBuffers()

    @concurrent_endpoint
    async def open_volume(
        self,
        volumes: Mapping[str, Any],
        old_folder: Path | None = None,
        segments: Mapping[str, SegmentRef] | None = None,
    ) -> tuple[Path, int]:
        """Create the host's folder in shared memory, or continue with one that a dead process left; see `Volume`.

        Returns:
            The folder, and the bytes reclaimed from a killed run.
        """
        if len(volumes) > 1:  # hosts map segments for one another; import torch before the first pull
            await asyncio.to_thread(importlib.import_module, "torch")
        self._volumes = {**volumes, **self._volumes}  # keep processes that introduced themselves meanwhile
        self._volume = Volume(self._shm, previous_folder=old_folder, previous_segments=segments)
        self._fanout = Fanout(len(volumes))
        self._puller = Puller(self._host, self._volume, _PeerVolumes(self._host, self._volumes, self._free))
        return self._volume.folder, self._volume.reclaimed

    @concurrent_endpoint
    async def holds(self, refs: Mapping[str, SegmentRef]) -> tuple[str, ...]:
        """Return the keys of those segments that this host still has."""
        return tuple(key for key, ref in refs.items() if self.volume.find(key) == ref)

    @concurrent_endpoint
    async def restore(
        self, versions: tuple[Manifest, ...], leases: Mapping[str, Manifest], holder: Holder, epoch: int
    ) -> None:
        """Take over the index of a process that died; see `VersionIndex.restore`.

        Args:
            holder: the holder of all leases.
        """
        self._retire(self._index.restore(versions, leases, epoch=epoch))
        self._leases = dict.fromkeys(leases, holder)
        self._watch(holder)

    @concurrent_endpoint
    async def meet(self, host: str, volume: Any, known_keys: tuple[str, ...] | None) -> None:
        """Take note of the new process of a host, which has no copies.

        Args:
            known_keys: keys of the buckets that its index knows; other copies are freed. None if it has no index.
        """
        self._volumes[host] = volume
        self._fanout.leave(host)
        if known_keys is not None and self._puller is not None:
            await self._free(set(self._puller.known) - {*known_keys})

    @concurrent_endpoint
    async def close(self) -> None:
        """Remove the host's segments."""
        await self._close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        """Clean up when Monarch stops the actor, including after a start that failed elsewhere."""
        await self._close()

    async def _close(self) -> None:
        # Pulls end before the segments that they write to are removed.
        puller, volume = self._puller, self._volume
        self._puller = self._volume = None
        if puller is not None:
            await puller.close()
        if volume is not None:
            volume.close()

    @concurrent_endpoint
    async def reserve(self, sizes: dict[str, int]) -> dict[str, SegmentRef]:
        return self.volume.reserve(sizes)

    @concurrent_endpoint
    async def free(self, keys: tuple[str, ...]) -> None:
        await self._free(keys)

    async def _free(self, keys: Collection[str]) -> None:
        self.puller.forget(keys)
        # A buffer that is not dropped would keep the memory of a segment whose file is gone.
        for ref in self.volume.free(keys):
            await self._shared.forget(ref.path)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> None:
        """Begin to pull a version from hosts that have it; does nothing if it is already here."""
        self.puller.pull(manifest)

    @concurrent_endpoint
    async def local(self, key: str) -> SegmentRef:
        """Return this host's segment of a pulled bucket, once it is complete and verified."""
        return await self.puller.bucket(key)

    @concurrent_endpoint
    async def share(self, key: str) -> RDMABuffer:
        """Return the RDMA buffer over this host's bucket, once it has arrived here, for another host to read.

        Raises:
            WeightsError: the bucket is not on this host.
        """
        # A copy may still be arriving here, and is waited for; a bucket that was written here is in the volume.
        ref = await self.puller.bucket(key) if self.puller.knows(key) else self.volume.find(key)
        if ref is None:
            raise WeightsError(f"host {self._host!r} holds no bucket {key}", hint="hold a lease while reading")
        return (await self._shared.buffers([ref]))[0]

    @concurrent_endpoint
    async def received(self) -> dict[str, int]:
        """Return the bytes received from each other host so far."""
        return dict(self.puller.received)

    @concurrent_endpoint
    async def join(
        self, host: str, buckets: tuple[Bucket, ...], failed: tuple[str, ...]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Place a host that copies buckets among their holders; see `Peers.join`."""
        # Without a lease, a bucket may be freed while it is copied.
        if missing_keys := [bucket.key for bucket in buckets if not self._index.needs(bucket.key)]:
            raise WeightsError(f"bucket {missing_keys[0]} is not kept any more", hint="hold a lease while reading")
        parents = self._fanout.join(host, buckets, failed=failed)
        return parents, self._fanout.stale(host, self._index.in_use)

    @concurrent_endpoint
    async def never(self) -> None:
        """Never return, so that callers notice when this process ends."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def begin(self, version: int) -> tuple[Manifest | None, tuple[str, ...], int]:
        """Reserve a version; returns the previous one, keys of buckets to free first, and the epoch."""
        base, stale_keys = self._index.begin(version)
        self._retire(stale_keys)
        # The publisher also frees what ended leases have left since the last publish.
        stale_keys, self._unneeded = tuple(self._unneeded), []
        return base, stale_keys, self._index.epoch

    @concurrent_endpoint
    async def commit(self, manifest: Manifest) -> None:
        self._retire(self._index.commit(manifest))

    @concurrent_endpoint
    async def abort(self, version: int, epoch: int, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Abandon a version, unless it was committed after all.

        Args:
            version: the version that was begun.
            epoch: the epoch in which it was begun.
            keys: buckets that its publisher had to free, and its own.

        Returns:
            Keys of unneeded buckets. If the publisher does not free them, the next one does.
        """
        dropped_keys = self._index.abort(version, epoch=epoch)
        unneeded = tuple(key for key in keys if not self._index.needs(key))
        self._retire((*dropped_keys, *unneeded))
        return unneeded

    @concurrent_endpoint
    async def rollback(self, version: int) -> None:
        self._retire(self._index.rollback(version))

    @concurrent_endpoint
    async def lease(self, version: int | None, lease: str, holder: Holder) -> Manifest:
        manifest = self._index.lease(lease, version)
        self._watch(holder)
        self._leases[lease] = holder
        return manifest

    @concurrent_endpoint
    async def release(self, lease: str) -> None:
        self._release(lease)

    def _watch(self, holder: Holder) -> None:
        """End a process's leases when it ends."""
        # In another process space, the pid may belong to another process.
        if holder.space == process_space() and holder not in self._watched:
            self._watched.add(holder)
            loop = asyncio.get_running_loop()
            # The action runs in a thread of its own; leases belong to the loop.
            when_process_ends(holder.pid, lambda: loop.call_soon_threadsafe(self._end_leases, holder))

    def _end_leases(self, holder: Holder) -> None:
        self._watched.discard(holder)
        for lease in [lease for lease, lease_holder in self._leases.items() if lease_holder == holder]:
            self._release(lease)

    def _release(self, lease: str) -> None:
        self._leases.pop(lease, None)
        self._retire(self._index.release(lease))

    def _retire(self, keys: Collection[str]) -> None:
        """Have the next publisher free buckets on all hosts; until then nobody copies them."""
        self._fanout.forget(keys)
        self._unneeded.extend(keys)

    @property
    def puller(self) -> Puller:
        """Pulls versions from other hosts; available once open_volume has run."""
        assert self._puller is not None, "open_volume comes first"
        return self._puller

    @property
    def volume(self) -> Volume:
        """This host's segments; available once open_volume has run."""
        assert self._volume is not None, "open_volume comes first"
        return self._volume
