"""The store over two hosts: real Monarch hosts; what one publishes, the other pulls, serves and frees."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from forge_rl.runtime.service import Service
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import Manifest
from tests.fake_actors import cluster_of, new_service_name, pid_of
from tests.fake_ranks import LAYOUT, RANKS, FakeRank, specs, values_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

LONG_S = 120.0


async def test_a_version_is_published_on_one_host_and_read_on_another(tmp_path: Path, shm: Path):
    async with cluster_of(tmp_path, "a", "b") as (cluster, faults):
        config = WeightStore.Config(transport="shared_memory", shm=shm)
        store = await WeightStore.start(config, cluster, faults, deadline_s=LONG_S, hosts=("a", "b"))
        service = Service(new_service_name(), cluster, faults)
        for host in ("a", "b"):
            await service.watch(service.spawn(FakeRank, host=host), deadline_s=LONG_S)
        writer, reader = service.replicas

        async def publish(version: int, unchanged: tuple[str, ...] = ()) -> Manifest:
            async with store.publishing(version, specs(unchanged), torch.bfloat16, hosts=("a",)) as publication:
                reports = await writer.call(
                    "write", store.transport("a"), publication.draft, range(RANKS), deadline_s=LONG_S
                )
                return await publication.commit(reports)

        async def read() -> dict[str, torch.Tensor]:
            async with store.lease() as manifest:
                return await reader.call("read", store.transport("b"), manifest, deadline_s=LONG_S)

        def segments() -> dict[str, int]:
            """Files in each host's folder, its lock aside."""
            return {host: len(list(folder.iterdir())) - 1 for host, folder in zip("ab", store.folders, strict=True)}

        changed = dict.fromkeys(LAYOUT, 1)
        for version, unchanged in ((1, ()), (2, ("embed", "head")), (3, ()), (4, ())):
            manifest = await publish(version, unchanged)
            assert {bucket.host for bucket in manifest.buckets} == {"a"}
            changed |= {name: version for name in LAYOUT if name not in unchanged}
            tensors = await read()
            for name, version_of in changed.items():
                assert torch.equal(tensors[name], values_of(version_of, name).to(torch.bfloat16)), (version, name)
        # Two versions of one bucket each are kept where they are written; the other host keeps what may be read.
        assert segments() == {"a": 2, "b": 1}
        assert (await store.received())["b"].keys() == {"a"}

        # A version that came ahead does not come again.
        await publish(5)
        async with store.lease() as manifest:
            await store.prefetch(manifest, ("a", "b"))
            before = await store.received()
            await reader.call("read", store.transport("b"), manifest, deadline_s=LONG_S)
            assert await store.received() == before

        # A process of either host that dies is started again: the reader's copies are pulled anew, and the versions
        # of the writer's host, which has the index, are still there.
        for replica in (1, 0):
            os.kill(await pid_of(store._service, replica=replica), signal.SIGKILL)
            while store.deaths == 1 - replica:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await store.returned("ab"[replica])
            tensors = await read()
            assert all(torch.equal(tensors[name], values_of(5, name).to(torch.bfloat16)) for name in LAYOUT)
        for version in (6, 7):
            await publish(version)
            tensors = await read()
            assert all(torch.equal(tensors[name], values_of(version, name).to(torch.bfloat16)) for name in LAYOUT)
        assert segments() == {"a": 2, "b": 1}
        assert faults.fatal is None
        faults.closing = True
        await service.stop()
        await store.stop()
