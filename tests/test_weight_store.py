"""The WeightStore: versions are whole, immutable, kept while they are read and freed; what finds no room is refused."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.errors import ConfigError, WeightsError
from forge_rl.services import weight_store as module
from forge_rl.services.weight_store import WeightStore
from forge_rl.services.weight_store_actor import Holder
from forge_rl.weights import volume as volume_module
from forge_rl.weights.manifest import Bucket, Manifest, ShardReport, TensorSpec, factor_names
from forge_rl.weights.segment import PAGE, writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from forge_rl.weights.transports.torchstore import TorchStoreTransport
from tests.fake_store import (
    RANKS,
    SHAPES,
    VERSION_BYTES,
    Straggler,
    all_of,
    exist,
    latest,
    publish,
    read,
    segments,
    shards,
    shared,
    specs,
    until_state,
)

pytestmark = pytest.mark.usefixtures("store_process", "nothing_left")


async def test_a_version_cannot_be_published_twice_nor_by_two(shm: Path):
    async with shared(shm) as (store, _):
        await publish(store, 3)
        for version in (3, 2):
            with pytest.raises(WeightsError, match=f"version {version} is not newer than the latest, 3"):
                await publish(store, version)
        async with store.publishing(4, specs(), torch.float32) as publication:
            with pytest.raises(WeightsError, match="version 4 is already being written"):
                await publish(store, 4)
            write = store.transport().write
            ranks = [await write(publication.draft, shards(all_of(4), rank), rank=rank) for rank in range(RANKS)]
            await publication.commit(ranks)
        async with store.lease() as manifest:
            assert await read(store.transport(), manifest) == all_of(4)


@pytest.mark.parametrize(
    ("rank_order", "message"),
    [
        ((0,), r"shards of 'a' for version 2 do not fit: they hold 320 of 640 elements"),
        ((), r"shards of 'a' for version 2 do not fit: they hold 0 of 640 elements"),
        ((0, 1, 1), r"shards of 'a' for version 2 do not fit: .* overlaps"),
    ],
)
async def test_a_version_that_was_not_written_exactly_once_is_never_seen(
    shm: Path, rank_order: Sequence[int], message: str
):
    async with shared(shm) as (store, _):
        await publish(store, 1)

        async def commit() -> None:
            async with store.publishing(2, specs(), torch.float32) as publication:
                write = store.transport().write
                ranks = [await write(publication.draft, shards(all_of(2), rank), rank=rank) for rank in range(2)]
                await publication.commit([ranks[rank] for rank in rank_order])

        with pytest.raises(WeightsError, match=message):
            await commit()
        assert await latest(store) == 1
        await publish(store, 2)
        async with store.lease() as manifest:
            assert await read(store.transport(), manifest) == all_of(2)


async def test_a_version_that_was_forgotten_or_cancelled_is_never_seen(shm: Path):
    async with shared(shm) as (store, watched):

        async def forget() -> None:
            async with store.publishing(1, specs(), torch.float32):
                pass

        with pytest.raises(WeightsError, match="version 1 was not committed"):
            await forget()

        async def wait() -> None:
            async with store.publishing(1, specs(), torch.float32):
                begun.set()
                await asyncio.Event().wait()

        begun = asyncio.Event()
        publishing = asyncio.create_task(wait())
        await begun.wait()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert (await watched.state()).used == {}
        await publish(store, 1)


async def test_a_publish_cancelled_in_its_commit_still_knows_its_outcome(shm: Path):
    async with shared(shm) as (store, _):
        commit, is_committed, answered = store._commit, asyncio.Event(), asyncio.Event()

        async def slow(manifest: Manifest) -> None:
            await commit(manifest)
            is_committed.set()
            await answered.wait()

        store._commit = slow  # type: ignore[method-assign]
        publications: list[module.Publication] = []

        async def cancelled() -> None:
            write = store.transport().write
            async with store.publishing(1, specs(), torch.float32) as publication:
                publications.append(publication)
                ranks = [await write(publication.draft, shards(all_of(1), rank), rank=rank) for rank in range(RANKS)]
                await publication.commit(ranks)

        publishing = asyncio.create_task(cancelled())
        await is_committed.wait()
        publishing.cancel()
        await asyncio.sleep(0)
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert publications[0].committed, "so that the trainer takes the next number"
        assert await latest(store) == 1
        await publish(store, 2)
        async with store.lease() as manifest:
            assert await read(store.transport(), manifest) == all_of(2)


async def test_a_rank_that_outlives_its_publish_harms_no_later_version(shm: Path):
    async with shared(shm) as (store, watched):
        transport = store.transport()
        assert isinstance(transport, SharedMemoryTransport)

        async def give_up() -> None:
            async with store.publishing(1, specs(), torch.float32) as publication:
                stragglers.append(Straggler(transport, publication.draft, shards(all_of(-1), 0)))
                raise ValueError("rank 1 failed")

        stragglers: list[Straggler] = []
        with pytest.raises(ValueError, match="rank 1 failed"):
            await give_up()
        for version in (1, 2):
            await publish(store, version)
        assert not stragglers[0].finish(), "it was told that it wrote a version"
        for version in (1, 2):
            async with store.lease(version) as manifest:
                assert await read(transport, manifest) == all_of(version)
        await publish(store, 3)
        assert (await watched.state()).bytes == 2 * VERSION_BYTES


async def test_what_a_publish_could_not_free_the_next_one_does(shm: Path):
    async with shared(shm, keep_versions=2) as (store, watched):
        for version in (1, 2):
            await publish(store, version)

        async def fail(keys: Collection[str]) -> None:
            raise WeightsError("no answer")

        transport = store.transport()
        transport.free = fail  # type: ignore[method-assign]
        with pytest.raises(WeightsError, match="no answer"):
            await publish(store, 3)
        del transport.free
        await publish(store, 3)
        assert sorted((await watched.state()).used) == ["2/0", "2/1", "3/0", "3/1"]
        assert (await watched.state()).bytes == 2 * VERSION_BYTES


async def test_readers_never_see_values_of_two_versions(shm: Path):
    versions: list[int] = []
    done = asyncio.Event()
    read_once = asyncio.Condition()

    async def reader(store: WeightStore) -> None:
        while not done.is_set():
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == all_of(manifest.version)
            async with read_once:
                versions.append(manifest.version)
                read_once.notify_all()

    async with shared(shm, keep_versions=1) as (store, _):
        first = await publish(store, 1)
        async with store.lease(1) as leased_manifest:  # read at the end, when eight newer ones have come and gone
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(reader(store))
                for version in range(2, 10):
                    count = len(versions)
                    await publish(store, version)
                    async with read_once:
                        await read_once.wait_for(lambda version=version, count=count: version in versions[count:])
                done.set()
            assert await read(store.transport(), leased_manifest) == all_of(1)
            assert all(exist(first))
        await publish(store, 10)
        assert not any(exist(first))
    assert max(versions) == 9
    assert len(set(versions)) > 4, "the readers must meet many versions for this to be a test"


@pytest.mark.parametrize("changed", [tuple(SHAPES), ("a", "b"), ("c",), ()])
async def test_a_steady_state_takes_the_memory_of_two_versions(shm: Path, changed: tuple[str, ...]):
    async with shared(shm, keep_versions=2) as (store, watched):
        store_bytes = []
        transport = store.transport()
        for version in range(1, 12):
            values = {name: version if name in changed else 1 for name in SHAPES}
            async with store.publishing(version, specs(changed), torch.float32) as publication:
                store_bytes.append((await watched.state()).bytes)
                assert sum(path.stat().st_size - PAGE for path in segments(shm)) == (await watched.state()).bytes
                await publication.commit(
                    [await transport.write(publication.draft, shards(values, rank), rank=rank) for rank in (0, 1)]
                )
            async with store.lease() as manifest:
                assert await read(transport, manifest) == values
        new = sum(bucket.bytes for bucket in manifest.written)
        assert max(store_bytes) <= 2 * VERSION_BYTES
        assert store_bytes[3:] == [VERSION_BYTES + new] * len(store_bytes[3:])
        assert (new == VERSION_BYTES) == (changed == tuple(SHAPES))


async def test_versions_of_adapters_share_one_copy_of_the_base(shm: Path):
    weights = {name: torch.ones(SHAPES[name]) for name in ("a", "d")}
    base_bytes = sum(values.nbytes for values in weights.values())
    base_buckets, store_bytes = set[Bucket](), list[int]()
    async with shared(shm, keep_versions=2) as (store, _):
        transport = store.transport()
        for version in range(1, 6):
            factors = dict[str, torch.Tensor]()
            for name, values in weights.items():
                a_name, b_name = factor_names(name)
                factors[a_name] = torch.full((1, values.shape[1]), float(version))
                factors[b_name] = torch.full((values.shape[0], 1), float(version))
            published = {
                name: (values, TensorSlice.whole(values.shape)) for name, values in (factors | weights).items()
            }
            specs = [TensorSpec(name=name, shape=tuple(values.shape)) for name, values in factors.items()]
            specs += [
                TensorSpec(name=name, shape=tuple(values.shape), changed=False, adapter_scale=2.0)
                for name, values in weights.items()
            ]
            shards = [
                LocalShard(name=name, tensor_slice=whole, values=values) for name, (values, whole) in published.items()
            ]
            sums = [ShardReport(name=name, tensor_slice=published[name][1], fingerprint=version) for name in weights]
            async with store.publishing(version, specs, torch.float32) as publication:
                manifest = await publication.commit([await transport.write(publication.draft, shards, rank=0)], sums)
            base_keys = {entry.bucket for entry in manifest.tensors if entry.name in weights}
            base_buckets |= {bucket for bucket in manifest.buckets if bucket.key in base_keys}
            store_bytes.append(sum(path.stat().st_size - PAGE for path in segments(shm)))
            assert await read(transport, manifest) == dict.fromkeys(factors, version) | dict.fromkeys(weights, 1)
        factor_bytes = sum(bucket.bytes for bucket in manifest.written)
    assert sum(bucket.bytes for bucket in base_buckets) == base_bytes, "those of the first version, in their places"
    assert store_bytes == [base_bytes + count * factor_bytes for count in (1, 2, 2, 2, 2)]


async def test_changes_that_wander_take_little_more(shm: Path):
    async with shared(shm, keep_versions=2) as (store, watched):
        values = all_of(1)
        names = list(SHAPES)
        for version in range(1, 25):
            changed = [names[version % 4], names[version // 4 % 4]] if version > 1 else names
            values = values | dict.fromkeys(changed, version)
            await publish(store, version, values, changed)
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == values
            assert sum(bucket.bytes for bucket in manifest.buckets) <= 1.5 * VERSION_BYTES
            assert (await watched.state()).bytes <= 2.5 * VERSION_BYTES


async def test_retention_by_bytes_keeps_the_newest(shm: Path):
    async with shared(shm, keep_versions=5, keep_bytes=1) as (store, _):
        manifests = [await publish(store, version) for version in (1, 2)]
        with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2"):
            async with store.lease(1):
                pass
        assert all(exist(manifests[1]))
        await publish(store, 3)
        assert not any(exist(manifests[0]))


async def test_bytes_that_somebody_changed_do_not_match_their_fingerprint(shm: Path):
    async with shared(shm) as (store, _):
        manifest = await publish(store, 1)
        entry = next(entry for entry in manifest.tensors if entry.name == "d")
        bucket = next(bucket for bucket in manifest.buckets if bucket.key == entry.bucket)
        assert bucket.segment is not None
        entry.of(writable(bucket.segment)).view(torch.int32).bitwise_xor_(1)  # every element alike
        with pytest.raises(AssertionError, match="d says 1"):
            await read(store.transport(), manifest)


async def test_a_version_without_room_changes_nothing_until_there_is_room(small_shm: Path):
    # A version takes two segments of 2560 and 2304 bytes and their headers, which is four pages of sixteen.
    async with shared(small_shm, keep_versions=2) as (store, watched):
        await publish(store, 1)
        ballast = small_shm / "ballast"
        ballast.write_bytes(bytes(volume_module.free_bytes(small_shm) - 3 * PAGE))
        before = segments(small_shm)
        assert volume_module.free_bytes(small_shm) == 3 * PAGE
        message = f"no room for a version of the weights in {small_shm}: {4 * PAGE} bytes are needed, {3 * PAGE} are"
        with pytest.raises(WeightsError, match=message) as caught:
            await publish(store, 2)
        assert "--shm-size" in caught.value.hint
        assert segments(small_shm) == before
        async with store.lease() as manifest:
            assert await read(store.transport(), manifest) == all_of(1)
        ballast.unlink()
        for version in (2, 3, 4):
            await publish(store, version)
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == all_of(version)
        assert (await watched.state()).bytes == 2 * VERSION_BYTES


async def test_a_lease_whose_answer_was_not_waited_for_ends(shm: Path):
    async with shared(shm, keep_versions=1) as (store, watched):
        await publish(store, 1)
        replica = store._service.replicas[0]
        call = replica.call

        async def lose_the_answer(method: str, *args: object, deadline_s: float) -> Any:
            answer = await call(method, *args, deadline_s=deadline_s)
            if method == "lease":
                await asyncio.Event().wait()
            return answer

        replica.call = lose_the_answer  # type: ignore[assignment,method-assign]
        asking = asyncio.create_task(store.lease().__aenter__())
        await until_state(watched, lambda state: bool(state.leases))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await watched.state()).leases == set()
        await store._call("release", "never held")


async def test_a_holder_elsewhere_is_not_mistaken_for_a_local_process(shm: Path):
    async with shared(shm) as (store, watched):
        await publish(store, 1)
        ended = await asyncio.create_subprocess_exec("true")
        await ended.wait()
        await store._call("lease", 1, "elsewhere", Holder(ended.pid, "another machine's"))
        await store._call("lease", 1, "here", Holder(ended.pid, Holder.this_process().space))
        await until_state(watched, lambda state: "here" not in state.leases)
        assert (await watched.state()).leases == {"elsewhere"}


@pytest.mark.parametrize(
    ("transport", "needed", "installed", "name", "message", "hint"),
    [
        ("auto", 16 * PAGE, False, "shared_memory", "weights travel by shared memory in {shm}$", ""),
        ("shared_memory", 16 * PAGE, False, "shared_memory", "shared memory in {shm}, as asked for$", ""),
        ("auto", 1 << 30, True, "torchstore", r"slower: {shm} has 0\.0 GiB free, 1\.0 are needed$", ""),
        ("torchstore", 0, True, "torchstore", "as asked for$", ""),
        ("shared_memory", 1 << 30, True, "", r"0\.0 GiB free, 1\.0 are needed", "--weights.transport auto"),
        ("torchstore", 0, False, "", "--weights.transport is torchstore, which is not installed", "pip install"),
        ("auto", 1 << 30, False, "", r"1\.0 are needed, and torchstore is not installed", "--shm-size.* pip install"),
    ],
)
def test_the_transport_is_what_was_asked_for_or_what_can_be_used(
    small_shm: Path, transport: str, needed: int, installed: bool, name: str, message: str, hint: str, monkeypatch: Any
):
    monkeypatch.setattr(TorchStoreTransport, "is_installed", lambda: installed)
    config = WeightStore.Config(transport=transport, shm=small_shm)  # type: ignore[arg-type]
    message = message.format(shm=small_shm)
    if name:
        transport_name, sentence = module._choose(config, needed)
        assert transport_name == name
        assert re.search(message, sentence)
    else:
        with pytest.raises(WeightsError, match=message) as caught:
            module._choose(config, needed)
        assert re.search(hint, caught.value.hint)


def test_the_store_imports_without_torchstore():
    script = """
import sys
sys.modules["torchstore"] = None
import forge_rl.services.weight_store as store, forge_rl.services.weight_store_actor, forge_rl.run.start.starting
print(store._choose(store.WeightStore.Config(), 0)[0])
try:
    store._choose(store.WeightStore.Config(transport="torchstore"), 0)
except store.WeightsError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["shared_memory", "install it by: pip install 'forge_rl[torchstore]'"]


@pytest.mark.parametrize(("field", "value"), [("keep_versions", 0), ("bucket_mib", 0)])
def test_a_store_that_keeps_nothing_is_refused(field: str, value: float):
    with pytest.raises(ConfigError) as caught:
        WeightStore.Config(**{field: value})
    assert f"--weights.{field.replace('_', '-')} " in caught.value.hint
