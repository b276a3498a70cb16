"""Stores whose state can be looked at, small versions whose values say what they are, and processes that use them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from monarch.actor import concurrent_endpoint

from forge_rl.errors import WeightsError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.replica import ReplicaState
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.services.weight_store import WeightStore
from forge_rl.services.weight_store_actor import Holder, WeightStoreActor
from forge_rl.services.weight_store_recovery import StoreRecovery
from forge_rl.weights.fingerprints import Move, fingerprint
from forge_rl.weights.manifest import Manifest, SegmentRef, ShardReport, TensorSpec
from forge_rl.weights.segment import readable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports import shared_memory
from forge_rl.weights.transports.protocol import LocalShard, Transport, to_write
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from tests.fake_actors import cluster, new_service_name
from tests.fake_host import bytes_of

SHAPES = {"a": (40, 16), "b": (7, 5), "c": (3,), "d": (16, 32)}
RANKS = 2
BUCKET_BYTES = 2600
"""Size of a bucket: a version takes two, of which the second holds three tensors."""
VERSION_BYTES = 2560 + 192 + 64 + 2048
"""Bytes of a whole version's buckets in float32, tensors being aligned to 64 bytes."""


@dataclass(frozen=True, kw_only=True)
class StoreState:
    """State of a store's actor."""

    versions: dict[int, Manifest]
    leases: set[str]
    unneeded: list[str]
    used: dict[str, SegmentRef]
    freed: list[SegmentRef]
    spare: list[SegmentRef]
    bytes: int
    reclaimed: int


class WatchedStoreActor(WeightStoreActor):
    """The store's own actor, which also tells what it holds."""

    @concurrent_endpoint
    async def state(self) -> StoreState:
        volume, index = self.volume, self._index
        return StoreState(
            versions=dict(index._versions),
            leases=set(self._leases),
            unneeded=list(self._unneeded),
            used=dict(volume._used),
            freed=list(volume._freed),
            spare=list(volume._spare),
            bytes=bytes_of(volume),
            reclaimed=volume.reclaimed,
        )

    @concurrent_endpoint
    async def abandon(self) -> None:
        """Let go of the volume's lock as the kernel does when the process is killed, and of nothing else."""
        os.close(self.volume._lock)
        self._volume = None


class SharedProcess:
    """A cluster with one process, in which any number of services live one after the other."""

    def __init__(self, logs: Path) -> None:
        self._cluster = Cluster(logs)
        self.on_lost = self._cluster.on_lost

    async def start(self) -> None:
        faults = Faults()
        faults.install()  # stays: Monarch's own hook would interrupt the tests that follow
        self._mesh = self._cluster.spawn("shared")
        service = Service(new_service_name(), self, faults)  # type: ignore[arg-type]
        await service.spawn(ServiceActor).call("process_id", deadline_s=60)

    def spawn(self, name: str, **_: object) -> Any:
        return self._mesh

    async def stop(self, name: str) -> None:
        """Do nothing: the process goes on."""

    async def close(self) -> None:
        await self._cluster.close()


@cache
def shared_process() -> SharedProcess:
    """This test run's process for stores; it ends with the run."""
    logs = Path(tempfile.mkdtemp(prefix="store-"))
    atexit.register(shutil.rmtree, logs, ignore_errors=True)
    return SharedProcess(logs)


class WatchedStore:
    """A store on a real process that other tests use too, and its actor's state."""

    def __init__(self, store: WeightStore, service: Service) -> None:
        self.store = store
        self._service = service

    async def call(self, method: str, *args: object) -> Any:
        return await self._service.replicas[0].call(method, *args, deadline_s=10)

    async def state(self) -> StoreState:
        return cast(StoreState, await self.call("state"))


async def open_shared(shm: Path, *, keep_versions: int = 2, keep_bytes: int = 1 << 40) -> WatchedStore:
    """A store in the shared process."""
    service = Service("weights", shared_process(), Faults())  # type: ignore[arg-type]
    replica = service.spawn(WatchedStoreActor, "local", shm, keep_versions, keep_bytes)
    replica.state = ReplicaState.SERVING
    volumes = {"local": replica.actor}
    recovery = StoreRecovery(service, WeightStore.Config(shm=shm), ["local"], 60)
    recovery.folders["local"], _ = await replica.call("open_volume", volumes, deadline_s=60)
    recovery.transports["local"] = SharedMemoryTransport("local", volumes)
    store = WeightStore(service, recovery, bucket_bytes=BUCKET_BYTES, choice="")
    return WatchedStore(store, service)


def run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, 300)

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def shared(shm: Path, **config: int) -> AsyncIterator[tuple[WeightStore, WatchedStore]]:
    """A store in the shared process."""
    watched = await open_shared(shm, **config)
    try:
        yield watched.store, watched
    finally:
        await watched.store.stop()


@contextlib.asynccontextmanager
async def real(logs: Path, shm: Path, **config: object) -> AsyncIterator[tuple[WeightStore, Service, Faults]]:
    """A store in a process of its own, and a process that uses it."""
    async with cluster(logs) as (meshes, faults):
        store = await WeightStore.start(WeightStore.Config(shm=shm, **config), meshes, faults, deadline_s=60)
        store._bucket_bytes = BUCKET_BYTES
        users = Service(new_service_name(), meshes, faults)
        await users.watch(users.spawn(StoreUser), deadline_s=60)
        try:
            yield store, users, faults
        finally:
            faults.closing = True
            await users.stop()
            await store.stop()


async def use(users: Service, method: str, *args: object) -> object:
    return await users.replicas[0].call(method, *args, deadline_s=30)


async def hold(store: WeightStore, users: Service, version: int | None) -> object:
    """Lease a version in the process of the users."""
    return await use(users, "hold", store._service.replicas[0].actor, store.transport(), version)


def segments(shm: Path) -> set[Path]:
    return {path for path in shm.rglob("*") if path.is_file() and path.name != "lock"}


def nothing_in(shm: Path) -> bool:
    return not list(shm.iterdir())


async def until_state(watched: WatchedStore, true: Callable[[StoreState], bool]) -> None:
    while not true(await watched.state()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def exist(manifest: Manifest) -> list[bool]:
    """Segments of a version that can still be read."""
    reads = []
    for bucket in manifest.buckets:
        assert bucket.segment is not None
        try:
            readable(bucket.segment)
        except WeightsError:
            reads.append(False)
        else:
            reads.append(True)
    return reads


def specs(changed: Collection[str] = tuple(SHAPES)) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=shape, changed=name in changed) for name, shape in SHAPES.items()]


def shards(values: Mapping[str, int], rank: int) -> list[LocalShard]:
    """A rank's rows of all tensors; every element of a tensor is its value, the version that changed it last."""
    specs = []
    for name, shape in SHAPES.items():
        rows = -(-shape[0] // RANKS)
        count = max(0, min(rows, shape[0] - rank * rows))
        tensor_slice = TensorSlice((rank * rows, *(0 for _ in shape[1:])), (count, *shape[1:]))
        specs.append(
            LocalShard(name=name, tensor_slice=tensor_slice, values=torch.full(tensor_slice.size, float(values[name])))
        )
    return specs


def all_of(version: int) -> dict[str, int]:
    return dict.fromkeys(SHAPES, version)


async def publish(
    store: WeightStore, version: int, values: Mapping[str, int] | None = None, changed: Collection[str] = tuple(SHAPES)
) -> Manifest:
    values = all_of(version) if values is None else values
    transport = store.transport()
    async with store.publishing(version, specs(changed), torch.float32) as publication:
        return await publication.commit(
            [await transport.write(publication.draft, shards(values, rank), rank=rank) for rank in range(RANKS)]
        )


async def read(transport: Transport, manifest: Manifest) -> dict[str, int]:
    """Value of every element of each tensor; their fingerprints must be those of the manifest."""
    values_by_name = {}
    async for bucket in transport.fetch(manifest):
        with bucket.open() as tensors:
            copies = {entry: tensors[entry.name].clone() for entry in bucket.entries}
        for entry, values in copies.items():
            (value,) = values.unique().tolist()
            assert fingerprint(values, entry.shape) == entry.fingerprint, f"{entry.name} says {value}"
            values_by_name[entry.name] = int(value)
    assert values_by_name.keys() == {entry.name for entry in manifest.tensors}
    return values_by_name


@contextlib.contextmanager
def stopping_halfway(reached: Callable[[], None], go_on: Callable[[], object]) -> Iterator[None]:
    """A transport that writes in this process writes the first half, says so, and waits."""
    move = shared_memory.move

    def half(moves: Sequence[Move]) -> list[int]:
        middle = len(moves) // 2
        first = move(moves[:middle])
        reached()
        go_on()
        return first + move(moves[middle:])

    shared_memory.move = half  # type: ignore[assignment]
    try:
        yield
    finally:
        shared_memory.move = move


class Straggler:
    """A forked process that is halfway through writing a rank's shards, until it is told to go on or is killed."""

    def __init__(self, transport: SharedMemoryTransport, drafted: Manifest, held: list[LocalShard]) -> None:
        placed = list(to_write(drafted, held))
        is_halfway, says_halfway = os.pipe()
        may_go_on, self._go_on = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._go_on)
                with stopping_halfway(lambda: os.write(says_halfway, b"x"), lambda: os.read(may_go_on, 1)):
                    transport._write(drafted, placed)
                status = 0
            finally:
                os._exit(status)
        os.close(says_halfway)
        os.close(may_go_on)
        assert os.read(is_halfway, 1) == b"x", "the writer failed"
        os.close(is_halfway)

    def finish(self) -> bool:
        """Let it write the other half. Returns whether its transport says that it was written."""
        os.write(self._go_on, b"x")
        os.close(self._go_on)
        return os.waitpid(self.pid, 0)[1] == 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._go_on)


class StoreUser(ServiceActor):
    """A process that writes and reads."""

    def __init__(self) -> None:
        self._halfway = asyncio.Event()
        self._end = asyncio.Event()

    @concurrent_endpoint
    async def write(self, transport: Transport, drafted: Manifest, rank: int) -> list[ShardReport]:
        return await transport.write(drafted, shards(all_of(drafted.version), rank), rank=rank)

    @concurrent_endpoint
    async def write_half(self, transport: Transport, drafted: Manifest, rank: int) -> None:
        """Never ends."""
        loop = asyncio.get_running_loop()
        with stopping_halfway(lambda: loop.call_soon_threadsafe(self._halfway.set), threading.Event().wait):
            await transport.write(drafted, shards(all_of(drafted.version), rank), rank=rank)

    @concurrent_endpoint
    async def halfway(self) -> None:
        """Wait until half of a write is done, or a lease is held."""
        await self._halfway.wait()

    @concurrent_endpoint
    async def hold(self, index: Any, transport: Transport, version: int | None) -> dict[str, int]:
        """Lease a version until told to end; returns what was read then."""
        manifest = await index.lease.call_one(version, "a user's", Holder.this_process())
        self._halfway.set()
        await self._end.wait()
        tensors = await read(transport, manifest)
        with contextlib.suppress(Exception):  # a store that has died
            await index.release.call_one("a user's")
        return tensors

    @concurrent_endpoint
    async def end(self) -> None:
        self._end.set()


async def latest(store: WeightStore) -> int | None:
    """The version that a reader gets; None before the first."""
    try:
        async with store.lease() as manifest:
            return manifest.version
    except WeightsError:
        return None
