"""The WeightStore service: keeps versions in processes of its own, which outlive the trainer's and the engines'."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from monarch.actor import concurrent_endpoint

from forge_rl.errors import ConfigError, WeightsError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.weights.buckets import Transport
from forge_rl.weights.manifest import Manifest, ShardReport, merge_reports
from forge_rl.weights.torchstore import TorchStoreTransport
from forge_rl.weights.versions import VersionIndex


class WeightStore:
    """Typed handle of the WeightStore service."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The weight store: how versions travel, and how many are kept."""

        transport: Literal["torchstore"] = "torchstore"
        """What carries the bytes."""
        keep_versions: int = 2
        """How many of the newest versions are kept; one that is being read is kept besides."""
        keep_gib: float = 64.0
        """Most memory that kept versions take; the newest is kept whatever its size."""

        def __post_init__(self) -> None:
            if self.keep_versions < 1:
                raise ConfigError(
                    f"{self.keep_versions} versions are kept", mend="set --weights.keep-versions to 1 or more"
                )
            if self.keep_gib <= 0:
                raise ConfigError(f"{self.keep_gib} GiB hold nothing", mend="set --weights.keep-gib above 0")

    def __init__(self, service: Service, transport: Transport) -> None:
        self._service = service
        self._deadline_s = 600.0
        self.transport = transport
        """Moves buckets; pickles, and works in every process."""

    @classmethod
    async def start(cls, config: Config, cluster: Cluster, faults: Faults, *, deadline_s: float) -> WeightStore:
        """Spawn the store's process."""
        service = Service("weights", cluster, faults)
        replica = service.spawn(WeightStoreActor, config, imports=TorchStoreTransport.imports)
        await service.watch(replica, deadline_s=deadline_s)
        return cls(service, await TorchStoreTransport.open(replica.mesh))

    @contextlib.asynccontextmanager
    async def publishing(self, version: int) -> AsyncIterator[Publication]:
        """Reserve a version; if the body fails before it is committed, the version stays invisible for ever.

        Raises:
            WeightsError: the version exists already, or is older than the latest.
        """
        await self._call("begin", version)
        publication = Publication(self, version)
        try:
            yield publication
        except BaseException as error:
            if not publication.committed:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    await self._call("abort", version, str(error) or type(error).__name__)
                    await self.transport.delete_version(version)
            raise
        if not publication.committed:
            await self._call("abort", version, "nothing was committed")
            await self.transport.delete_version(version)
            raise WeightsError(f"version {version} was not committed")

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        """The manifest of a version, the latest by default, which is kept at least as long as the body runs."""
        manifest: Manifest = await self._call("lease", version)
        try:
            yield manifest
        finally:
            await self._free(await self._call("release", manifest.version))

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
        await self._service.stop()

    async def _call(self, method: str, *args: object) -> Any:
        return await self._service.route(method, *args, deadline_s=self._deadline_s)

    async def _free(self, retired: Sequence[Manifest]) -> None:
        for manifest in retired:
            for key in manifest.buckets:
                await self.transport.delete(key)


class Publication:
    """A version that is being written."""

    def __init__(self, store: WeightStore, version: int) -> None:
        self._store = store
        self._version = version
        self.committed = False

    async def commit(self, ranks: Sequence[Sequence[ShardReport]]) -> Manifest:
        """Write the manifest, which makes the version visible, and free what retention gives up.

        Args:
            ranks: what each of the trainer's ranks wrote.
        """
        manifest = merge_reports(self._version, ranks)
        retired = await self._store._call("commit", manifest)
        self.committed = True
        await self._store._free(retired)
        return manifest


class WeightStoreActor(ServiceActor):
    """The index of versions; the bytes lie with the transport."""

    def __init__(self, config: WeightStore.Config) -> None:
        self._index = VersionIndex(keep_versions=config.keep_versions, keep_bytes=int(config.keep_gib * (1 << 30)))

    @concurrent_endpoint
    async def begin(self, version: int) -> None:
        self._index.begin(version)

    @concurrent_endpoint
    async def commit(self, manifest: Manifest) -> tuple[Manifest, ...]:
        return await self._index.commit(manifest)

    @concurrent_endpoint
    async def abort(self, version: int, reason: str) -> None:
        await self._index.abort(version, reason)

    @concurrent_endpoint
    async def lease(self, version: int | None) -> Manifest:
        return self._index.lease(version)

    @concurrent_endpoint
    async def release(self, version: int) -> tuple[Manifest, ...]:
        return self._index.release(version)

    @concurrent_endpoint
    async def wait_for(self, version: int) -> int:
        return await self._index.wait_for(version)

    @concurrent_endpoint
    async def latest(self) -> int | None:
        return self._index.latest
