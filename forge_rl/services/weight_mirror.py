"""Writes the store's versions to an address, for engines elsewhere; see weights/deltas.py."""

from __future__ import annotations

import asyncio
import functools
from contextlib import AbstractAsyncContextManager

from monarch.actor import concurrent_endpoint

from forge_rl.errors import ForgeError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service, ServiceActor
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.weight_store_config import WeightStoreConfig
from forge_rl.weights.deltas import DeltaPublisher
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.transports.protocol import Transport

_NAME = "mirror"
_DEADLINE_S = 600.0
_LEAST_RATE = 1e6
"""Minimum bytes of a version written per second."""
_LAST_S = 60.0
"""Seconds for the last version to be written when the run ends."""

_Work = tuple[AbstractAsyncContextManager[Manifest], Transport]
"""Lease of a version to write, not entered yet, and the transport to read it with."""


async def _write(manifest: Manifest, transport: Transport, replica: Replica) -> int:
    """Write a version; returns the bytes written."""
    deadline_s = _DEADLINE_S + manifest.bytes / _LEAST_RATE
    written_bytes: int = await replica.call("write", manifest, transport, deadline_s=deadline_s)
    return written_bytes


class MirrorActor(ServiceActor):
    """Holds the version written last, in a process of its own.

    Args:
        address: where to write.
        full_every: number of versions after which one is written whole.
    """

    def __init__(self, address: str, full_every: int) -> None:
        self._publisher = DeltaPublisher(address, full_every=full_every)

    @concurrent_endpoint
    async def write(self, manifest: Manifest, transport: Transport) -> int:
        """Write a leased version; returns the bytes written."""
        return await self._publisher.publish(manifest, transport)


class WeightMirror:
    """Writes each new version; if versions come faster than they can be written, it skips some.

    A version that cannot be written is recorded as a fault until a later one is written; it does not stop the run.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._next: _Work | None = None
        self._task: asyncio.Task[None] | None = None
        self._written_bytes = self._whole_bytes = 0
        """Bytes written since the last `pop_metrics`, and bytes of the versions."""

    @classmethod
    async def open(
        cls, config: WeightStoreConfig, cluster: Cluster, faults: Faults, *, host: str, deadline_s: float
    ) -> WeightMirror | None:
        """Start the process that writes, on a host of the store; None if no address is given."""
        if not config.mirror:
            return None
        service = Service(_NAME, cluster, faults)

        async def start_one(index: int) -> None:
            # A file system may need keys from the environment.
            replica = service.spawn(
                MirrorActor, config.mirror, config.mirror_full_every, host=host, secrets=True, index=index
            )
            await service.watch(replica, deadline_s=deadline_s)

        await Supervisor(service, start_one, Restart()).start(1)
        return cls(service)

    def note(self, lease: AbstractAsyncContextManager[Manifest], transport: Transport) -> None:
        """Write a version once the one before it is written; it is leased only then."""
        self._next = lease, transport
        # A running task takes `_next` by itself.
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call: bytes written, and their share of the versions' bytes; empty if none."""
        written_bytes, whole_bytes = self._written_bytes, self._whole_bytes
        self._written_bytes = self._whole_bytes = 0
        if not whole_bytes:
            return {}
        share = written_bytes / whole_bytes
        return {"weights/mirrored_bytes": float(written_bytes), "weights/mirrored_share": share}

    async def stop(self) -> None:
        """Wait until the last version is written, for a minute at most, and stop."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST_S)
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._service.stop()

    async def _run(self) -> None:
        while self._next is not None:
            # Of the versions that came while the last one was written, only the newest is left here.
            (lease, transport), self._next = self._next, None
            try:
                async with lease as manifest:
                    written_bytes = await self._service.try_on(functools.partial(_write, manifest, transport))
                    self._written_bytes += written_bytes
                    self._whole_bytes += manifest.bytes
            except ForgeError as error:
                self._service.faults.record(_NAME, 0, f"a version was not written: {error.message}", fatal=False)
            else:
                self._service.faults.recovered(_NAME, 0)
