"""The WeightStore service: keeps versions in processes of its own, which outlive the trainer's and the engines'."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from forge_rl.errors import ConfigError, ForgeError, ServiceError, WeightsError
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service
from forge_rl.runtime.tasks import task_group
from forge_rl.services.weight_store_actor import WeightStoreActor
from forge_rl.weights.leases import WeightReader, leased
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.transports.protocol import Transport
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from forge_rl.weights.transports.torchstore import TorchStoreTransport
from forge_rl.weights.volume import problem, reclaim

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
            for flag, value, good, hint in (
                ("keep-versions", self.keep_versions, self.keep_versions >= 1, "1 or more"),
                ("keep-gib", self.keep_gib, self.keep_gib > 0, "a value above 0"),
                ("bucket-mib", self.bucket_mib, self.bucket_mib >= 1, "1 or more"),
            ):
                if not good:
                    raise ConfigError(f"--weights.{flag} is {value}", hint=f"set --weights.{flag} to {hint}")

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
            folder, reclaimed = await replica.call("open_volume", volumes, deadline_s=deadline_s)
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
        base, freed, epoch = await self._call("begin", version)
        drafted = None
        try:
            await self._unless_it_dies("free", transport.free(freed))
            drafted = draft(
                specs, version=version, dtype=dtype, base=base, bucket_bytes=self._bucket_bytes, epoch=epoch
            )
            drafted = await self._unless_it_dies("reserve", transport.reserve(drafted))
            publication = Publication(self, drafted)
            yield publication
            if not publication.committed:
                raise WeightsError(f"version {version} was not committed")
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                keys = (*freed, *(bucket.key for bucket in (drafted.written if drafted else ())))
                await transport.free(
                    await self._call("abort", version, epoch, str(error) or type(error).__name__, keys)
                )
            raise

    async def rollback(self, version: int) -> None:
        """Forget all versions above this one: the trainer continues from it, and publishes the same numbers again.

        `latest` is then the newest version kept up to this one, or None. Who reads a forgotten version goes on, who
        waits for one waits for the new one. A publish that is in progress cannot be committed any more.
        """
        await self._call("rollback", version)

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
                    await replica.call("close", deadline_s=10.0)
        await self._service.stop()
        if any(folder.exists() for folder in self._folders):  # of a process that was killed
            reclaim(self._folders[0].parent.parent)

    async def _call(self, method: str, *args: object) -> Any:
        """Ask the index."""
        if not self._service.replicas:
            raise ServiceError("it has been stopped", service="weights", call=method, hint="start the run again")
        return await self._service.replicas[0].call(method, *args, deadline_s=self._deadline_s)

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
                await dead.call(method, deadline_s=self._deadline_s)
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
        hint="free memory, give the container more shared memory (docker run --shm-size), lower "
        "--weights.keep-versions, or set --weights.transport auto",
    )
