"""Conformance of every transport of weights, on real processes: each rank and each reader is one of its own."""

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.errors import ServiceError, WeightsError
from forge_rl.runtime.service import Service
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.transports.protocol import LocalShard, Transport
from forge_rl.weights.transports.torchstore import TorchStoreTransport
from tests.conftest import left_behind, started_processes
from tests.fake_actors import cluster, new_service_name
from tests.fake_ranks import BUCKET_BYTES, LAYOUT, FakeRank, held_by_this_process, read, specs, values_of
from tests.tilings import tilings

WRITERS, READERS = (0, 1), (2, 3)
"""Processes. The first writes as ranks 0 and 2, the second as 1 and 3."""


class TransportSetup:
    """A transport, and processes that write and read with it."""

    def __init__(self, runner: asyncio.Runner, transport: Transport, service: Service) -> None:
        self._runner = runner
        self._service = service
        self._versions = itertools.count(1)
        self.transport = transport

    def run(self, work: Awaitable[Any]) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, 300)

        return self._runner.run(limited())

    def new_version(self) -> int:
        """No test meets another one's."""
        return next(self._versions)

    async def call(self, process: int, method: str, *args: object) -> Any:
        return await self._service.replicas[0].call(method, self.transport, *args, deadline_s=120, rank=process)

    async def ask(self, process: int, method: str) -> Any:
        return await self._service.replicas[0].call(method, deadline_s=120, rank=process)

    async def reserve(
        self, version: int, dtype: torch.dtype = torch.bfloat16, base: Manifest | None = None, unchanged: Any = ()
    ) -> Manifest:
        return await self.transport.reserve(
            draft(specs(unchanged), version=version, dtype=dtype, base=base, bucket_bytes=BUCKET_BYTES)
        )

    async def write(self, drafted: Manifest, *args: object) -> list[list[ShardReport]]:
        """Writes by all ranks, side by side."""
        of_process = await asyncio.gather(
            *(self.call(process, "write", drafted, (process, process + 2), *args) for process in WRITERS)
        )
        return [reports for ranks in of_process for reports in ranks]

    async def publish(self, version: int, **how: Any) -> Manifest:
        drafted = await self.reserve(version, **how)
        return complete(drafted, await self.write(drafted))


@contextlib.asynccontextmanager
async def opened(name: str, logs: Path, shm: Path) -> AsyncIterator[tuple[Transport, Service]]:
    """A store with a transport, and processes that use it."""
    async with cluster(logs) as (meshes, faults):
        store = await WeightStore.start(WeightStore.Config(transport=name, shm=shm), meshes, faults, deadline_s=60)
        service = Service(new_service_name(), meshes, faults)
        try:
            await service.watch(service.spawn(FakeRank, ranks=4), deadline_s=60)
            transport = store.transport()
            yield transport, service
            if isinstance(transport, TorchStoreTransport):
                for _ in range(100):  # a message that frees one may still be on its way
                    if not (left := await transport._ask("keys")):
                        break
                    await asyncio.sleep(0.1)
                assert left == [], "parts are left"
        finally:
            faults.closing = True
            await service.stop()
            await store.stop()


@pytest.fixture(scope="module", params=["torchstore", "shared_memory"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransportSetup]:
    before = started_processes()
    shm = tmp_path_factory.mktemp("shm")
    with asyncio.Runner() as runner:
        context = opened(request.param, tmp_path_factory.mktemp("logs"), shm)
        setup = TransportSetup(runner, *runner.run(context.__aenter__()))
        yield setup
        runner.run(context.__aexit__(None, None, None))
    assert not left_behind(before), "processes are left"
    assert [path for path in shm.rglob("*") if path.is_file() and path.name != "lock"] == [], "segments are left"


def same(found: dict[str, torch.Tensor], version_of: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Tells whether all and only these tensors were found, bit for bit those of their versions."""
    return found.keys() == version_of.keys() and all(
        tensor.dtype == dtype
        and tensor.shape == LAYOUT[name][0]
        and torch.equal(tensor, values_of(version_of[name], name).to(dtype))
        for name, tensor in found.items()
    )


def all_of(version: int) -> dict[str, int]:
    return dict.fromkeys(LAYOUT, version)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_ranks_write_is_read_elsewhere_bit_for_bit(setup: TransportSetup, dtype: torch.dtype):
    version = setup.new_version()

    async def main() -> None:
        manifest = await setup.publish(version, dtype=dtype)
        assert len(manifest.buckets) > 3
        for entry in manifest.tensors:
            assert entry.fingerprint == fingerprint(values_of(version, entry.name).to(dtype), entry.shape)
        # Two readers side by side, and this process.
        versions_read = await asyncio.gather(
            *(setup.call(reader, "read", manifest) for reader in READERS), read(setup.transport, manifest)
        )
        assert all(same(tensors, all_of(version), dtype) for tensors in versions_read)
        await setup.transport.free(manifest.keys)

    setup.run(main())


def test_a_transport_works_wherever_it_is_unpickled(setup: TransportSetup):
    version = setup.new_version()

    async def main() -> None:
        manifest = await setup.publish(version)
        unpickled_transport: Transport = pickle.loads(pickle.dumps(setup.transport))
        assert type(unpickled_transport) is type(setup.transport)
        assert same(await read(unpickled_transport, manifest), all_of(version))
        await unpickled_transport.free(manifest.keys)
        with pytest.raises(WeightsError):
            await read(setup.transport, manifest)

    setup.run(main())


def test_a_version_is_read_while_others_come_and_go(setup: TransportSetup):
    first = setup.new_version()

    async def main() -> None:
        first_manifest = await setup.publish(first)
        slow = asyncio.create_task(setup.call(READERS[0], "read_slowly", first_manifest))
        read_again = 0

        async def keep_reading() -> None:
            nonlocal read_again
            while not slow.done():
                assert same(await setup.call(READERS[1], "read", first_manifest), all_of(first))
                read_again += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(keep_reading())
            last = None
            published = 0
            while published < 4 or (read_again < 2 and not slow.done()):
                published += 1
                newer = await setup.publish(setup.new_version())
                assert same(await read(setup.transport, newer), all_of(newer.version))
                if last is not None:
                    await setup.transport.free(last.keys)
                last = newer
            await setup.ask(READERS[0], "go_on")
            assert same(await slow, all_of(first))
        assert read_again > 1, "the version must be read while others are published for this to be a test"
        await setup.transport.free([*first_manifest.keys, *last.keys])

    setup.run(main())


def test_a_delta_shares_what_has_not_changed_with_the_version_before(setup: TransportSetup):
    first, second, third = (setup.new_version() for _ in range(3))

    async def main() -> None:
        first_manifest = await setup.publish(first)
        two = await setup.publish(second, base=first_manifest, unchanged=("embed", "experts"))
        assert {entry.name for bucket in two.written for entry in two.entries[bucket.key]} == {
            "out", "head", "bias", "scale"
        }  # fmt: skip
        assert two.bytes == first_manifest.bytes
        of_two = {**all_of(second), "embed": first, "experts": first}
        assert same(await setup.call(READERS[0], "read", two), of_two)
        # What only the first one needs goes.
        await setup.transport.free([key for key in first_manifest.keys if key not in two.keys])
        with pytest.raises(WeightsError):
            await setup.call(READERS[0], "read", first_manifest)
        assert same(await setup.call(READERS[0], "read", two), of_two)

        three = await setup.publish(third, base=two, unchanged=[name for name in LAYOUT if name != "bias"])
        assert len(three.written) == 1
        await setup.transport.free([key for key in two.keys if key not in three.keys])
        of_three = {**of_two, "bias": third}
        assert same(await setup.call(READERS[1], "read", three), of_three)
        await setup.transport.free(three.keys)

    setup.run(main())


def test_when_nothing_changed_nothing_is_written(setup: TransportSetup):
    first, second = setup.new_version(), setup.new_version()

    async def main() -> None:
        first_manifest = await setup.publish(first)
        drafted = await setup.reserve(second, base=first_manifest, unchanged=tuple(LAYOUT))
        reports = await setup.write(drafted)
        assert reports == [[]] * 4
        two = complete(drafted, reports)
        assert (two.version, two.keys) == (second, first_manifest.keys)
        assert same(await setup.call(READERS[0], "read", two), all_of(first))
        await setup.transport.free(first_manifest.keys)

    setup.run(main())


def test_freed_buckets_are_gone_and_others_stay(setup: TransportSetup):
    first, second = setup.new_version(), setup.new_version()

    async def main() -> None:
        first_manifest, two = await setup.publish(first), await setup.publish(second)
        # This process and another one have read it before, and notice all the same.
        assert same(await read(setup.transport, first_manifest), all_of(first))
        assert same(await setup.call(READERS[0], "read", first_manifest), all_of(first))
        for _ in range(2):  # twice is fine
            await setup.transport.free(first_manifest.keys)
            with pytest.raises(WeightsError):
                await read(setup.transport, first_manifest)
            for reader in READERS:
                with pytest.raises(WeightsError):
                    await setup.call(reader, "read", first_manifest)
        await setup.transport.free(["999/0"])
        await setup.transport.free([])
        assert same(await setup.call(READERS[0], "read", two), all_of(second))
        await setup.transport.free(two.keys)

    setup.run(main())


def test_what_is_freed_and_written_again_is_not_taken_for_what_it_was(setup: TransportSetup):
    first, second = setup.new_version(), setup.new_version()

    async def main() -> None:
        first_manifest = await setup.publish(first)
        assert same(await setup.call(READERS[0], "read", first_manifest), all_of(first))
        await setup.transport.free(first_manifest.keys)
        two = await setup.publish(second)
        with pytest.raises(WeightsError):
            await setup.call(READERS[0], "read", first_manifest)
        assert same(await setup.call(READERS[0], "read", two), all_of(second))
        await setup.transport.free(two.keys)

    setup.run(main())


def test_a_publish_that_was_given_up_leaves_its_version_free(setup: TransportSetup):
    version, other = setup.new_version(), setup.new_version()

    async def main() -> None:
        given_up = await setup.reserve(version)
        await setup.call(WRITERS[0], "write", given_up, (0, 2), other)
        await setup.transport.free([bucket.key for bucket in given_up.written])
        # A rank that has not heard of it writes on: in vain, before and after the version is published again.
        with pytest.raises((WeightsError, ServiceError)):
            await setup.call(WRITERS[1], "write", given_up, (1,), other)
        manifest = await setup.publish(version)
        with contextlib.suppress(WeightsError):
            await setup.call(WRITERS[1], "write", given_up, (3,), other)
        for reader in READERS:
            assert same(await setup.call(reader, "read", manifest), all_of(version))
        await setup.transport.free(manifest.keys)

    setup.run(main())


def test_a_version_without_room_is_refused_before_it_is_written(setup: TransportSetup):
    version = setup.new_version()
    huge = [TensorSpec(name="small", shape=(64,)), TensorSpec(name="huge", shape=(1 << 50,))]

    async def main() -> None:
        before = await setup.publish(version)
        number = setup.new_version()
        drafted = draft(huge, version=number, dtype=torch.bfloat16)
        for _ in range(2):  # nothing is held by the first
            with pytest.raises(WeightsError, match=r"\d{16} bytes are needed, \d+ are free") as caught:
                await setup.transport.reserve(drafted)
            assert caught.value.hint
        assert same(await read(setup.transport, before), all_of(version))
        after = await setup.publish(number)
        assert same(await setup.call(READERS[0], "read", after), all_of(number))
        await setup.transport.free([*before.keys, *after.keys])

    setup.run(main())


def test_readers_that_give_up_leave_nothing_behind(setup: TransportSetup):
    version = setup.new_version()

    async def main() -> None:
        manifest = await setup.publish(version)
        for reader in READERS:
            await setup.call(reader, "read", manifest)  # what is mapped once may stay mapped
        await read(setup.transport, manifest)
        before = [await setup.ask(reader, "held") for reader in READERS], held_by_this_process()
        tasks = asyncio.all_tasks()
        for _ in range(3):
            for reader in READERS:
                assert await setup.call(reader, "read_one_bucket", manifest) >= 1
            # Cancelled while it waits, and while a bucket is on its way.
            for turns in (0, 1, 5, 50):
                task = asyncio.create_task(read(setup.transport, manifest))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        # Never begun, and begun but never ended.
        await setup.transport.fetch(manifest).aclose()
        buckets = setup.transport.fetch(manifest)
        await anext(buckets)
        await buckets.aclose()
        assert asyncio.all_tasks() == tasks
        for _ in range(300):  # a reader in another process may close it a moment later
            after = [await setup.ask(reader, "held") for reader in READERS], held_by_this_process()
            if after == before:
                break
            await asyncio.sleep(0.1)
        assert after == before
        await setup.transport.free(manifest.keys)

    setup.run(main())


@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([5, 16, 64])), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bucket_bytes=st.integers(1, 2000),
    data=st.data(),
)
@settings(max_examples=12, deadline=None)
def test_any_cut_of_any_model_comes_back(setup: TransportSetup, shapes, dtype, bucket_bytes, data):
    version = setup.new_version()
    wholes = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    cuts = {name: data.draw(tilings(tuple(tensor.shape), step=8)) for name, tensor in wholes.items()}
    ranks = max(len(slices) for slices in cuts.values())
    shards = [
        [
            LocalShard(name=n, tensor_slice=b[rank], values=b[rank].of(wholes[n]))
            for n, b in cuts.items()
            if rank < len(b)
        ]
        for rank in range(ranks)
    ]

    async def main() -> None:
        drafted = await setup.transport.reserve(
            draft(
                [TensorSpec(name=name, shape=tuple(tensor.shape)) for name, tensor in wholes.items()],
                version=version,
                dtype=dtype,
                bucket_bytes=bucket_bytes,
            )
        )
        manifest = complete(
            drafted,
            [await setup.transport.write(drafted, rank_shards, rank=rank) for rank, rank_shards in enumerate(shards)],
        )
        tensors = await read(setup.transport, manifest)
        assert tensors.keys() == wholes.keys()
        assert all(torch.equal(tensors[name], tensor.to(dtype)) for name, tensor in wholes.items())
        await setup.transport.free(manifest.keys)

    setup.run(main())
