"""The torchstore transport beyond what all transports do: parts of ranks, memory, and a store that fails."""

import asyncio
import contextlib
import gc
import importlib.metadata
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from forge_rl.errors import ServiceError, WeightsError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service
from forge_rl.weights.manifest import Manifest, SegmentRef, TensorSpec, complete, draft
from forge_rl.weights.segment import writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports import torchstore as module
from forge_rl.weights.transports import torchstore_controller as controller
from forge_rl.weights.transports.protocol import LocalShard
from forge_rl.weights.transports.torchstore import TorchStoreTransport
from tests.conftest import left_behind, started_processes
from tests.fake_actors import FakeActor, cluster, new_service_name, pid_of, send_signal
from tests.fake_ranks import (
    BUCKET_BYTES,
    LAYOUT,
    RANKS,
    DyingTransport,
    FakeRank,
    held_by_this_process,
    read,
    shards_of,
    specs,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Leaves what other files' tests have made out of the garbage collections of these, of which each would else take
    half a second."""
    gc.collect()
    gc.freeze()


class Store(NamedTuple):
    """A store, the service that it lives in, and what other services need."""

    transport: TorchStoreTransport
    service: Service
    cluster: Cluster
    faults: Faults


@contextlib.asynccontextmanager
async def open_store(logs: Path) -> AsyncIterator[Store]:
    async with cluster(logs) as (meshes, faults):
        service = Service(new_service_name(), meshes, faults)
        try:
            home = service.spawn(FakeActor, imports=TorchStoreTransport.imports)
            await service.watch(home, deadline_s=60)
            yield Store(await TorchStoreTransport.open(home.meshes[0].procs), service, meshes, faults)
        finally:
            faults.closing = True
            await service.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Callable[[Coroutine], None], Store]]:
    """A store for all tests that leave it whole and empty, and what runs them on its event loop."""
    before = started_processes()
    with asyncio.Runner() as runner:
        context = open_store(tmp_path_factory.mktemp("logs"))
        store = runner.run(context.__aenter__())
        yield runner.run, store
        runner.run(context.__aexit__(None, None, None))
    assert not left_behind(before), "processes are left"


async def listed(transport: TorchStoreTransport) -> list[str]:
    """Keys that torchstore's controller knows."""
    return sorted(await transport._ask("keys"))


async def stored(transport: TorchStoreTransport) -> list[str]:
    """Keys whose bytes its volume holds, which says them when asked for another."""
    _, volume_id = transport._strategy.select_storage_volume()
    with pytest.raises(Exception, match="not found") as caught:
        await transport._strategy.get_storage_volume(volume_id).get_meta.call_one("another")
    (keys,) = re.findall(r"list\(self\.kv\.keys\(\)\)=\[(.*?)\]", str(caught.value))[-1:]
    return sorted(re.findall(r"'([^']+)'", keys))


def drafted_of(version: int, base: Manifest | None = None) -> Manifest:
    return draft(specs(), version=version, dtype=torch.bfloat16, base=base, bucket_bytes=BUCKET_BYTES)


async def publish(transport: TorchStoreTransport, version: int) -> Manifest:
    drafted = await transport.reserve(drafted_of(version))
    return complete(
        drafted, [await transport.write(drafted, shards_of(version, rank), rank=rank) for rank in range(RANKS)]
    )


def test_each_rank_puts_one_part_of_each_bucket_that_it_holds_something_of(shared):
    run, (transport, *_) = shared

    async def main() -> None:
        manifest = await publish(transport, 1)
        parts: dict[str, list[tuple[int, int]]] = {}
        for entry in manifest.tensors:
            assert [piece.tensor_slice for piece in entry.pieces] == [
                tensor_slice for tensor_slice in LAYOUT[entry.name][1] if tensor_slice.numel
            ]
            for piece in entry.pieces:
                assert piece.part.startswith(f"{entry.bucket}/")
                parts.setdefault(piece.part, []).append((piece.offset, piece.tensor_slice.numel * 2))
        for places in parts.values():
            end = 0
            for offset, size in places:
                assert (offset >= end, offset % 64) == (True, 0)
                end = offset + size
        # The last bucket holds three elements of three ranks, and the first rank's scalar.
        assert [len([part for part in parts if part.startswith(f"{key}/")]) for key in manifest.keys] == [
            4,
            4,
            4,
            3,
        ]
        assert await listed(transport) == await stored(transport) == sorted([*manifest.keys, *parts])
        await transport.free(manifest.keys[:1])
        assert not any(key.startswith("1/0") for key in await stored(transport))
        await transport.free(manifest.keys)
        assert await listed(transport) == await stored(transport) == []

    run(main())


def test_nothing_is_left_of_a_writer_that_is_killed_while_a_part_travels(shared):
    run, (transport, _, meshes, faults) = shared

    async def main() -> None:
        writer = Service(new_service_name(), meshes, faults)
        replica = writer.spawn(FakeRank, imports=TorchStoreTransport.imports)
        await writer.watch(replica, deadline_s=60)
        drafted = await transport.reserve(drafted_of(1))
        dying = DyingTransport(transport._controller, transport._strategy)
        with pytest.raises(ServiceError, match="SIGKILL"):
            await replica.call("write_zeros", dying, drafted, deadline_s=60)
        (part,) = {*await stored(transport)} - {*drafted.keys}
        assert part.startswith("1/0/0-")
        await transport.free(drafted.keys)
        assert await listed(transport) == await stored(transport) == []
        await transport.free((await publish(transport, 1)).keys)
        await writer.stop()

    run(main())


def test_a_part_that_comes_after_its_bucket_was_freed_is_taken_back(shared):
    run, (transport, *_) = shared

    async def main() -> None:
        drafted = await transport.reserve(drafted_of(1))
        await transport.free(drafted.keys)
        with pytest.raises(WeightsError, match="bucket 1/0 was freed while it was written"):
            await transport.write(drafted, shards_of(1, 0), rank=0)
        assert await listed(transport) == await stored(transport) == []

    run(main())


def test_without_room_nothing_is_taken(shared, monkeypatch: pytest.MonkeyPatch):
    run, (transport, *_) = shared

    async def main() -> None:
        manifest = await publish(transport, 1)
        before = await stored(transport)
        needed = sum(bucket.bytes for bucket in manifest.buckets)
        monkeypatch.setattr(module, "available_bytes", lambda: needed - 1)
        message = f"no room for version 2 in torchstore: {needed} bytes are needed, {needed - 1} are free"
        with pytest.raises(WeightsError, match=message) as caught:
            await transport.reserve(drafted_of(2))
        assert "--weights.keep-versions" in caught.value.hint
        assert await listed(transport) == await stored(transport) == before

        # A version that shares all with the one before needs none.
        await transport.reserve(
            draft(specs(LAYOUT), version=2, dtype=torch.bfloat16, base=manifest, bucket_bytes=BUCKET_BYTES)
        )

        held_bytes = held_by_this_process()
        size = manifest.buckets[0].bytes
        monkeypatch.setattr(module, "available_bytes", lambda: size - 1)
        message = f"no room for bucket 1/0 in shared memory: {size} bytes are needed, {size - 1} are free"
        with pytest.raises(WeightsError, match=message):
            await read(transport, manifest)
        await nothing_more_held(held_bytes)

    run(main())


def test_a_store_that_hangs_or_dies_is_told_and_another_one_goes_on(
    shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, (healthy, *_) = shared

    async def main() -> None:
        async with open_store(tmp_path) as (transport, service, *_):
            manifest, healthy_manifest = await publish(transport, 1), await publish(healthy, 1)
            with pytest.raises(WeightsError, match="torchstore holds no 1/0/"):
                await read(transport, healthy_manifest)
            pid = await pid_of(service)
            calls = {
                "get": lambda: read(transport, manifest),
                "put": lambda: transport.write(drafted_of(2), shards_of(2, 0), rank=0),
                "delete": lambda: transport.free(manifest.keys),
            }
            with monkeypatch.context() as patch:
                patch.setattr(module, "_DEADLINE_S", 0.1)  # before it is killed, as it was stopped
                send_signal(pid, signal.SIGSTOP)
                try:
                    for method, call in calls.items():
                        with pytest.raises(WeightsError, match=f"torchstore does not answer to {method}: TimeoutError"):
                            await call()
                finally:
                    os.kill(pid, signal.SIGKILL)
            for method, call in calls.items():
                with pytest.raises(WeightsError, match=rf"torchstore does not answer to {method}: .*Killed\(sig=9\)"):
                    await call()
            assert (await read(healthy, healthy_manifest)).keys() == LAYOUT.keys()
            await healthy.free(healthy_manifest.keys)

    run(main())


def test_a_newer_torchstore_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    assert issubclass(controller.AsyncController, controller.Controller)
    assert len(controller._endpoints()) == 5
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    assert controller._endpoints() == {}


class MemoryTransport(TorchStoreTransport):
    """torchstore's place is taken by a dict in this process, whose calls can be watched and made to fail."""

    def __init__(self, on_call: Callable[[str, str], object] = lambda method, key: None) -> None:
        self.stored: dict[str, object] = {}
        self.on_call = on_call

    async def _ask(self, method: str, *args: object) -> object:
        await asyncio.sleep(0)
        key = str(args[0]) if args else ""
        done = self.on_call(method, key)
        if asyncio.iscoroutine(done):
            await done
        match method, args:
            case ["put", (_, value)]:
                self.stored[key] = value.clone() if isinstance(value, torch.Tensor) else value
            case ["get", _]:
                return self.stored[key]
            case ["delete", _]:
                del self.stored[key]
            case ["exists", _]:
                return key in self.stored
            case ["keys", _]:
                return list(self.stored)
        return None


SMALL = [TensorSpec(name=f"w{i}", shape=(256,)) for i in range(4)]
"""Four buckets of 1 KiB."""


def small_shards() -> Iterator[LocalShard]:
    for spec in SMALL:
        yield LocalShard(name=spec.name, tensor_slice=TensorSlice.whole(spec.shape), values=torch.ones(spec.shape))


async def nothing_more_held(before: tuple[int, int]) -> None:
    """Waits until no more is held: the event loop has the last error, and that its frames; threads end later."""
    async with asyncio.timeout(60):
        while held_by_this_process() != before:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)


async def reserve_small(transport: TorchStoreTransport) -> Manifest:
    return await transport.reserve(draft(SMALL, version=1, dtype=torch.float32, bucket_bytes=1024))


async def publish_small(transport: TorchStoreTransport) -> Manifest:
    drafted = await reserve_small(transport)
    return complete(drafted, [await transport.write(drafted, small_shards(), rank=0)])


async def limited(work: Awaitable[None]) -> None:
    """Fails where two would wait for each other."""
    async with asyncio.timeout(60):
        await work


async def test_a_bucket_travels_while_the_next_one_is_filled():
    async def main() -> None:
        filled = [asyncio.Event() for _ in SMALL]

        def on_call(method: str, key: str) -> object:
            number = int(key.split("/")[1]) if method == "put" and key.count("/") == 2 else len(SMALL)
            return filled[number + 1].wait() if number + 1 < len(SMALL) else None

        def shards() -> Iterator[LocalShard]:
            for number, shard in enumerate(small_shards()):
                yield shard
                filled[number].set()

        transport = MemoryTransport(on_call)
        drafted = await reserve_small(transport)
        await transport.write(drafted, shards(), rank=0)
        assert len(transport.stored) == 8

    await limited(main())


async def test_a_part_travels_while_its_forerunner_is_read():
    async def main() -> None:
        requests = [asyncio.Event() for _ in SMALL]

        def on_call(method: str, key: str) -> None:
            if method == "get":
                requests[int(key.split("/")[1])].set()

        transport = MemoryTransport(on_call)
        manifest = await publish_small(transport)
        number = 0
        async for _ in transport.fetch(manifest):
            number += 1
            if number < len(requests):
                await requests[number].wait()
            assert [event.is_set() for event in requests] == [index <= number for index in range(len(requests))]

    await limited(main())


def test_two_buckets_at_most_are_in_memory(monkeypatch: pytest.MonkeyPatch):
    unpack = module._unpack

    def slowly(*args: object) -> None:
        time.sleep(0.05)
        unpack(*args)

    monkeypatch.setattr(module, "_unpack", slowly)

    async def main() -> None:
        parts: list[weakref.ref] = []
        mappings = []

        async def look() -> None:
            async with asyncio.timeout(60):  # a thread that has just copied a part may hold it for another moment
                while any(part() is not None for part in parts):
                    await asyncio.sleep(0.01)
                    gc.collect()
            mappings.append(any("forge_rl-weights" in os.readlink(path) for path in fds()))

        def fds() -> list[Path]:
            return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()]

        class Watched(MemoryTransport):
            async def _get(self, part: str) -> torch.Tensor:
                await look()
                part_values = (await super()._get(part)).clone()
                parts.append(weakref.ref(part_values))
                return part_values

        transport = Watched()
        manifest = await publish_small(transport)
        async for bucket in transport.fetch(manifest):
            with bucket.open() as tensors:
                assert (tensors[bucket.entries[0].name] == 1).all()
        # When a part is asked for, there is the bucket that is read, and soon no part before it.
        assert mappings == [True] * 4

    asyncio.run(main())


def test_a_failure_at_any_call_is_told_and_leaves_nothing_under_way():
    unseen: list[dict] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        await read(warm_transport := MemoryTransport(), await publish_small(warm_transport))  # warm
        before = held_by_this_process()
        for method, calls in (("put", 12), ("exists", 4), ("get", 4)):
            for call_number in range(1, calls + 1):
                left = [call_number]

                def fail(called: str, key: str, left: list = left, method: str = method) -> None:
                    left[0] -= called == method
                    if called == method and left[0] == 0:
                        raise WeightsError(f"{method} of {key} failed")

                transport = MemoryTransport(fail)
                with pytest.raises(WeightsError, match=f"{method} of .* failed"):
                    await read(transport, await publish_small(transport))
                assert asyncio.all_tasks() == {asyncio.current_task()}
                await nothing_more_held(before)
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert unseen == []


@pytest.mark.parametrize("bucket", ["1/0", "1/1", "1/3"])
async def test_a_write_that_is_cancelled_waits_for_what_is_under_way(bucket: str):
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        def on_call(method: str, key: str) -> object:
            if (method, key) == ("exists", bucket):
                begun.set()
                return go_on.wait()
            return None

        transport = MemoryTransport(on_call)
        drafted = await reserve_small(transport)
        writing = asyncio.create_task(transport.write(drafted, small_shards(), rank=0))
        await begun.wait()
        await asyncio.to_thread(time.sleep, 0.05)  # it fills the next bucket meanwhile
        writing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await transport.free(drafted.keys)
        assert transport.stored == {}

    await limited(main())


async def test_a_fetch_that_is_given_up_asks_for_nothing_more():
    def on_call(method: str, key: str) -> object:
        return asyncio.Event().wait() if method == "get" and key.startswith("1/1/") else None

    transport = MemoryTransport(on_call)
    buckets = transport.fetch(await publish_small(transport))
    await anext(buckets)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 2, "a part is on its way for this to be a test"
    await buckets.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_fetch_waits_for_the_thread_that_fills_a_bucket(monkeypatch: pytest.MonkeyPatch):
    begun, go_on = threading.Event(), threading.Event()

    def slowly_writable(segment: SegmentRef) -> torch.Tensor:
        begun.set()
        go_on.wait()
        return writable(segment)

    async def main() -> None:
        transport = MemoryTransport()
        manifest = await publish_small(transport)
        before = held_by_this_process()
        monkeypatch.setattr(module, "writable", slowly_writable)
        reading = asyncio.create_task(read(transport, manifest))
        await asyncio.to_thread(begun.wait)
        try:
            for _ in range(2):  # the second time while it waits
                reading.cancel()
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not reading.done(), "the thread would map what is being closed"
        finally:
            go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await nothing_more_held(before)

    await limited(main())


async def test_a_part_that_is_cut_short_is_told():
    transport = MemoryTransport()
    manifest = await publish_small(transport)
    part = manifest.tensors[2].pieces[0].part
    transport.stored[part] = transport.stored[part][:1000]
    before = held_by_this_process()
    with pytest.raises(WeightsError, match=f"{part} is cut short at 1000 bytes, within 'w2'"):
        await read(transport, manifest)
    await nothing_more_held(before)


async def test_shards_in_another_order_are_written_too():
    transport = MemoryTransport()
    drafted = await transport.reserve(draft(SMALL, version=1, dtype=torch.float32, bucket_bytes=2048))
    shards = [replace(shard, values=shard.values * n) for n, shard in enumerate(small_shards())]
    order = [shards[2], shards[0], shards[3], shards[1]]
    manifest = complete(drafted, [await transport.write(drafted, order, rank=0)])
    tensors = await read(transport, manifest)
    assert all((tensors[f"w{n}"] == n).all() for n in range(4))
