"""Weights from another host: real Monarch hosts and RDMA, each host with a shared-memory folder of its own."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import AttestationError, WeightsError
from forge_rl.runtime.service import Replica, Service
from forge_rl.weights.manifest import Manifest, TensorSpec
from tests.fake_actors import cluster_of, new_service_name, send_signal
from tests.fake_remote import RemoteActor

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

LONG_S = 120.0
SPECS = [TensorSpec(name=f"layer.{i}", shape=(64, 256)) for i in range(6)] + [TensorSpec(name="norm", shape=(7,))]
"""Tensors that make buckets of two layers: 64 KiB each, the last one with the norm in it."""
BUCKET = 64 << 10


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="forge_rl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@dataclass
class Hosts:
    service: Service
    origin: Replica
    reader: Replica

    async def ask(self, replica: Replica, method: str, *args: object) -> Any:
        return await replica.call(method, *args, deadline_s=LONG_S)

    async def publish(
        self, version: int = 1, specs=SPECS, base: Manifest | None = None, bucket: int = BUCKET
    ) -> Manifest:
        return await self.ask(self.origin, "publish", specs, version, bucket, base)

    async def pull(self, manifest: Manifest, reader: Replica | None = None) -> dict[str, str]:
        """Digests of what came, by key."""
        reader = reader or self.reader
        await self.ask(reader, "pull", manifest)
        refs = await asyncio.gather(*(self.ask(reader, "local", key) for key in manifest.keys))
        return await self.digests(reader, dict(zip(manifest.keys, refs, strict=True)))

    async def digests(self, replica: Replica, refs: dict) -> dict[str, str]:
        return {key: await self.ask(replica, "digest", ref) for key, ref in refs.items()}

    async def published(self, manifest: Manifest) -> dict[str, str]:
        return await self.digests(self.origin, {bucket.key: bucket.segment for bucket in manifest.buckets})

    async def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counts how often the origin shared each bucket, and how often the reader read it there."""
        shares, _, _ = await self.ask(self.origin, "counts")
        _, reads, _ = await self.ask(self.reader, "counts")
        return dict(shares), dict(reads)


@contextlib.asynccontextmanager
async def two_hosts(logs: Path, shm: Path, *more: str) -> AsyncIterator[Hosts]:
    async with cluster_of(logs, "a", "b", *more) as (cluster, faults):
        service = Service(new_service_name(), cluster, faults)
        for host in ("a", "b", *more):
            (shm / host).mkdir()
            service.spawn(RemoteActor, host, shm / host, host=host)
        await asyncio.gather(*(service.watch(replica, deadline_s=LONG_S) for replica in service.replicas))
        hosts = Hosts(service, *service.replicas[:2])
        actors = {replica.host: replica.actor for replica in service.replicas}
        for replica in service.replicas:
            await hosts.ask(replica, "open", actors)
        try:
            yield hosts
        finally:
            faults.closing = True
            for replica in service.replicas:
                if replica.alive:
                    await hosts.ask(replica, "close")
            await service.stop()


async def test_a_version_comes_whole_and_once_however_many_read_it(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm) as hosts:
        first = await hosts.publish(1)
        assert len(first.keys) == 4
        pulls = await asyncio.gather(*(hosts.pull(first) for _ in range(4)))
        assert pulls == [await hosts.published(first)] * 4
        assert await hosts.counts() == (dict.fromkeys(first.keys, 1), dict.fromkeys(first.keys, 1))
        refs = {key: await hosts.ask(hosts.reader, "local", key) for key in first.keys}
        assert {Path(ref.path).relative_to(shm).parts[0] for ref in refs.values()} == {"b"}

        # Only what the next version changes is pulled; the rest is here.
        specs = [TensorSpec(name=s.name, shape=s.shape, changed=s.name in ("layer.0", "norm")) for s in SPECS]
        second = await hosts.publish(2, specs, first)
        new = [key for key in second.keys if key not in first.keys]
        assert len(new) == 1
        assert len(second.keys) > 1
        assert await hosts.pull(second) == await hosts.published(second)
        assert await hosts.counts() == (dict.fromkeys([*first.keys, *new], 1),) * 2

        # What both hosts free is used again, by the next version of the same size, and old references are refused.
        for replica in (hosts.origin, hosts.reader):
            await hosts.ask(replica, "free", tuple({*first.keys, *second.keys}))
        third = await hosts.publish(3)
        assert await hosts.pull(third) == await hosts.published(third)
        paths = {(await hosts.ask(hosts.reader, "local", key)).path for key in third.keys}
        assert paths == {ref.path for ref in refs.values()}
        for replica in (hosts.origin, hosts.reader):
            assert await hosts.ask(replica, "held") == (sum(bucket.bytes for bucket in third.buckets), [])
        for key, ref in refs.items():
            with pytest.raises(WeightsError):
                await hosts.ask(hosts.reader, "digest", ref)
            with pytest.raises(WeightsError, match=f"bucket {key} was not pulled"):
                await hosts.ask(hosts.reader, "local", key)

        # What has another size takes its place; of the memory that is given back nobody keeps any.
        for replica in (hosts.origin, hosts.reader):
            await hosts.ask(replica, "free", third.keys)
        fourth = await hosts.publish(4, bucket=BUCKET // 2)
        assert await hosts.pull(fourth) == await hosts.published(fourth)
        for replica in (hosts.origin, hosts.reader):
            assert await hosts.ask(replica, "held") == (sum(bucket.bytes for bucket in fourth.buckets), [])


async def test_buckets_are_read_while_later_ones_travel(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm) as hosts:
        manifest = await hosts.publish()
        first, *_, last = manifest.keys
        await hosts.ask(hosts.reader, "hold", last)
        await hosts.ask(hosts.reader, "pull", manifest)
        for key in manifest.keys[:-1]:
            ref = await hosts.ask(hosts.reader, "local", key)
            assert await hosts.ask(hosts.reader, "digest", ref) == (await hosts.published(manifest))[key]
        # Who does not wait to the end takes nothing from who does.
        patient = asyncio.create_task(hosts.ask(hosts.reader, "local", last))
        assert not await hosts.ask(hosts.reader, "impatient", last, 0.2)
        assert await hosts.ask(hosts.reader, "impatient", first, 60.0)
        await hosts.ask(hosts.reader, "let_go", last)
        await patient
        assert await hosts.pull(manifest) == await hosts.published(manifest)
        assert (await hosts.counts())[1] == dict.fromkeys(manifest.keys, 1)


async def test_what_was_changed_on_its_way_is_refused_by_name(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm) as hosts:
        manifest = await hosts.publish()
        refs = await hosts.published(manifest)
        for name, bucket in (("layer.3", 1), ("norm", 3)):
            await hosts.ask(hosts.origin, "tamper", manifest, name)
            pulls = await asyncio.gather(*(hosts.pull(manifest) for _ in range(3)), return_exceptions=True)
            for error in pulls:
                assert isinstance(error, AttestationError)
                assert f"bucket 1/{bucket} from host 'a'" in str(error)
                assert f"tensors differ: {name}\n" in str(error)
            await hosts.ask(hosts.origin, "tamper", manifest, name)
            # What was refused is pulled again.
            assert await hosts.pull(manifest) == refs
            await hosts.ask(hosts.reader, "free", manifest.keys)


async def test_a_pull_that_failed_is_tried_again(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm) as hosts:
        manifest = await hosts.publish()
        await hosts.ask(hosts.origin, "refuse", 1)
        await hosts.ask(hosts.reader, "pull", manifest)
        calls = [hosts.ask(hosts.reader, "local", key) for key in manifest.keys]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, WeightsError)
            assert "version 1 cannot be pulled from host 'a': staged: nothing is shared" in str(error)
        assert await hosts.pull(manifest) == await hosts.published(manifest)

        # Nor does a lack of room stay.
        huge = await hosts.publish(2)
        small = Manifest(
            version=2, tensors=huge.tensors, buckets=tuple(replace(b, bytes=1 << 60) for b in huge.buckets)
        )
        await hosts.ask(hosts.reader, "pull", small)
        with pytest.raises(WeightsError, match="no room for a version of the weights"):
            await hosts.ask(hosts.reader, "local", "2/0")
        assert await hosts.pull(huge) == await hosts.published(huge)


async def test_what_is_freed_on_its_way_is_given_up(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm) as hosts:
        manifest = await hosts.publish()
        first_key, *rest = manifest.keys
        await hosts.ask(hosts.reader, "hold", first_key)
        await hosts.ask(hosts.reader, "pull", manifest)
        waiting = asyncio.create_task(hosts.ask(hosts.reader, "local", first_key))
        await hosts.ask(hosts.reader, "local", rest[0])
        await hosts.ask(hosts.reader, "free", (first_key,))
        with pytest.raises(WeightsError, match=f"bucket {first_key} was freed on its way"):
            await waiting
        await hosts.ask(hosts.reader, "let_go", first_key)
        # The others come all the same, and then it can be had again.
        for key in rest:
            await hosts.ask(hosts.reader, "local", key)
        assert await hosts.pull(manifest) == await hosts.published(manifest)


async def test_a_host_that_dies_midway_is_named_to_all_who_wait(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm) as hosts:
        manifest = await hosts.publish()
        first, *rest = manifest.keys
        for key in rest:
            await hosts.ask(hosts.reader, "hold", key)
        await hosts.ask(hosts.reader, "pull", manifest)
        ref = await hosts.ask(hosts.reader, "local", first)
        waiting = [asyncio.create_task(hosts.ask(hosts.reader, "local", key)) for key in (*rest, *rest)]
        pid = await hosts.ask(hosts.origin, "process_id")
        send_signal(pid, signal.SIGSTOP)  # a transfer begins and does not end
        for key in rest:
            await hosts.ask(hosts.reader, "let_go", key)
        assert not any(task.done() for task in waiting)
        os.kill(pid, signal.SIGKILL)
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30):
            assert isinstance(error, WeightsError)
            assert "version 1 cannot be pulled from host 'a'" in str(error)
            assert "SIGKILL" in str(error) or "Killed(sig=9)" in str(error)
        assert not hosts.origin.alive
        # What had come is still there; the rest cannot come, and says so.
        await hosts.ask(hosts.reader, "digest", ref)
        await hosts.ask(hosts.reader, "pull", manifest)
        assert await hosts.ask(hosts.reader, "local", first) == ref
        with pytest.raises(WeightsError, match="the index is gone"):
            await hosts.ask(hosts.reader, "local", rest[0])


async def test_a_host_serves_its_copies_and_readers_survive_its_death(tmp_path: Path, shm: Path):
    async with two_hosts(tmp_path, shm, "c") as hosts:
        third = hosts.service.replicas[2]

        first = await hosts.publish(1)
        copies = await asyncio.gather(hosts.pull(first), hosts.pull(first, third))
        assert copies == [await hosts.published(first)] * 2
        received = [await hosts.ask(replica, "received") for replica in hosts.service.replicas]
        assert sorted(len(senders_of_replica) for senders_of_replica in received) == [0, 1, 1]
        senders = {sender for senders_of_replica in received for sender in senders_of_replica}
        assert "a" in senders
        assert len(senders) == 2, "one host copied from the other, so that one copy left the writer"

        # The third host follows the second, which has one bucket, waits for the next, and is killed.
        second = await hosts.publish(2)
        for key in second.keys[1:]:
            await hosts.ask(hosts.reader, "hold", key)
        await hosts.ask(hosts.reader, "pull", second)
        await hosts.ask(hosts.reader, "local", second.keys[0])
        await hosts.ask(third, "pull", second)
        following = asyncio.create_task(hosts.pull(second, third))
        await hosts.ask(third, "local", second.keys[0])
        assert (await hosts.ask(third, "received"))["b"] >= second.buckets[0].bytes
        os.kill(await hosts.ask(hosts.reader, "process_id"), signal.SIGKILL)
        assert await asyncio.wait_for(following, 60) == await hosts.published(second)
        assert (await hosts.ask(third, "received"))["a"] >= sum(bucket.bytes for bucket in second.buckets[1:])
        held_bytes, removed_files = await hosts.ask(third, "held")
        # A segment that was reserved for a failed transfer is not reused while another transfer writes.
        spare_bytes = sum(bucket.bytes for bucket in second.buckets[1:])
        assert 0 <= held_bytes - sum(bucket.bytes for bucket in (*first.buckets, *second.buckets)) <= spare_bytes
        assert removed_files == []
