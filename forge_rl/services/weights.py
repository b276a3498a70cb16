"""The WeightStore service: keeps versions in processes of its own, which outlive the trainer's and the engines'."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from monarch.actor import concurrent_endpoint
from monarch.rdma import RDMABuffer

from forge_rl.errors import ConfigError, ForgeError, ServiceError, WeightsError
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults, when_process_ends
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.runtime.tasks import task_group
from forge_rl.weights.leases import Holder, WeightReader, leased
from forge_rl.weights.manifest import Manifest, SegmentRef, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.remote import Puller, Shared
from forge_rl.weights.shared_memory import SharedMemoryTransport, ask
from forge_rl.weights.torchstore import TorchStoreTransport
from forge_rl.weights.transport import Transport
from forge_rl.weights.versions import VersionIndex
from forge_rl.weights.volume import Volume, problem, reclaim

T = TypeVar("T")


class WeightStore:
    """Typed handle of the WeightStore service."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The weight store: how versions travel, and how many are kept."""

        transport: Literal["auto", "shared_memory", "torchstore"] = "auto"
        """What carries the bytes. auto takes shared memory where it has room."""
        shm: Path = Path("/dev/shm")
        """Folder of shared memory that versions lie in."""
        bucket_mib: int = 64
        """What is written and loaded as one; a larger tensor is a bucket of its own."""
        keep_versions: int = 2
        """How many of the newest versions are kept, the one being written included; one being read is kept besides."""
        keep_gib: float = 64.0
        """Most memory that kept versions take; the newest is kept whatever its size."""

        def __post_init__(self) -> None:
            for flag, value, good, mend in (
                ("keep-versions", self.keep_versions, self.keep_versions >= 1, "1 or more"),
                ("keep-gib", self.keep_gib, self.keep_gib > 0, "a value above 0"),
                ("bucket-mib", self.bucket_mib, self.bucket_mib >= 1, "1 or more"),
            ):
                if not good:
                    raise ConfigError(f"--weights.{flag} is {value}", mend=f"set --weights.{flag} to {mend}")

    def __init__(self, config: Config, service: Service, transports: Mapping[str, Transport], choice: str) -> None:
        self._service = service
        self._transports = transports
        self._bucket_bytes = config.bucket_mib << 20
        self._deadline_s = 600.0
        self._folders: list[Path] = []
        self.choice = choice
        """Which transport carries the bytes, and why."""

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
        """Spawn the store's processes, one on each host.

        Args:
            config: how versions travel.
            cluster: where to spawn.
            faults: where failures are noted.
            deadline_s: for the start.
            hosts: on which versions are written or read; the first one keeps the index.
            expected_bytes: of one version, if known; `auto` chooses by it.

        Raises:
            WeightsError: shared memory was asked for and cannot be used.
        """
        needed = expected_bytes * config.keep_versions
        name, choice = _choose(config, needed)
        service = Service("weights", cluster, faults)
        async with task_group() as group:
            for host in hosts:
                imports = TorchStoreTransport.imports if name == "torchstore" else ()
                replica = service.spawn(WeightStoreActor, config, host, host=host, imports=imports)
                group.create_task(service.watch(replica, deadline_s=deadline_s))
        if name == "torchstore":
            shared = await TorchStoreTransport.open(service.replicas[0].mesh)
            return cls(config, service, dict.fromkeys(hosts, shared), choice)
        volumes = {host: replica.actor for host, replica in zip(hosts, service.replicas, strict=True)}
        store = cls(config, service, {host: SharedMemoryTransport(host, volumes) for host in hosts}, choice)
        for replica in service.replicas:
            folder, reclaimed = await service.call(replica, "open_volume", volumes, deadline_s=deadline_s)
            store._folders.append(folder)
            if reclaimed:
                store.choice += f"; {reclaimed / 2**30:.1f} GiB that a killed run had left were freed"
        return store

    def transport(self, host: str = THIS_HOST) -> Transport:
        """What processes on a host write and read with; it pickles."""
        return self._transports[host]

    def reader(self, host: str = THIS_HOST) -> WeightReader:
        """What a process of its own on a host, such as an evaluator, reads versions with; it pickles."""
        return WeightReader(self._service.replicas[0].actor, self._transports[host], self._deadline_s)

    @contextlib.asynccontextmanager
    async def publishing(
        self, version: int, specs: Sequence[TensorSpec], dtype: torch.dtype, *, host: str = THIS_HOST
    ) -> AsyncIterator[Publication]:
        """Reserve a version and its room; if the body fails before it is committed, it stays invisible for ever.

        Args:
            version: newer than all others.
            specs: every tensor of the model.
            dtype: of the published tensors.
            host: that the trainer's ranks are on.

        Raises:
            WeightsError: the version exists already, is older than the latest, or there is no room for it.
        """
        transport = self._transports[host]
        base, freed = await self._call("begin", version)
        drafted = None
        try:
            await self._unless_it_dies("free", transport.free(freed))
            drafted = draft(specs, version=version, dtype=dtype, base=base, bucket_bytes=self._bucket_bytes)
            drafted = await self._unless_it_dies("reserve", transport.reserve(drafted))
            publication = Publication(self, drafted)
            yield publication
            if not publication.committed:
                raise WeightsError(f"version {version} was not committed")
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                if drafted is None or await self._call("latest") != version:
                    own = [bucket.key for bucket in drafted.written] if drafted else []
                    await self._call("abort", version, str(error) or type(error).__name__, (*freed, *own))
                    await transport.free(own)
            raise

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        """The manifest of a version, the latest by default, which is kept at least as long as the body runs.

        If this process dies meanwhile, the lease ends with it.
        """
        async with leased(self._call, version) as manifest:
            yield manifest

    async def wait_for(self, version: int) -> int:
        """Wait until this version or a newer one can be read.

        Returns:
            The latest version then.

        Raises:
            WeightsError: its publisher gave up.
        """
        latest: int = await self._call("wait_for", version)
        return latest

    async def latest(self) -> int | None:
        """The newest version that can be read, or None before the first."""
        latest: int | None = await self._call("latest")
        return latest

    async def stop(self) -> None:
        """End the store; its versions are gone."""
        for replica in self._service.replicas:
            if replica.alive:
                with contextlib.suppress(ForgeError):
                    await self._service.call(replica, "close", deadline_s=10.0)
        await self._service.stop()
        if any(folder.exists() for folder in self._folders):  # of a process that was killed
            reclaim(self._folders[0].parent.parent)

    async def _call(self, method: str, *args: object) -> Any:
        """Ask the index."""
        if not self._service.replicas:
            raise ServiceError("it has been stopped", service="weights", call=method, mend="start the run again")
        return await self._service.call(self._service.replicas[0], method, *args, deadline_s=self._deadline_s)

    async def _unless_it_dies(self, method: str, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a transport, which hears of a death only after seconds.

        Raises:
            ServiceError: a process of the store died.
        """
        task = asyncio.ensure_future(work)
        replicas = self._service.replicas
        ends: list[asyncio.Future[Any]] = [task, *(replica.death for replica in replicas)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                dead = next(replica for replica in replicas if replica.death.done())
                await self._service.call(dead, method, deadline_s=self._deadline_s)
            return await task
        finally:
            task.cancel()


class Publication:
    """A version that is being written."""

    def __init__(self, store: WeightStore, drafted: Manifest) -> None:
        self._store = store
        self.draft = drafted
        """What to write and where, for `Transport.write` on every rank."""
        self.committed = False

    async def commit(self, ranks: Sequence[Sequence[ShardReport]]) -> Manifest:
        """Write the manifest, which makes the version visible.

        Args:
            ranks: what each of the trainer's ranks wrote.

        Raises:
            WeightsError: together they did not write exactly what the draft says.
        """
        manifest = complete(self.draft, ranks)
        await self._store._call("commit", manifest)
        self.committed = True
        return manifest


class WeightStoreActor(ServiceActor):
    """A host's volume; the first one also keeps the index of versions."""

    def __init__(self, config: WeightStore.Config, host: str) -> None:
        self._config = config
        self._host = host
        self._index = VersionIndex(keep_versions=config.keep_versions, keep_bytes=int(config.keep_gib * (1 << 30)))
        self._leases: dict[str, tuple[Holder, int]] = {}
        """By name, who holds it, and on which version."""
        self._unneeded: list[str] = []
        """Keys of buckets that the next publisher frees before it begins: whoever ends a lease may be dead."""
        self._watched: set[Holder] = set()
        self._volume: Volume | None = None
        self._puller: Puller | None = None
        self._shared = Shared()

    @concurrent_endpoint
    async def open_volume(self, volumes: Mapping[str, Any]) -> tuple[Path, int]:
        """Make the host's folder in shared memory. Returns it, and the bytes that a killed run had left behind."""
        self._volume = Volume(self._config.shm)
        self._puller = Puller(
            self._host,
            share=lambda host, keys: ask(volumes[host], "share", keys, what=f"the weight store on host {host!r}"),
            watch=lambda host: volumes[host].never.call_one(),
            reserve=self._volume.reserve,
            free=self._volume.free,
        )
        return self._volume.folder, self._volume.reclaimed

    @concurrent_endpoint
    async def close(self) -> None:
        """Remove the host's segments."""
        await self._close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        """Monarch's hook when the actor is stopped, also by a start that failed elsewhere."""
        await self._close()

    @concurrent_endpoint
    async def reserve(self, sizes: dict[str, int]) -> dict[str, SegmentRef]:
        return self.volume.reserve(sizes)

    @concurrent_endpoint
    async def free(self, keys: tuple[str, ...]) -> None:
        self.puller.forget(keys)
        for ref in self.volume.free(keys):
            await self._shared.forget(ref.path)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> None:
        """Begin to bring a version from the hosts that it was written on; nothing happens where it is here already."""
        self.puller.pull(manifest)

    @concurrent_endpoint
    async def local(self, key: str) -> SegmentRef:
        """The place on this host of a bucket that is pulled, as soon as it is whole and checked."""
        return await self.puller.bucket(key)

    @concurrent_endpoint
    async def share(self, keys: tuple[str, ...]) -> list[RDMABuffer]:
        """This host's buckets, for another one to read."""
        refs = {key: self.volume.find(key) for key in keys}
        if gone := [key for key, ref in refs.items() if ref is None]:
            raise WeightsError(f"host {self._host!r} holds no bucket {gone[0]}", mend="hold a lease while reading")
        return await self._shared.buffers([ref for ref in refs.values() if ref is not None])

    @concurrent_endpoint
    async def never(self) -> None:
        """Ends only with this process, which whoever waits then hears of."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def begin(self, version: int) -> tuple[Manifest | None, tuple[str, ...]]:
        base, freed = self._index.begin(version)
        freed, self._unneeded = (*freed, *self._unneeded), []
        return base, freed

    @concurrent_endpoint
    async def commit(self, manifest: Manifest) -> None:
        self._unneeded.extend(await self._index.commit(manifest))

    @concurrent_endpoint
    async def abort(self, version: int, reason: str, keys: tuple[str, ...]) -> None:
        """Give up a version; `keys` are of buckets that its publisher was to free, and of its own."""
        self._unneeded.extend((*await self._index.abort(version, reason), *keys))

    @concurrent_endpoint
    async def lease(self, version: int | None, lease: str, holder: Holder) -> Manifest:
        manifest = self._index.lease(version)
        if holder.namespace == Holder.this_process().namespace and holder not in self._watched:
            self._watched.add(holder)
            loop = asyncio.get_running_loop()

            def end() -> None:
                loop.call_soon_threadsafe(self._end_leases, holder)

            when_process_ends(holder.pid, end)
        self._leases[lease] = holder, manifest.version
        return manifest

    @concurrent_endpoint
    async def release(self, lease: str) -> None:
        self._release(lease)

    @concurrent_endpoint
    async def wait_for(self, version: int) -> int:
        return await self._index.wait_for(version)

    @concurrent_endpoint
    async def latest(self) -> int | None:
        return self._index.latest

    async def _close(self) -> None:
        puller, volume = self._puller, self._volume
        self._puller = self._volume = None
        if puller is not None:
            await puller.close()
        if volume is not None:
            volume.close()

    def _end_leases(self, holder: Holder) -> None:
        self._watched.discard(holder)
        for lease in [lease for lease, (of, _) in self._leases.items() if of == holder]:
            self._release(lease)

    def _release(self, lease: str) -> None:
        """Nothing happens if it has ended already, or never began."""
        if lease in self._leases:
            self._unneeded.extend(self._index.release(self._leases.pop(lease)[1]))

    @property
    def puller(self) -> Puller:
        """What brings versions here from other hosts, once open_volume has run."""
        assert self._puller is not None, "open_volume comes first"
        return self._puller

    @property
    def volume(self) -> Volume:
        """This host's, once open_volume has run."""
        assert self._volume is not None, "open_volume comes first"
        return self._volume


def _choose(config: WeightStore.Config, needed: int) -> tuple[str, str]:
    """The transport, and what to say about it."""
    if config.transport == "torchstore":
        return "torchstore", "weights travel by torchstore, as asked for"
    wrong = problem(config.shm, needed)
    if wrong is None:
        asked = ", as asked for" if config.transport == "shared_memory" else ""
        return "shared_memory", f"weights travel by shared memory in {config.shm}{asked}"
    if config.transport == "auto":
        return "torchstore", f"weights travel by torchstore, several times slower: {wrong}"
    raise WeightsError(
        f"--weights.transport is shared_memory, and {wrong}",
        mend="free memory, give the container more shared memory (docker run --shm-size), lower "
        "--weights.keep-versions, or set --weights.transport auto",
    )
