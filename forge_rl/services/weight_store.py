"""The WeightStore service: holds versions in its own processes, which outlive trainer ranks and engines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from forge_rl.errors import ForgeError, ServiceError, WeightsError
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.runtime.tasks import task_group
from forge_rl.services.weight_store_actor import Holder, WeightStoreActor
from forge_rl.services.weight_store_config import WeightStoreConfig
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.transports.protocol import Transport
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from forge_rl.weights.transports.torchstore import INSTALL, TorchStoreTransport
from forge_rl.weights.volume import problem, reclaim

_LOST_S = 5.0
"""Time after the death of a volume in which the job may say that its whole host is gone."""

T = TypeVar("T")


class WeightStore:
    """Typed handle of the WeightStore service.

    async with store.publishing(version, specs, torch.bfloat16) as publication:
        reports = await write_on_every_rank(publication.draft, store.transport())
        await publication.commit(reports)
    async with store.lease() as manifest:  # the latest version, kept while the block runs
        async for bucket in store.transport().fetch(manifest): ...
    """

    Config: TypeAlias = WeightStoreConfig

    def __init__(
        self,
        service: Service,
        transports: Mapping[str, Transport],
        *,
        bucket_bytes: int,
        choice: str,
        folders: Sequence[Path] = (),
    ) -> None:
        self._service = service
        self._transports = dict(transports)
        self._deciding: set[asyncio.Task[None]] = set()
        """Decisions in progress about volumes that died."""
        self._bucket_bytes = bucket_bytes
        self._deadline_s = 600.0
        self.folders = tuple(folders)
        """Shared-memory folder of each host's volume."""
        self.choice = choice
        """Sentence that names the chosen transport and the reason."""

    @classmethod
    async def start(
        cls,
        config: Config,
        cluster: Cluster,
        faults: Faults,
        *,
        deadline_s: float,
        hosts: Sequence[str] = (THIS_HOST,),
        expected_bytes: int = 0,
    ) -> WeightStore:
        """Spawn the store's processes, one per host.

        Args:
            config: how versions travel.
            cluster: where to spawn.
            faults: records failures.
            deadline_s: timeout of the start.
            hosts: hosts on which versions are written or read; the first one holds the index.
            expected_bytes: size of one version, if known; used by `auto`.

        Raises:
            WeightsError: the requested transport cannot be used, or, with `auto`, none can.
        """
        name, choice = _choose(config, expected_bytes * config.keep_versions)
        bucket_bytes = config.bucket_mib << 20
        service = Service("weights", cluster, faults)
        kept = config.keep_versions, int(config.keep_gib * (1 << 30))
        async with task_group() as group:
            for host in hosts:
                imports = TorchStoreTransport.imports if name == "torchstore" else ()
                replica = service.spawn(WeightStoreActor, host, config.shm, *kept, host=host, imports=imports)
                group.create_task(service.watch(replica, deadline_s=deadline_s))
        if name == "torchstore":
            shared = await TorchStoreTransport.open(service.replicas[0].meshes[0].procs)
            return cls(service, dict.fromkeys(hosts, shared), bucket_bytes=bucket_bytes, choice=choice)
        service.recoverable = len(hosts) > 1
        volumes = {host: replica.actor for host, replica in zip(hosts, service.replicas, strict=True)}
        folders = []
        for replica in service.replicas:
            folder, reclaimed = await replica.call("open_volume", volumes, deadline_s=deadline_s)
            folders.append(folder)
            if reclaimed:
                choice += f"; {reclaimed / 2**30:.1f} GiB that a killed run had left were freed"
        transports = {host: SharedMemoryTransport(host, volumes) for host in hosts}
        store = cls(service, transports, bucket_bytes=bucket_bytes, choice=choice, folders=folders)
        for replica in service.replicas:
            replica.death.add_done_callback(functools.partial(store._on_death, replica, cluster, faults))
        return store

    def transport(self, host: str = THIS_HOST) -> Transport:
        """Return the transport for processes on a host; it can be pickled.

        Raises:
            WeightsError: the host is gone.
        """
        if host not in self._transports:
            raise WeightsError(f"the weight store has no host {host!r}, or no more", hint="see the run's events")
        return self._transports[host]

    @contextlib.asynccontextmanager
    async def publishing(
        self, version: int, specs: Sequence[TensorSpec], dtype: torch.dtype, *, hosts: Sequence[str] = (THIS_HOST,)
    ) -> AsyncIterator[Publication]:
        """Reserve a version and its memory; if the body fails before the commit, the version never becomes visible.

        Args:
            version: its number, higher than all others.
            specs: every tensor of the model.
            dtype: dtype of the published tensors.
            hosts: hosts of the trainer's ranks; each writes its share of the buckets.

        Raises:
            WeightsError: the version already exists, is older than the latest, or does not fit.
        """
        transport = self.transport(hosts[0])
        base, freed, epoch = await self._call("begin", version)
        if base is not None and any(bucket.host and bucket.host not in self._transports for bucket in base.buckets):
            base = None  # what a lost host held is written again
        drafted, publication = None, None
        try:
            await self._unless_it_dies("free", transport.free(freed))
            drafted = draft(
                specs,
                version=version,
                dtype=dtype,
                base=base,
                bucket_bytes=self._bucket_bytes,
                epoch=epoch,
                hosts=hosts,
            )
            drafted = await self._unless_it_dies("reserve", transport.reserve(drafted))
            publication = Publication(drafted, self._call)
            yield publication
            if not publication.committed:
                raise WeightsError(f"version {version} was not committed")
        except BaseException:
            if publication is not None and publication.committed:
                raise
            with contextlib.suppress(Exception):  # the first error is the one to report
                keys = (*freed, *(bucket.key for bucket in (drafted.written if drafted else ())))
                await transport.free(await self._call("abort", version, epoch, keys))
            raise

    async def rollback(self, version: int) -> None:
        """Forget all versions above this one: the trainer resumes from it and publishes the same numbers again.

        The newest kept version up to this one is then the latest. Readers of a forgotten version continue. A publish
        in progress can no longer be committed.
        """
        await self._call("rollback", version)

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        """Keep a version, by default the latest, at least while the body runs; yields its manifest.

        If this process dies meanwhile, the lease ends with it.
        """
        lease = secrets.token_hex(8)
        try:
            yield await self._call("lease", version, lease, Holder.this_process())
        finally:  # even if cancelled before the reply
            with contextlib.suppress(ForgeError):  # a dead store holds no leases, and the next call reports its death
                await self._call("release", lease)

    async def prefetch(self, manifest: Manifest, hosts: Iterable[str]) -> None:
        """Bring a leased version to hosts while their engines still decode; a load then does not wait for it.

        What cannot be brought is left to the engines' loads, which report it.
        """
        async with task_group() as group:
            for host in set(hosts):
                group.create_task(self._prefetch(manifest, host))

    async def _prefetch(self, manifest: Manifest, host: str) -> None:
        with contextlib.suppress(WeightsError):
            await self._transports[host].prefetch(manifest)

    async def received(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each host has received from each other one so far."""
        return {
            replica.host: await replica.call("received", deadline_s=self._deadline_s)
            for replica in self._service.replicas
        }

    async def stop(self) -> None:
        """Stop the store; its versions are lost."""
        self._service.recoverable = False
        for task in self._deciding:
            task.cancel()
        living = [replica for replica in self._service.replicas if replica.alive]
        closing = [replica.call("close", deadline_s=10.0) for replica in living]
        await asyncio.gather(*closing, return_exceptions=True)
        await self._service.stop()
        if any(folder.exists() for folder in self.folders):  # left by a killed process
            reclaim(self.folders[0].parent.parent)

    def _on_death(self, replica: Replica, cluster: Cluster, faults: Faults, death: asyncio.Future[str]) -> None:
        if self._service.recoverable:
            deciding = asyncio.get_running_loop().create_task(self._decide(replica, cluster, faults, death.result()))
            self._deciding.add(deciding)
            deciding.add_done_callback(self._deciding.discard)

    async def _decide(self, replica: Replica, cluster: Cluster, faults: Faults, cause: str) -> None:
        """Forget the volume of a host that is gone; any other death ends the run."""
        is_index = replica is self._service.replicas[0]
        if not is_index and await cluster.is_lost(replica.host, within_s=_LOST_S):
            del self._transports[replica.host]
            volumes = {each.host: each.actor for each in self._service.replicas if each.host in self._transports}
            for host in self._transports:
                self._transports[host] = SharedMemoryTransport(host, volumes)
        else:
            self._service.abandon(replica)
            faults.record("weights", replica.index, cause)

    async def _call(self, method: str, *args: object) -> Any:
        """Call the index."""
        if not self._service.replicas:
            raise ServiceError("it has been stopped", service="weights", call=method, hint="start the run again")
        return await self._service.replicas[0].call(method, *args, deadline_s=self._deadline_s)

    async def _unless_it_dies(self, method: str, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a transport, but fail immediately when a process of the store dies, which it notices only after
        seconds.

        Raises:
            ServiceError: a process of the store died.
        """
        task = asyncio.ensure_future(work)
        replicas = [replica for replica in self._service.replicas if replica.host in self._transports]
        ends: list[asyncio.Future[Any]] = [task, *(replica.death for replica in replicas)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                dead = next(replica for replica in replicas if replica.death.done())
                await dead.call(method, deadline_s=self._deadline_s)
            return await task
        finally:
            task.cancel()


class Publication:
    """A version being written; created by `WeightStore.publishing`.

    Args:
        drafted: manifest of the buckets to write, and where.
        call: calls the index of versions.
    """

    def __init__(self, drafted: Manifest, call: Callable[..., Awaitable[object]]) -> None:
        self._call = call
        self.draft = drafted
        """Manifest without fingerprints, for `Transport.write` on every rank."""
        self.committed = False

    async def commit(self, ranks: Sequence[Sequence[ShardReport]]) -> Manifest:
        """Commit the manifest, which makes the version visible.

        Args:
            ranks: reports of each trainer rank.

        Raises:
            WeightsError: the ranks did not write exactly the draft's contents.
        """
        manifest = complete(self.draft, ranks)
        committing = asyncio.ensure_future(self._call("commit", manifest))
        try:
            await asyncio.shield(committing)
        finally:  # a cancelled commit may still become visible, and the next publisher must know
            await asyncio.wait([committing])
            self.committed = not committing.cancelled() and committing.exception() is None
        return manifest


def _choose(config: WeightStore.Config, needed: int) -> tuple[str, str]:
    """Choose a transport; returns its name, and a sentence about it.

    Raises:
        WeightsError: the requested transport cannot be used, or, with `auto`, none can.
    """
    room = "free memory, give the container more shared memory (docker run --shm-size), lower --weights.keep-versions"
    installed = TorchStoreTransport.is_installed()
    if config.transport == "torchstore":
        if not installed:
            raise WeightsError("--weights.transport is torchstore, which is not installed", hint=INSTALL)
        return "torchstore", "weights travel by torchstore, as asked for"
    wrong = problem(config.shm, needed)
    if wrong is None:
        asked = ", as asked for" if config.transport == "shared_memory" else ""
        return "shared_memory", f"weights travel by shared memory in {config.shm}{asked}"
    if config.transport == "shared_memory":
        raise WeightsError(
            f"--weights.transport is shared_memory, and {wrong}", hint=f"{room}, or set --weights.transport auto"
        )
    if not installed:
        raise WeightsError(
            f"weights cannot travel: {wrong}, and torchstore is not installed", hint=f"{room}, or {INSTALL}"
        )
    return "torchstore", f"weights travel by torchstore, several times slower: {wrong}"
