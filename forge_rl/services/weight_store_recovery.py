"""Replaces processes of the weight store that died; versions survive in the shared memory that they left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ServiceError
from forge_rl.runtime.service import Replica, Service
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.weight_store_actor import Holder, WeightStoreActor
from forge_rl.services.weight_store_config import KEEP_BYTES, WeightStoreConfig
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.transports.protocol import Transport
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport

_CALL_S = 60.0
_LOST_S = 5.0
"""Time after the death of a process in which the job may say that its whole host is gone."""
_MOST_REMEMBERED = 8
"""Number of newest versions whose manifests are remembered; the store keeps fewer, or leases are remembered anyway."""


class StoreRecovery:
    """Starts the store's processes and their successors, and remembers what the index needs to begin again.

    A successor continues with the segments of its host that match the remembered manifests. If it has the index, the
    versions whose buckets are all there are published again, under their numbers and with their leases; readers of a
    version continue. If another run has removed the segments meanwhile, their versions are lost.

    Args:
        service: the store's service, without replicas.
        config: settings of the store.
        hosts: hosts of its processes; the first one has the index.
        deadline_s: timeout of a process's start.
    """

    def __init__(self, service: Service, config: WeightStoreConfig, hosts: Sequence[str], deadline_s: float) -> None:
        self.transports: dict[str, Transport] = {}
        """Transport of each host that is not lost, for its processes."""
        self.folders: dict[str, Path] = {}
        """Shared-memory folder of each host's volume."""
        self.leases: dict[str, Manifest] = {}
        """Leases of this process, by name."""
        self.epoch = 0
        """Number of rollbacks so far."""
        self._service = service
        self._config = config
        self._hosts = tuple(hosts)
        self._deadline_s = deadline_s
        self._versions: dict[int, Manifest] = {}
        self._lost: set[str] = set()
        """Hosts that are gone, with their versions."""

    async def spawn(self, index: int, imports: Sequence[str] = ()) -> Replica:
        """Spawn the process of a host, by its place in `hosts`."""
        config, host = self._config, self._hosts[index]
        limits = config.keep_versions, KEEP_BYTES
        replica = self._service.spawn(
            WeightStoreActor, host, config.shm, *limits, host=host, imports=imports, index=index
        )
        await self._service.watch(replica, deadline_s=self._deadline_s)
        return replica

    async def add(self, host: str) -> None:
        """Start the process of a host that joins after `open`."""
        index = len(self._hosts)
        self._hosts = (*self._hosts, host)
        try:
            replica = await self.spawn(index)
        finally:
            if len(self._service.replicas) == index:  # nothing could be spawned there
                self._hosts = self._hosts[:index]
        self.folders[host], _ = await replica.call("open_volume", self._meet(), deadline_s=self._deadline_s)
        await self._introduce(host, replica)

    async def _introduce(self, host: str, replica: Replica, known_keys: tuple[str, ...] | None = None) -> None:
        """Tell the other processes of a host's new one."""
        peers = [peer for peer in self._service.replicas if peer is not replica and peer.alive]
        await asyncio.gather(
            *(peer.call("meet", host, replica.actor, known_keys, deadline_s=_CALL_S) for peer in peers)
        )

    async def open(self) -> int:
        """Create all volumes, and supervise their processes; returns the bytes reclaimed from killed runs."""
        reclaimed = 0
        for host, replica in zip(self._hosts, self._service.replicas, strict=True):
            self.folders[host], freed_bytes = await replica.call(
                "open_volume", self._meet(), deadline_s=self._deadline_s
            )
            reclaimed += freed_bytes
        Supervisor(self._service, self._respawn, self._config.restart).supervise()
        return reclaimed

    def note_commit(self, manifest: Manifest) -> None:
        """Remember a version that became visible."""
        self._versions[manifest.version] = manifest
        for version in sorted(self._versions)[:-_MOST_REMEMBERED]:
            del self._versions[version]

    def note_rollback(self, version: int) -> None:
        """Forget later versions."""
        self.epoch += 1
        self._versions = {number: manifest for number, manifest in self._versions.items() if number <= version}

    def _meet(self) -> dict[str, object]:
        """Create transports to the current processes; returns their actors by host, the index's first."""
        volumes = {
            host: replica.actor
            for host, replica in zip(self._hosts, self._service.replicas, strict=True)
            if host not in self._lost
        }
        self.transports.clear()
        self.transports |= {host: SharedMemoryTransport(host, volumes) for host in volumes}
        return volumes

    async def _respawn(self, index: int) -> None:
        """Start the successor of a dead process, which continues with the segments left in shared memory."""
        host = self._hosts[index]
        if index and await self._service.cluster.is_lost(host, within_s=_LOST_S):
            self._lost.add(host)
            self._meet()
            self._service.abandon(self._service.replicas[index])
            await asyncio.Event().wait()  # until the service is stopped: nothing can be started there
        # Leased versions may be older than any remembered one, or of an earlier epoch.
        known_manifests = [*self._versions.values(), *self.leases.values()]
        segments = {
            bucket.key: bucket.segment
            for manifest in known_manifests
            for bucket in manifest.buckets
            if bucket.host == host and bucket.segment is not None
        }
        replica = await self.spawn(index)
        volumes = self._meet()
        self.folders[host], _ = await replica.call(
            "open_volume", volumes, self.folders.get(host), segments, deadline_s=self._deadline_s
        )
        known_keys: tuple[str, ...] | None = None
        # The first process holds the index, which begins again with what this process remembers and the hosts still
        # have.
        if not index:
            versions, leases = dict(self._versions), dict(self.leases)
            complete_manifests = await self._whole([*versions.values(), *leases.values()])
            versions = {number: manifest for number, manifest in versions.items() if manifest in complete_manifests}
            leases = {name: manifest for name, manifest in leases.items() if manifest in complete_manifests}
            index_state = tuple(versions.values()), leases, Holder.this_process(), self.epoch
            await replica.call("restore", *index_state, deadline_s=_CALL_S)
            # Hosts free copies of all other buckets: nobody will ask for them.
            known_keys = tuple({key for manifest in complete_manifests for key in manifest.keys})
        await self._introduce(host, replica, known_keys)

    async def _whole(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Return the manifests whose buckets are all still held by their hosts."""
        bucket_keys: set[tuple[str, str]] = set()
        for index, host in enumerate(self._hosts):
            # A key alone is not enough: the segment must be the very one that was committed.
            refs = {b.key: b.segment for manifest in manifests for b in manifest.buckets if b.host == host}
            if not refs:
                continue
            with contextlib.suppress(ServiceError):  # a host that is lost
                # Its process may have died as well, and then continues too.
                replica = self._service.replicas[0] if not index else await self._service.returned(index)
                bucket_keys |= {(host, key) for key in await replica.call("holds", refs, deadline_s=_CALL_S)}
        return [
            manifest
            for manifest in manifests
            if all((bucket.host, bucket.key) in bucket_keys for bucket in manifest.buckets)
        ]
