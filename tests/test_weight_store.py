"""The WeightStore service on real processes: versions are whole, immutable, kept while they are read, and freed."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from forge_rl.errors import ConfigError, ServiceError, WeightsError
from forge_rl.runtime.faults import Faults
from forge_rl.services.weights import WeightStore
from forge_rl.weights import buckets
from forge_rl.weights.buckets import LocalShard, read_version, write_shards
from forge_rl.weights.fingerprint import fingerprint
from forge_rl.weights.manifest import Manifest
from tests.fake_actors import cluster, pid_of

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPES = {"a": (40, 8), "b": (7, 5), "c": (3,)}
RANKS = 2


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a version takes several."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 512)


@contextlib.asynccontextmanager
async def open_store(logs: Path, **config: object) -> AsyncIterator[tuple[WeightStore, Faults]]:
    async with cluster(logs) as (made, faults):
        store = await WeightStore.start(WeightStore.Config(**config), made, faults, deadline_s=60)
        try:
            yield store, faults
        finally:
            faults.closing = True
            await store.stop()


def shards(version: int, rank: int) -> list[LocalShard]:
    """Every element says its version."""
    result = []
    for name, shape in SHAPES.items():
        whole = torch.full(shape, float(version))
        rows = -(-shape[0] // RANKS)
        part = whole[rank * rows : (rank + 1) * rows]
        result.append(
            LocalShard(name=name, shape=shape, start=rank * rows * whole[0].numel() if len(part) else 0, values=part)
        )
    return result


async def publish(store: WeightStore, version: int) -> Manifest:
    async with store.publishing(version) as publication:
        reports = [
            await write_shards(store.transport, shards(version, rank), version=version, rank=rank, dtype=torch.float32)
            for rank in range(RANKS)
        ]
        return await publication.commit(reports)


async def read(store: WeightStore, manifest: Manifest) -> set[float]:
    """All values of a version; its fingerprints must be those of the manifest."""
    into = {entry.name: torch.full(entry.shape, -1.0) for entry in manifest.tensors}
    await read_version(store.transport, manifest, into.__getitem__)
    assert all(entry.fingerprint == fingerprint(into[entry.name], entry.shape) for entry in manifest.tensors)
    return {value for tensor in into.values() for value in tensor.flatten().tolist()}


async def holds(store: WeightStore, manifest: Manifest) -> list[bool]:
    """Which of a version's buckets the transport still has."""
    found = []
    for key in manifest.buckets:
        try:
            await store.transport.get(key)
        except WeightsError:
            found.append(False)
        else:
            found.append(True)
    return found


def test_what_is_published_is_fetched(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path) as (store, _):
            assert await store.latest() is None
            with pytest.raises(WeightsError, match="held: none"):
                async with store.lease():
                    pass
            waiter = asyncio.create_task(store.wait_for(3))
            manifest = await publish(store, 3)
            assert len(manifest.buckets) == 4
            assert await waiter == await store.latest() == 3
            for version in (None, 3):
                async with store.lease(version) as leased:
                    assert leased == manifest
                    assert await read(store, leased) == {3.0}

    asyncio.run(main())


def test_a_version_cannot_be_published_twice_nor_by_two(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path) as (store, _):
            await publish(store, 3)
            for version in (3, 2):
                with pytest.raises(WeightsError, match=f"version {version} is not newer than the latest, 3"):
                    await publish(store, version)
            async with store.publishing(4) as publication:
                with pytest.raises(WeightsError, match="version 4 is already being written"):
                    await publish(store, 4)
                reports = [
                    await write_shards(store.transport, shards(4, rank), version=4, rank=rank, dtype=torch.float32)
                    for rank in range(RANKS)
                ]
                await publication.commit(reports)
            async with store.lease() as manifest:
                assert manifest.version == 4
                assert await read(store, manifest) == {4.0}

    asyncio.run(main())


def test_a_version_that_fails_is_never_seen(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path) as (store, _):
            await publish(store, 1)
            waiter = asyncio.create_task(store.wait_for(2))

            async def fail() -> None:
                async with store.publishing(2):
                    await write_shards(store.transport, shards(2, 0), version=2, rank=0, dtype=torch.float32)
                    raise ValueError("rank 1 died")

            async def forget() -> None:
                async with store.publishing(2):
                    pass

            async def half() -> None:
                async with store.publishing(2) as publication:
                    reports = await write_shards(store.transport, shards(2, 0), version=2, rank=0, dtype=torch.float32)
                    await publication.commit([reports])

            with pytest.raises(ValueError, match="rank 1 died"):
                await fail()
            with pytest.raises(WeightsError, match="version 2 will not come: version 2 was aborted: rank 1 died"):
                await waiter
            with pytest.raises(WeightsError, match="version 2 was not committed"):
                await forget()
            with pytest.raises(WeightsError, match="elements of 'a' for version 2"):
                await half()
            with pytest.raises(WeightsError, match="no bucket 2/0/0"):
                await store.transport.get("2/0/0")
            assert await store.latest() == 1
            with pytest.raises(WeightsError, match="there is no version 2 of the weights; held: 1"):
                async with store.lease(2):
                    pass
            async with store.lease() as manifest:
                assert await read(store, manifest) == {1.0}
            await publish(store, 2)
            async with store.lease() as manifest:
                assert await read(store, manifest) == {2.0}

    asyncio.run(main())


def test_readers_never_see_values_of_two_versions(tmp_path: Path):
    async def main() -> None:
        seen: list[int] = []
        done = asyncio.Event()
        read_once = asyncio.Condition()

        async def reader(store: WeightStore) -> None:
            while not done.is_set():
                async with store.lease() as manifest:
                    assert await read(store, manifest) == {float(manifest.version)}
                async with read_once:
                    seen.append(manifest.version)
                    read_once.notify_all()

        async with open_store(tmp_path, keep_versions=1) as (store, _):
            first = await publish(store, 1)
            async with store.lease(1) as held:  # read at the end, when eight newer ones have come and gone
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(reader(store))
                    for version in range(2, 10):
                        count = len(seen)
                        await publish(store, version)
                        async with read_once:
                            await read_once.wait_for(lambda count=count: len(seen) >= count + 2)
                    done.set()
                assert await read(store, held) == {1.0}
                assert all(await holds(store, first))
            assert not any(await holds(store, first))
            async with store.lease() as manifest:
                assert manifest.version == 9
        assert seen[-1] == 9
        assert len(set(seen)) > 4, "the readers must meet many versions for this to be a test"

    asyncio.run(main())


def test_what_retention_gives_up_is_freed(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path, keep_versions=2) as (store, _):
            manifests = {version: await publish(store, version) for version in (1, 2, 3)}
            assert not any(await holds(store, manifests[1]))
            assert all(await holds(store, manifests[2]))
            with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2, 3"):
                async with store.lease(1):
                    pass

    asyncio.run(main())


def test_retention_by_bytes_keeps_the_newest(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path, keep_versions=5, keep_gib=1e-9) as (store, _):
            manifests = {version: await publish(store, version) for version in (1, 2)}
            assert not any(await holds(store, manifests[1]))
            assert all(await holds(store, manifests[2]))

    asyncio.run(main())


def test_a_store_that_dies_is_named(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path) as (store, faults):
            await publish(store, 1)
            waiter = asyncio.create_task(store.wait_for(2))
            await store.latest()
            os.kill(await pid_of(store._service), signal.SIGKILL)
            with pytest.raises(ServiceError, match="SIGKILL") as caught:
                await waiter
            assert (caught.value.service, caught.value.replica, caught.value.call) == ("weights", 0, "wait_for")
            with pytest.raises(ServiceError, match="SIGKILL"):
                await store.latest()
            assert [(fault.service, fault.replica) for fault in faults.seen] == [("weights", 0)]

    asyncio.run(main())


@pytest.mark.parametrize(("field", "value"), [("keep_versions", 0), ("keep_gib", 0.0)])
def test_a_store_that_keeps_nothing_is_refused(field: str, value: float):
    with pytest.raises(ConfigError) as caught:
        WeightStore.Config(**{field: value})
    assert f"--weights.{field.replace('_', '-')} " in caught.value.mend
