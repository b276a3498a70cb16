"""The WeightStore in processes of its own: whoever is killed, what is left is whole, named and freed."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_rl.errors import ServiceError, WeightsError
from forge_rl.runtime.supervision import Restart
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.segment import readable
from tests.fake_actors import cluster, pid_of
from tests.fake_store import (
    RANKS,
    all_of,
    exist,
    hold,
    latest,
    nothing_in,
    publish,
    read,
    real,
    run,
    segments,
    specs,
    use,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_publish_is_read_by_the_controller_and_other_processes(tmp_path: Path, shm: Path):
    async with real(tmp_path, shm) as (store, users, _):
        assert await latest(store) is None
        with pytest.raises(WeightsError, match="held: none"):
            async with store.lease():
                pass
        manifest = await publish(store, 3)
        assert len(manifest.buckets) == 2
        assert await latest(store) == 3
        for version in (None, 3):
            async with store.lease(version) as leased:
                assert leased == manifest
                assert await read(store.transport(), leased) == all_of(3)

        # Another process writes, and a third version comes while it holds a lease.
        async with store.publishing(4, specs(), torch.float32) as publication:
            ranks = [await use(users, "write", store.transport(), publication.draft, rank) for rank in range(RANKS)]
            await publication.commit(ranks)
        holding = asyncio.create_task(hold(store, users, None))
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
        mapped = Path(f"/proc/{await pid_of(store._service)}/maps").read_text()  # noqa: ASYNC240
        assert "libtorch" not in mapped, "the store's own process moves no tensors, and shall not load it"


async def test_a_writer_killed_midway_leaves_no_version_and_no_segment(tmp_path: Path, shm: Path):
    async with real(tmp_path, shm) as (store, users, faults):
        await publish(store, 1)
        drafts = []

        async def die() -> None:
            async with store.publishing(2, specs(), torch.float32) as publication:
                drafts.append(publication.draft)
                writing = asyncio.create_task(use(users, "write_half", store.transport(), publication.draft, 0))
                await use(users, "halfway")
                os.kill(await pid_of(users), signal.SIGKILL)
                await writing

        with pytest.raises(ServiceError, match="SIGKILL"):
            await die()
        (draft,) = drafts
        assert await latest(store) == 1
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


async def test_the_lease_of_a_reader_that_is_killed_ends(tmp_path: Path, shm: Path):
    async with real(tmp_path, shm) as (store, users, _):
        manifest = await publish(store, 1)
        holding = asyncio.create_task(hold(store, users, 1))
        await use(users, "halfway")
        for version in (2, 3, 4):
            await publish(store, version)
        assert all(exist(manifest))
        assert len(segments(shm)) == 3 * 2
        os.kill(await pid_of(users), signal.SIGKILL)
        with pytest.raises(ServiceError, match="SIGKILL"):
            await holding
        async with asyncio.timeout(60):  # the store hears of the death by itself
            while len(segments(shm)) > 2 * 2:
                version += 1
                await publish(store, version)
        assert not any(exist(manifest))
        with pytest.raises(WeightsError, match=f"no version 1 of the weights; held: {version - 1}, {version}"):
            async with store.lease(1):
                pass


async def test_a_store_that_dies_is_started_again_with_its_versions_and_leases(tmp_path: Path, shm: Path):
    async with real(tmp_path, shm) as (store, users, faults):
        await publish(store, 1)
        await publish(store, 2)
        reserve = store.transport().reserve
        transport = store.transport()

        async def kill_and_reserve(drafted: Manifest) -> Manifest:
            os.kill(store_process, signal.SIGKILL)
            return await reserve(drafted)

        store_process = await pid_of(store._service)
        async with store.lease(1) as leased_manifest:
            transport.reserve = kill_and_reserve  # type: ignore[method-assign]
            with pytest.raises(ServiceError, match="SIGKILL") as caught:
                await asyncio.wait_for(publish(store, 3), 20)
            assert (caught.value.service, caught.value.replica, caught.value.call) == ("weights", 0, "reserve")
            assert "weights-0.log" in caught.value.hint

            # Its successor holds the same bytes at the same places; calls that wait for it get what they ask for.
            assert await latest(store) == 2
            assert await pid_of(store._service) != store_process
            async with store.lease() as manifest:
                assert await read(store.transport(), manifest) == all_of(2)
            for version in (3, 4, 5):
                await publish(store, version)
            assert all(exist(leased_manifest))
            assert await read(store.transport(), leased_manifest) == all_of(1)
            assert len(segments(shm)) == 3 * 2
        await publish(store, 6)
        assert len(segments(shm)) == 2 * 2
        assert [(fault.service, fault.fatal, fault.recovered_s is None) for fault in faults.seen] == [
            ("weights", False, False)
        ]

        # What was rolled back stays forgotten, also by a later successor.
        await store.rollback(5)
        os.kill(await pid_of(store._service), signal.SIGKILL)
        assert await latest(store) == 5
        await publish(store, 6, all_of(60))
        async with store.lease() as manifest:
            assert (manifest.version, manifest.epoch) == (6, 1)
            assert await read(store.transport(), manifest) == all_of(60)
        await users.stop()
        faults.closing = True
        await store.stop()
        assert nothing_in(shm)
        with pytest.raises(ServiceError, match="weights, call rollback: it has been stopped"):
            await store.rollback(0)


async def test_a_store_that_may_not_restart_is_named_and_leaves_nothing(tmp_path: Path, shm: Path):
    async with real(tmp_path, shm, restart=Restart(max_restarts=0)) as (store, users, faults):
        manifest = await publish(store, 1)
        mapped = [readable(bucket.segment) for bucket in manifest.buckets if bucket.segment]
        holding = asyncio.create_task(hold(store, users, 1))
        await use(users, "halfway")
        os.kill(await pid_of(store._service), signal.SIGKILL)
        async with asyncio.timeout(60):
            for work in (store.rollback(0), publish(store, 2), store.lease().__aenter__()):
                with pytest.raises(ServiceError, match="SIGKILL"):
                    await work
        assert faults.fatal is not None
        assert len(segments(shm)) == 2

        # Who has mapped a version keeps it; so does a reader in another process.
        assert {float(value) for memory in mapped for value in memory.view(torch.float32).unique()} <= {0.0, 1.0}
        await use(users, "end")
        assert await holding == all_of(1)
        await users.stop()
        faults.closing = True
        await store.stop()
        assert nothing_in(shm)


async def test_a_hung_store_is_killed_at_its_stop_and_leaves_nothing(tmp_path: Path, shm: Path):
    async with cluster(tmp_path) as (meshes, faults):
        store = await WeightStore.start(WeightStore.Config(shm=shm), meshes, faults, deadline_s=60)
        await publish(store, 1)
        os.kill(await pid_of(store._service), signal.SIGSTOP)
        faults.closing = True
        await store.stop()
        assert nothing_in(shm)


async def test_a_store_that_nobody_stops_ends_with_its_processes(tmp_path: Path, shm: Path):
    async with cluster(tmp_path) as (meshes, faults):
        store = await WeightStore.start(WeightStore.Config(shm=shm), meshes, faults, deadline_s=60)
        await publish(store, 1)
        assert segments(shm)
    assert nothing_in(shm)


RUN = """
import asyncio, sys
from pathlib import Path
from forge_rl.services.weight_store import WeightStore
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
