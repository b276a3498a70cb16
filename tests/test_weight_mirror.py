"""A store that also writes its versions to an address, on real processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from forge_rl.errors import WeightsError
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.deltas import DeltaSubscriber
from tests.fake_actors import cluster, pid_of
from tests.fake_store import SHAPES, all_of, publish, real
from tests.s3 import S3

pytestmark = pytest.mark.usefixtures("nothing_left")


def values(subscriber: DeltaSubscriber) -> dict[str, float]:
    """Value of every element of each tensor."""
    return {name: tensor.unique().item() for name, tensor in subscriber.tensors.items()}


async def test_versions_travel_through_an_address_to_another_store(tmp_path: Path, shm: Path):
    address = f"file://{tmp_path}/versions"

    subscriber = DeltaSubscriber(address, expected=SHAPES)

    async def follow(version: int) -> None:
        async with asyncio.timeout(60):
            while subscriber.version != version:
                await asyncio.to_thread(subscriber.update)
                await asyncio.sleep(0.01)

    async with real(tmp_path, shm, mirror=address, mirror_full_every=2) as (store, _, faults):
        await publish(store, 1)
        await follow(1)
        assert values(subscriber) == all_of(1)
        await publish(store, 2, all_of(2) | {"a": 1, "d": 1}, changed=["b", "c"])
        await follow(2)
        assert values(subscriber) == {"a": 1, "b": 2, "c": 2, "d": 1}
        store_metrics = store.pop_metrics()
        assert store_metrics["weights/mirrored_bytes"] > 0, "the header at least"
        assert [spec.name for spec in subscriber.specs if spec.changed] == ["b", "c"]

        # The process that writes dies, or cannot write: the run goes on, and a later version is written whole.
        mirror = store._mirror
        assert mirror is not None
        os.kill(await pid_of(mirror._service), signal.SIGKILL)
        await publish(store, 3)
        await follow(3)
        fault_count = len(faults.seen)
        (tmp_path / "versions").rename(tmp_path / "elsewhere")
        (tmp_path / "versions").write_text("in the way")
        for version in (4, 5):
            await publish(store, version)
        async with asyncio.timeout(60):
            while not any("was not written" in fault.cause for fault in faults.seen[fault_count:]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (tmp_path / "versions").unlink()
        await publish(store, 6)
        await follow(6)
        assert values(subscriber) == all_of(6)
        assert faults.fatal is None
        assert all(fault.recovered_s is not None for fault in faults.seen)

        # A store elsewhere gets the same bytes, under the same number.
        async with store.lease() as original:
            pass
        elsewhere = await WeightStore.start(WeightStore.Config(shm=shm), store._service.cluster, faults, deadline_s=60)
        async with elsewhere.publishing(6, subscriber.specs, torch.float32) as publication:
            reports = await elsewhere.transport().write(publication.draft, subscriber.shards(), rank=0)
            copy = await publication.commit([reports])
        assert {e.name: e.fingerprint for e in copy.tensors} == {e.name: e.fingerprint for e in original.tensors}
        await elsewhere.stop()

        # What was published last is there when the store has stopped.
        await publish(store, 7)
    assert subscriber.update()
    assert (subscriber.version, values(subscriber)) == (7, all_of(7))


async def test_the_mirrors_process_has_the_keys_and_outlives_failures(tmp_path: Path, shm: Path, s3: S3):
    subscriber = DeltaSubscriber("s3://bucket/run", expected=SHAPES)
    async with real(tmp_path, shm, mirror="s3://bucket/run") as (store, _, faults):
        s3.fails("PUT", "0000000000", "InternalError", times=100)
        await publish(store, 1)
        async with asyncio.timeout(120):
            while not any("was not written" in fault.cause for fault in faults.seen):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "told to" in faults.seen[-1].cause
        s3.fails_no_more()
        await publish(store, 2)
    assert await asyncio.to_thread(subscriber.update)
    assert (subscriber.version, values(subscriber)) == (2, all_of(2))
    assert faults.fatal is None


async def test_an_address_that_cannot_be_opened_or_read_is_told_at_once(
    tmp_path: Path, shm: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")

    async with cluster(tmp_path) as (meshes, faults):
        for address, message in {
            "nosuch://x": r"--weights\.mirror is an address that fsspec cannot open.*nosuch",
            "s3://bucket/run": r"--weights\.mirror cannot be read: .*does not match the signature",
        }.items():
            with pytest.raises(WeightsError, match=message):
                await WeightStore.start(WeightStore.Config(shm=shm, mirror=address), meshes, faults, deadline_s=60)
