"""The WeightStore: versions are whole, immutable, kept while they are read, and freed; and it survives whoever dies."""

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.errors import ConfigError, ServiceError, WeightsError
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service
from forge_rl.services import weights as module
from forge_rl.services.weights import WeightStore
from forge_rl.weights import volume as volume_module
from forge_rl.weights.leases import Holder
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.segment import PAGE, readable, writable
from tests.fake_actors import cluster, new_service_name, pid_of
from tests.fake_store import (
    BUCKET_BYTES,
    RANKS,
    SHAPES,
    VERSION_BYTES,
    StoreUser,
    all_of,
    open_local,
    publish,
    read,
    shards,
    specs,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, 60)

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def local(shm: Path, **config: object) -> AsyncIterator[tuple[WeightStore, module.WeightStoreActor]]:
    """A store in this process."""
    store, actor = await open_local(shm, **config)
    try:
        yield store, actor
    finally:
        await store.stop()


@contextlib.asynccontextmanager
async def real(logs: Path, shm: Path, **config: object) -> AsyncIterator[tuple[WeightStore, Service, Faults]]:
    """A store in a process of its own, and a process that uses it."""
    async with cluster(logs) as (made, faults):
        store = await WeightStore.start(WeightStore.Config(shm=shm, **config), made, faults, deadline_s=60)
        store._bucket_bytes = BUCKET_BYTES
        users = Service(new_service_name(), made, faults)
        await users.watch(users.spawn(StoreUser), deadline_s=60)
        try:
            yield store, users, faults
        finally:
            faults.closing = True
            await users.stop()
            await store.stop()


async def use(users: Service, method: str, *args: object) -> object:
    return await users.call(users.replicas[0], method, *args, deadline_s=30)


def segments(shm: Path) -> set[Path]:
    return {path for path in shm.rglob("*") if path.is_file() and path.name != "lock"}


def nothing_in(shm: Path) -> bool:
    return not list(shm.iterdir())


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def exist(manifest: Manifest) -> list[bool]:
    """Which of a version's segments can still be read."""
    found = []
    for bucket in manifest.buckets:
        assert bucket.segment is not None
        try:
            readable(bucket.segment)
        except WeightsError:
            found.append(False)
        else:
            found.append(True)
    return found


def test_what_is_published_is_read_by_the_controller_and_by_other_processes(tmp_path: Path, shm: Path):
    async def main() -> None:
        async with real(tmp_path, shm) as (store, users, _):
            assert await store.latest() is None
            with pytest.raises(WeightsError, match="held: none"):
                async with store.lease():
                    pass
            waiter = asyncio.create_task(store.wait_for(3))
            manifest = await publish(store, 3)
            assert len(manifest.buckets) == 2
            assert await waiter == await store.latest() == 3
            for version in (None, 3):
                async with store.lease(version) as leased:
                    assert leased == manifest
                    assert await read(store.transport(), leased) == all_of(3)

            # Another process writes, and a third version comes while it holds a lease.
            async with store.publishing(4, specs(), torch.float32) as publication:
                ranks = [await use(users, "write", store.transport(), publication.draft, rank) for rank in range(RANKS)]
                await publication.commit(ranks)
            holding = asyncio.create_task(use(users, "hold", store.reader(), None))
            await use(users, "halfway")
            for version in (5, 6, 7):
                await publish(store, version)
            assert len(segments(shm)) == 3 * 2
            await use(users, "end")
            assert await holding == all_of(4)
            with pytest.raises(WeightsError, match="there is no version 4 of the weights; held: 6, 7"):
                async with store.lease(4):
                    pass
            await publish(store, 8)
            assert len(segments(shm)) == 2 * 2

    run(main())


def test_a_writer_that_is_killed_midway_leaves_its_version_unseen_and_no_segment(tmp_path: Path, shm: Path):
    async def main() -> None:
        async with real(tmp_path, shm) as (store, users, faults):
            await publish(store, 1)
            drafts = []

            async def die() -> None:
                async with store.publishing(2, specs(), torch.float32) as publication:
                    drafts.append(publication.draft)
                    waiters.append(asyncio.create_task(store.wait_for(2)))
                    writing = asyncio.create_task(use(users, "write_half", store.transport(), publication.draft, 0))
                    await use(users, "halfway")
                    os.kill(await pid_of(users), signal.SIGKILL)
                    await writing

            waiters: list[asyncio.Task[int]] = []
            with pytest.raises(ServiceError, match="SIGKILL"):
                await die()
            (draft,) = drafts
            with pytest.raises(WeightsError, match=r"version 2 will not come: version 2 was aborted: .*SIGKILL"):
                await asyncio.wait_for(waiters[0], 5)
            with pytest.raises(WeightsError, match="version 2 will not come"):
                await asyncio.wait_for(store.wait_for(2), 5)
            assert await store.latest() == 1
            with pytest.raises(WeightsError, match="there is no version 2 of the weights; held: 1"):
                async with store.lease(2):
                    pass
            assert not any(exist(replace(draft, buckets=draft.written)))
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == all_of(1)

            for version in (2, 3):
                await publish(store, version)
                async with store.lease() as manifest:
                    assert await read(store.transport(), manifest) == all_of(version)
            assert len(segments(shm)) == 2 * 2
            assert [fault.service for fault in faults.seen] == [users.name]

    run(main())


def test_the_lease_of_a_reader_that_is_killed_ends(tmp_path: Path, shm: Path):
    async def main() -> None:
        async with real(tmp_path, shm) as (store, users, _):
            manifest = await publish(store, 1)
            holding = asyncio.create_task(use(users, "hold", store.reader(), 1))
            await use(users, "halfway")
            for version in (2, 3, 4):
                await publish(store, version)
            assert all(exist(manifest))
            assert len(segments(shm)) == 3 * 2
            os.kill(await pid_of(users), signal.SIGKILL)
            with pytest.raises(ServiceError, match="SIGKILL"):
                await holding
            async with asyncio.timeout(10):  # the store hears of the death by itself
                while len(segments(shm)) > 2 * 2:
                    version += 1
                    await publish(store, version)
            assert not any(exist(manifest))
            with pytest.raises(WeightsError, match=f"no version 1 of the weights; held: {version - 1}, {version}"):
                async with store.lease(1):
                    pass

    run(main())


def test_a_store_that_dies_is_named_at_once_and_leaves_nothing(tmp_path: Path, shm: Path):
    async def main() -> None:
        async with real(tmp_path, shm) as (store, users, faults):
            manifest = await publish(store, 1)
            mapped = [readable(bucket.segment) for bucket in manifest.buckets if bucket.segment]
            waiter = asyncio.create_task(store.wait_for(2))
            holding = asyncio.create_task(use(users, "hold", store.reader(), 1))
            await use(users, "halfway")
            reserve = store.transport().reserve

            async def kill_and_reserve(drafted: Manifest) -> Manifest:
                os.kill(store_process, signal.SIGKILL)
                return await reserve(drafted)

            store_process = await pid_of(store._service)
            store.transport().reserve = kill_and_reserve  # type: ignore[method-assign]
            async with asyncio.timeout(5):
                for call, work in (
                    ("reserve", publish(store, 2)),
                    ("wait_for", waiter),
                    ("latest", store.latest()),
                    ("begin", publish(store, 2)),
                    ("lease", store.lease().__aenter__()),
                ):
                    with pytest.raises(ServiceError, match="SIGKILL") as caught:
                        await work
                    assert (caught.value.service, caught.value.replica, caught.value.call) == ("weights", 0, call)
                    assert "weights-0.log" in caught.value.mend
            assert [(fault.service, fault.replica) for fault in faults.seen] == [("weights", 0)]
            assert len(segments(shm)) == 2

            # Who has mapped a version keeps it; so does a reader in another process.
            assert {float(value) for memory in mapped for value in memory.view(torch.float32).unique()} <= {0.0, 1.0}
            await use(users, "end")
            assert await holding == all_of(1)
            await users.stop()
            faults.closing = True
            await store.stop()
            assert nothing_in(shm)
            with pytest.raises(ServiceError, match="weights, call latest: it has been stopped"):
                await store.latest()

    run(main())


def test_a_store_that_nobody_stops_ends_with_its_processes(tmp_path: Path, shm: Path):
    async def main() -> None:
        async with cluster(tmp_path) as (made, faults):
            store = await WeightStore.start(WeightStore.Config(shm=shm), made, faults, deadline_s=60)
            await publish(store, 1)
            assert segments(shm)
        assert nothing_in(shm)

    run(main())


RUN = """
import asyncio, sys
from pathlib import Path
from forge_rl.services.weights import WeightStore
from tests.fake_actors import cluster, pid_of
from tests.fake_store import publish

async def main(logs, shm):
    async with cluster(logs) as (made, faults):
        store = await WeightStore.start(WeightStore.Config(shm=shm), made, faults, deadline_s=60)
        await publish(store, 1)
        print(await pid_of(store._service), flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*map(Path, sys.argv[1:])))
"""


def test_what_a_killed_run_left_is_reclaimed_by_the_next_start(tmp_path: Path, shm: Path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    with subprocess.Popen([sys.executable, script, tmp_path, shm], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        store_process = os.pidfd_open(int(controller.stdout.readline()))
        controller.kill()
    assert select.select([store_process], [], [], 20)[0], "the store outlives its controller"
    os.close(store_process)
    assert len(segments(shm)) == 1

    async def main() -> None:
        async with real(tmp_path, shm) as (store, _, _):
            assert re.search(r"that a killed run had left were freed", store.choice)
            assert segments(shm) == set()
            await publish(store, 1)

    run(main())


def test_a_version_cannot_be_published_twice_nor_by_two(shm: Path):
    async def main() -> None:
        async with local(shm) as (store, _):
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

    run(main())


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ((0,), r"shards of 'a' for version 2 do not fit: they hold 320 of 640 elements"),
        ((), r"shards of 'a' for version 2 do not fit: they hold 0 of 640 elements"),
        ((0, 1, 1), r"shards of 'a' for version 2 do not fit: .* overlaps"),
    ],
)
def test_a_version_that_was_not_written_exactly_once_is_never_seen(shm: Path, which: Sequence[int], said: str):
    async def main() -> None:
        async with local(shm) as (store, _):
            await publish(store, 1)

            async def commit() -> None:
                async with store.publishing(2, specs(), torch.float32) as publication:
                    write = store.transport().write
                    ranks = [await write(publication.draft, shards(all_of(2), rank), rank=rank) for rank in range(2)]
                    await publication.commit([ranks[rank] for rank in which])

            with pytest.raises(WeightsError, match=said):
                await commit()
            assert await store.latest() == 1
            await publish(store, 2)
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == all_of(2)

    run(main())


def test_a_version_that_was_forgotten_or_cancelled_is_never_seen(shm: Path):
    async def main() -> None:
        async with local(shm) as (store, actor):

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
            assert actor.volume._used == {}
            with pytest.raises(WeightsError, match="version 1 will not come: version 1 was aborted: CancelledError"):
                await store.wait_for(1)
            await publish(store, 1)

    run(main())


def test_readers_never_see_values_of_two_versions(shm: Path):
    async def main() -> None:
        seen: list[int] = []
        done = asyncio.Event()
        read_once = asyncio.Condition()

        async def reader(store: WeightStore) -> None:
            while not done.is_set():
                async with store.lease() as manifest:
                    assert await read(store.transport(), manifest) == all_of(manifest.version)
                async with read_once:
                    seen.append(manifest.version)
                    read_once.notify_all()

        async with local(shm, keep_versions=1) as (store, _):
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
                assert await read(store.transport(), held) == all_of(1)
                assert all(exist(first))
            await publish(store, 10)
            assert not any(exist(first))
        assert max(seen) == 9
        assert len(set(seen)) > 4, "the readers must meet many versions for this to be a test"

    run(main())


@pytest.mark.parametrize("changed", [tuple(SHAPES), ("a", "b"), ("c",), ()])
def test_a_steady_state_takes_the_memory_of_two_versions(shm: Path, changed: tuple[str, ...]):
    async def main() -> None:
        async with local(shm, keep_versions=2) as (store, actor):
            seen = []
            transport = store.transport()
            for version in range(1, 12):
                values = {name: version if name in changed else 1 for name in SHAPES}
                async with store.publishing(version, specs(changed), torch.float32) as publication:
                    seen.append(actor.volume.bytes)
                    assert sum(path.stat().st_size - PAGE for path in segments(shm)) == actor.volume.bytes
                    await publication.commit(
                        [await transport.write(publication.draft, shards(values, rank), rank=rank) for rank in (0, 1)]
                    )
                async with store.lease() as manifest:
                    assert await read(transport, manifest) == values
            new = sum(bucket.bytes for bucket in manifest.written)
            assert max(seen) <= 2 * VERSION_BYTES
            assert seen[3:] == [VERSION_BYTES + new] * len(seen[3:])
            assert (new == VERSION_BYTES) == (changed == tuple(SHAPES))

    run(main())


def test_changes_that_wander_take_little_more(shm: Path):
    async def main() -> None:
        async with local(shm, keep_versions=2) as (store, actor):
            values = all_of(1)
            names = list(SHAPES)
            for version in range(1, 25):
                changed = [names[version % 4], names[version // 4 % 4]] if version > 1 else names
                values = values | dict.fromkeys(changed, version)
                await publish(store, version, values, changed)
                async with store.lease() as manifest:
                    assert await read(store.transport(), manifest) == values
                assert sum(bucket.bytes for bucket in manifest.buckets) <= 1.5 * VERSION_BYTES
                assert actor.volume.bytes <= 2.5 * VERSION_BYTES

    run(main())


def test_retention_by_bytes_keeps_the_newest(shm: Path):
    async def main() -> None:
        async with local(shm, keep_versions=5, keep_gib=1e-9) as (store, _):
            manifests = [await publish(store, version) for version in (1, 2)]
            with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2"):
                async with store.lease(1):
                    pass
            assert all(exist(manifests[1]))
            await publish(store, 3)
            assert not any(exist(manifests[0]))

    run(main())


def test_bytes_that_somebody_changed_do_not_match_their_fingerprint(shm: Path):
    async def main() -> None:
        async with local(shm) as (store, _):
            manifest = await publish(store, 1)
            entry = next(entry for entry in manifest.tensors if entry.name == "d")
            bucket = next(bucket for bucket in manifest.buckets if bucket.key == entry.bucket)
            assert bucket.segment is not None
            entry.of(writable(bucket.segment)).view(torch.int32).bitwise_xor_(1)  # every element alike
            with pytest.raises(AssertionError, match="d says 1"):
                await read(store.transport(), manifest)

    run(main())


def test_a_version_that_finds_no_room_changes_nothing_and_is_written_once_there_is(small_shm: Path):
    async def main() -> None:
        # A version takes two segments of 2560 and 2304 bytes and their headers, which is four pages of sixteen.
        async with local(small_shm, keep_versions=2) as (store, actor):
            await publish(store, 1)
            ballast = small_shm / "ballast"
            ballast.write_bytes(bytes(volume_module.free_bytes(small_shm) - 3 * PAGE))
            before = segments(small_shm)
            assert volume_module.free_bytes(small_shm) == 3 * PAGE
            said = f"no room for a version of the weights in {small_shm}: {4 * PAGE} bytes are needed, {3 * PAGE} are"
            with pytest.raises(WeightsError, match=said) as caught:
                await publish(store, 2)
            assert "--shm-size" in caught.value.mend
            assert segments(small_shm) == before
            with pytest.raises(WeightsError, match=r"version 2 will not come: .* 12288 are free"):
                await store.wait_for(2)
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == all_of(1)
            ballast.unlink()
            for version in (2, 3, 4):
                await publish(store, version)
                async with store.lease() as manifest:
                    assert await read(store.transport(), manifest) == all_of(version)
            assert actor.volume.bytes == 2 * VERSION_BYTES

    run(main())


def test_a_version_that_loses_its_room_while_it_is_reserved_leaves_nothing(
    small_shm: Path, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        async with local(small_shm) as (store, _):
            await publish(store, 1)
            ballast = small_shm / "ballast"
            ballast.write_bytes(bytes(volume_module.free_bytes(small_shm) - 3 * PAGE))
            before = segments(small_shm)
            with monkeypatch.context() as patch:
                patch.setattr(volume_module, "free_bytes", lambda _: 1 << 40)  # what was seen a moment before
                with pytest.raises(WeightsError, match="no room for a version"):
                    await publish(store, 2)
            assert segments(small_shm) == before
            ballast.unlink()
            await publish(store, 2)

    run(main())


def test_a_lease_whose_answer_was_not_waited_for_ends(shm: Path):
    async def main() -> None:
        async with local(shm, keep_versions=1) as (store, actor):
            await publish(store, 1)
            call = store._service.call

            async def lose_the_answer(replica: Any, method: str, *args: object, deadline_s: float) -> Any:
                answer = await call(replica, method, *args, deadline_s=deadline_s)
                if method == "lease":
                    await asyncio.Event().wait()
                return answer

            store._service.call = lose_the_answer  # type: ignore[assignment,method-assign]
            asking = asyncio.create_task(store.lease().__aenter__())
            await until(lambda: bool(actor._leases))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert actor._leases == {}
            await store._call("release", "never held")

    run(main())


def test_a_holder_on_another_machine_is_not_taken_for_a_process_of_this_one(shm: Path):
    async def main() -> None:
        async with local(shm) as (store, actor):
            await publish(store, 1)
            ended = await asyncio.create_subprocess_exec("true")
            await ended.wait()
            await store._call("lease", 1, "elsewhere", Holder(ended.pid, "another machine's"))
            await store._call("lease", 1, "here", Holder(ended.pid, Holder.this_process().namespace))
            await until(lambda: "here" not in actor._leases)
            assert actor._leases.keys() == {"elsewhere"}

    run(main())


def test_where_shared_memory_is_too_small_auto_says_so_and_takes_torchstore(small_shm: Path):
    def choose(transport: str, needed: int) -> tuple[str, str]:
        return module._choose(WeightStore.Config(transport=transport, shm=small_shm), needed)  # type: ignore[arg-type]

    assert choose("auto", 16 * PAGE) == ("shared_memory", f"weights travel by shared memory in {small_shm}")
    name, said = choose("auto", 1 << 30)
    assert name == "torchstore"
    assert said.endswith(f"slower: {small_shm} has 0.0 GiB free, 1.0 are needed")
    with pytest.raises(WeightsError, match=r"0\.0 GiB free, 1\.0 are needed") as caught:
        choose("shared_memory", 1 << 30)
    assert "--weights.transport auto" in caught.value.mend
    assert choose("torchstore", 0)[0] == "torchstore"


@pytest.mark.parametrize(("field", "value"), [("keep_versions", 0), ("keep_gib", 0.0), ("bucket_mib", 0)])
def test_a_store_that_keeps_nothing_is_refused(field: str, value: float):
    with pytest.raises(ConfigError) as caught:
        WeightStore.Config(**{field: value})
    assert f"--weights.{field.replace('_', '-')} " in caught.value.mend
