"""The WeightStore service: holds versions in its own processes, which outlive trainer ranks and engines."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from forge_rl.errors import ForgeError, ReplicaError, ServiceError, WeightsError
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service
from forge_rl.runtime.supervisor import start_first
from forge_rl.services.weight_mirror import WeightMirror
from forge_rl.services.weight_store_actor import Holder
from forge_rl.services.weight_store_config import WeightStoreConfig
from forge_rl.services.weight_store_recovery import StoreRecovery
from forge_rl.system.tasks import task_group
from forge_rl.weights.delta_files import DeltaFolder
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.transports.protocol import Transport
from forge_rl.weights.transports.torchstore import INSTALL, TorchStoreTransport
from forge_rl.weights.volume import problem, reclaim

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
        recovery: StoreRecovery,
        *,
        bucket_bytes: int,
        choice: str,
        mirror: WeightMirror | None = None,
    ) -> None:
        self._service = service
        self._recovery = recovery
        self._bucket_bytes = bucket_bytes
        self._mirror = mirror
        self._deadline_s = 600.0
        self._written_bytes = self._whole_bytes = 0
        """Bytes of tensors written since the last `pop_metrics`, and bytes of the whole versions."""
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
        name, choice = _choose(config, config.held_bytes(expected_bytes))
        bucket_bytes = config.bucket_mib << 20
        if config.mirror:
            await asyncio.to_thread(
                DeltaFolder(config.mirror).check
            )  # report a wrong address now, not at the first version
        service = Service("weights", cluster, faults)
        recovery = StoreRecovery(service, config, hosts, deadline_s)
        imports = TorchStoreTransport.imports if name == "torchstore" else ()
        await start_first(service, len(hosts), lambda index: recovery.spawn(index, imports))
        mirror = await WeightMirror.open(config, cluster, faults, host=hosts[0], deadline_s=deadline_s)
        if name == "torchstore":  # whose versions are lost with its process
            shared = await TorchStoreTransport.open(service.replicas[0].meshes[0].procs)
            recovery.transports |= dict.fromkeys(hosts, shared)
        elif reclaimed := await recovery.open():
            # Shared memory outlives its processes, also those of runs that were killed.
            choice += f"; {reclaimed / 2**30:.1f} GiB that a killed run had left were freed"
        return cls(service, recovery, bucket_bytes=bucket_bytes, choice=choice, mirror=mirror)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Shared-memory folder of each host's volume."""
        return tuple(self._recovery.folders.values())

    def transport(self, host: str = THIS_HOST) -> Transport:
        """Return the transport for processes on a host; it can be pickled.

        Raises:
            WeightsError: the host is gone.
        """
        if host not in self._recovery.transports:
            raise WeightsError(f"the weight store has no host {host!r}, or no more", hint="see the run's events")
        return self._recovery.transports[host]

    async def add(self, host: str) -> None:
        """Start a process on a host that joins, so that engines there can read versions.

        Raises:
            ForgeError: it does not start.
        """
        if self._service.supervised:
            await self._recovery.add(host)
        else:  # all hosts read from torchstore's one process
            self._recovery.transports[host] = self.transport()

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
        # The base is the version before: unchanged buckets are shared with it instead of written.
        base, stale_keys, epoch = await self._call("begin", version)
        transport, transports = self.transport(hosts[0]), self._recovery.transports
        if base is not None and any(bucket.host and bucket.host not in transports for bucket in base.buckets):
            base = None  # buckets of a lost host must be written again
        drafted, publication = None, None
        try:
            # Freed before the reservation, which needs their memory: the store holds little more than two versions.
            await self._unless_it_dies("free", hosts, transport.free(stale_keys))
            drafted = draft(
                specs,
                version=version,
                dtype=dtype,
                base=base,
                bucket_bytes=self._bucket_bytes,
                epoch=epoch,
                hosts=hosts,
            )
            drafted = await self._unless_it_dies("reserve", hosts, transport.reserve(drafted))
            publication = Publication(drafted, self._commit)
            yield publication
            if not publication.committed:
                raise WeightsError(f"version {version} was not committed")
            self._written_bytes += drafted.written_bytes
            self._whole_bytes += drafted.whole_bytes
            if self._mirror is not None:
                self._mirror.note(self.lease(), transport)
        except BaseException:
            # A committed version stays, whatever failed after it.
            if publication is not None and publication.committed:
                raise
            with contextlib.suppress(Exception):  # the first error is the one to report
                keys = (*stale_keys, *(bucket.key for bucket in (drafted.written if drafted else ())))
                await transport.free(await self._call("abort", version, epoch, keys))
            raise

    async def rollback(self, version: int) -> None:
        """Forget all versions above this one: the trainer resumes from it and publishes the same numbers again.

        The newest kept version up to this one is then the latest. Readers of a forgotten version continue. A publish
        in progress can no longer be committed.
        """
        await self._call("rollback", version)
        self._recovery.note_rollback(version)

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        """Keep a version, by default the latest, at least while the body runs; yields its manifest.

        If this process dies meanwhile, the lease ends with it.
        """
        # Named here, so that it can be released even if the reply that would name it never comes.
        lease = secrets.token_hex(8)
        try:
            manifest = await self._call("lease", version, lease, Holder.this_process())
            self._recovery.leases[lease] = manifest
            yield manifest
        finally:  # even if cancelled before the reply
            self._recovery.leases.pop(lease, None)
            with contextlib.suppress(ForgeError):  # a dead store holds no leases, and the next call reports its death
                await self._call("release", lease)

    async def prefetch(self, manifest: Manifest, hosts: Iterable[str]) -> None:
        """Bring a leased version to hosts while their engines still decode; a load then does not wait for it.

        A failure is left to the engines' loads, which report it.
        """
        async with task_group() as group:
            for host in set(hosts):
                group.create_task(self._prefetch(manifest, host))

    async def _prefetch(self, manifest: Manifest, host: str) -> None:
        deaths = self.deaths
        with contextlib.suppress(ForgeError):
            try:
                await self.transport(host).prefetch(manifest)
            except WeightsError:
                if self.deaths == deaths:
                    raise
                # Another try only if a process of the store died meanwhile; its successor has the same versions.
                await self.returned(host)
                await self.transport(host).prefetch(manifest)

    async def received(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each host has received so far, by sending host."""
        return {
            replica.host: await replica.call("received", deadline_s=self._deadline_s)
            for replica in self._service.replicas
            if replica.alive
        }

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call: bytes of tensors that versions wrote, and their share of the bytes of
        whole versions; and those written to --weights.mirror, see `WeightMirror.pop_metrics`."""
        metrics = self._mirror.pop_metrics() if self._mirror is not None else {}
        if self._whole_bytes:
            metrics["weights/written_bytes"] = float(self._written_bytes)
            metrics["weights/written_share"] = self._written_bytes / self._whole_bytes
        self._written_bytes = self._whole_bytes = 0
        return metrics

    async def stop(self) -> None:
        """Stop the store; its versions are lost."""
        if self._mirror is not None:
            await self._mirror.stop()
        # Closing removes the segments; they would outlive killed processes.
        live_replicas = [replica for replica in self._service.replicas if replica.alive]
        calls = [replica.call("close", deadline_s=10.0) for replica in live_replicas]
        await asyncio.gather(*calls, return_exceptions=True)
        await self._service.stop()
        if any(folder.exists() for folder in self.folders):  # left by a killed process
            reclaim(self.folders[0].parent.parent)

    @property
    def deaths(self) -> int:
        """Number of times that a process of the store has died."""
        return sum(replica.incarnation + (not replica.alive) for replica in self._service.replicas)

    async def returned(self, host: str = THIS_HOST) -> None:
        """Wait until the index and a host's process serve, after a death until the successor does.

        Raises:
            ServiceError: one is not replaced any more.
        """
        for replica in self._needed((host,)):
            await self._service.returned(replica.index)

    def _needed(self, hosts: Sequence[str]) -> list[Replica]:
        """Return the processes without which these hosts cannot write versions."""
        return [replica for replica in self._service.replicas if not replica.index or replica.host in hosts]

    async def _call(self, method: str, *args: object) -> Any:
        """Call the index; if its process dies, call its successor, which remembers the same versions."""
        while self._service.replicas:
            replica = await self._service.returned(0)
            with contextlib.suppress(ReplicaError):
                return await replica.call(method, *args, deadline_s=self._deadline_s)
        raise ServiceError("it has been stopped", service="weights", call=method, hint="start the run again")

    async def _commit(self, manifest: Manifest) -> None:
        """Commit a version to the index that it was begun in."""
        # Not repeated with a successor of the index, which does not know this version: the caller publishes again.
        await self._service.replicas[0].call("commit", manifest, deadline_s=self._deadline_s)
        self._recovery.note_commit(manifest)

    async def _unless_it_dies(self, method: str, hosts: Sequence[str], work: Coroutine[Any, Any, T]) -> T:
        """Await a transport's work, but fail as soon as a process that it needs dies, which the transport itself would
        notice only after seconds.

        Raises:
            ServiceError: a process of the store died.
        """
        task = asyncio.ensure_future(work)
        replicas = self._needed(hosts)
        futures: list[asyncio.Future[Any]] = [task, *(replica.death for replica in replicas)]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                dead_replica = next(replica for replica in replicas if replica.death.done())
                # A call to a dead replica raises the error that names its death.
                await dead_replica.call(method, deadline_s=self._deadline_s)
            return await task
        finally:
            task.cancel()


class Publication:
    """A version being written; created by `WeightStore.publishing`.

    Args:
        drafted: manifest of the buckets to write, and where.
        commit: makes its manifest visible.
    """

    def __init__(self, drafted: Manifest, commit: Callable[[Manifest], Coroutine[Any, Any, None]]) -> None:
        self._commit = commit
        self.draft = drafted
        """Manifest without fingerprints, for `Transport.write` on every rank."""
        self.committed = False

    async def commit(self, ranks: Sequence[Sequence[ShardReport]], merged: Sequence[ShardReport] = ()) -> Manifest:
        """Commit the manifest, which makes the version visible.

        Args:
            ranks: reports of each trainer rank.
            merged: slices of weights with adapters, these added; see `TrainEngine.merged_reports`.

        Raises:
            WeightsError: the ranks did not write exactly the draft's contents.
        """
        manifest = complete(self.draft, ranks, merged)
        commit_task = asyncio.ensure_future(self._commit(manifest))
        try:
            # A cancellation must not leave it open whether the version became visible.
            await asyncio.shield(commit_task)
        finally:  # a cancelled commit may still become visible, and the next publisher must know
            await asyncio.wait([commit_task])
            self.committed = not commit_task.cancelled() and commit_task.exception() is None
        return manifest


def _choose(config: WeightStore.Config, num_bytes: int) -> tuple[str, str]:
    """Choose a transport; returns its name, and a sentence about it.

    Raises:
        WeightsError: the requested transport cannot be used, or, with `auto`, none can.
    """
    room = "free memory, give the container more shared memory (docker run --shm-size), lower --weights.keep-versions"
    is_installed = TorchStoreTransport.is_installed()
    if config.transport == "torchstore":
        if not is_installed:
            raise WeightsError("--weights.transport is torchstore, which is not installed", hint=INSTALL)
        return "torchstore", "weights travel by torchstore, as asked for"
    reason = problem(config.shm, num_bytes)
    if reason is None:
        suffix = ", as asked for" if config.transport == "shared_memory" else ""
        return "shared_memory", f"weights travel by shared memory in {config.shm}{suffix}"
    if config.transport == "shared_memory":
        raise WeightsError(
            f"--weights.transport is shared_memory, and {reason}", hint=f"{room}, or set --weights.transport auto"
        )
    if not is_installed:
        raise WeightsError(
            f"weights cannot travel: {reason}, and torchstore is not installed", hint=f"{room}, or {INSTALL}"
        )
    return "torchstore", f"weights travel by torchstore, several times slower: {reason}"
