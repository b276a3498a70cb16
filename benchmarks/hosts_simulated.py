"""Many hosts that copy a version, in virtual time: placed by the store's own code, over links of a measured speed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks import virtual_time
from forge_rl.weights.fanout import Fanout
from forge_rl.weights.manifest import Bucket

_WRITER = "writer"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speed at which a host sends, one bucket at a time, and receives."""

    bytes_per_s: float
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Result of a simulation."""

    seconds: float
    """Time until the last host that lives has the version."""
    origin_copies: float
    """Bytes that left the writer's host, in versions."""


class _Host:
    def __init__(self) -> None:
        self.link = asyncio.Lock()
        """Held while it sends a bucket."""
        self.arrived: dict[str, asyncio.Event] = {}
        self.dead = asyncio.Event()
        self.sent = 0


class _Network:
    def __init__(self, link: Link, size: int, hosts: int, *, from_writer: bool) -> None:
        count = -(-size // link.bucket_bytes)
        self.buckets = [Bucket(key=f"1/{number}", bytes=link.bucket_bytes, host=_WRITER) for number in range(count)]
        self._link = link
        self._fanout = Fanout(hosts + 1)
        self._from_writer = from_writer
        self.hosts = {name: _Host() for name in (_WRITER, *(f"host{number}" for number in range(hosts)))}
        for name, host in self.hosts.items():
            host.arrived = {bucket.key: asyncio.Event() for bucket in self.buckets}
            if name == _WRITER:
                for event in host.arrived.values():
                    event.set()

    async def copy(self, name: str) -> None:
        """Copy all buckets to a host, unless it dies."""
        host, failed = self.hosts[name], set[str]()
        parents = self._place(name, self.buckets, failed)
        for number, bucket in enumerate(self.buckets):
            while not await self._receive(parents[bucket.key], bucket, host):
                if host.dead.is_set():
                    return
                failed.add(parents[bucket.key])
                # Only buckets that are missing get a new parent; what has arrived stays.
                parents |= self._place(name, self.buckets[number:], failed)
            host.arrived[bucket.key].set()

    def _place(self, name: str, buckets: list[Bucket], failed: set[str]) -> dict[str, str]:
        if self._from_writer:
            return dict.fromkeys((bucket.key for bucket in buckets), _WRITER)
        return self._fanout.join(name, buckets, failed=failed)

    async def _receive(self, parent: str, bucket: Bucket, host: _Host) -> bool:
        """Receive a bucket; returns whether both hosts lived until it had arrived."""
        source = self.hosts[parent]
        ready = [asyncio.ensure_future(source.arrived[bucket.key].wait()), asyncio.ensure_future(source.dead.wait())]
        await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
        for waiter in ready:
            waiter.cancel()
        if source.dead.is_set() or host.dead.is_set():
            return False
        # One bucket at a time: a host's link is shared by all that read from it.
        async with source.link:
            await asyncio.sleep(bucket.bytes / self._link.bytes_per_s)
            source.sent += bucket.bytes
        return not (source.dead.is_set() or host.dead.is_set())


def simulate(link: Link, size: int, hosts: int, *, from_writer: bool = False, death: bool = False) -> Simulated:
    """Copy a version of `size` bytes to hosts that all ask at once.

    Args:
        from_writer: each copies everything from the host that wrote it.
        death: the first host dies once it has half of the buckets.
    """

    async def main() -> Simulated:
        network = _Network(link, size, hosts, from_writer=from_writer)
        names = [name for name in network.hosts if name != _WRITER]

        async def kill() -> None:
            first = network.hosts[names[0]]
            await first.arrived[network.buckets[len(network.buckets) // 2].key].wait()
            first.dead.set()

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(network.copy(name))
            if death:
                group.create_task(kill())
        copies = network.hosts[_WRITER].sent / (len(network.buckets) * link.bucket_bytes)
        return Simulated(seconds=asyncio.get_running_loop().time(), origin_copies=copies)

    return virtual_time.run(main())
