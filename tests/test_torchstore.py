"""The torchstore transport on a real store: what is put comes back, anywhere, until it is deleted."""

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from forge_rl.errors import WeightsError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service
from forge_rl.weights.torchstore import TorchStoreTransport
from tests.fake_actors import FakeActor, cluster, new_service_name

pytestmark = pytest.mark.usefixtures("nothing_left")


@contextlib.asynccontextmanager
async def open_store(logs: Path) -> AsyncIterator[tuple[TorchStoreTransport, Cluster, Faults]]:
    async with cluster(logs) as (made, faults):
        name = new_service_name()
        transport = await TorchStoreTransport.open(made.spawn(name, imports=TorchStoreTransport.imports))
        yield transport, made, faults


def bucket(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_buckets_come_back_anywhere_until_they_are_deleted(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path) as (transport, made, faults):
            buckets = {f"1/0/{size}": bucket(size, seed=size) for size in (1, 64, 100_001, 5 << 20)}
            await asyncio.gather(*(transport.put(key, values) for key, values in buckets.items()))
            for key, values in buckets.items():
                found = await transport.get(key)
                assert found.dtype == torch.uint8
                assert torch.equal(found, values)

            # What is stored is a copy, and so is what is read.
            source = bucket(1000)
            await transport.put("1/1/0", source)
            (await transport.get("1/1/0")).zero_()
            before = source.clone()
            source.zero_()
            assert torch.equal(await transport.get("1/1/0"), before)

            # The same, pickled, and in another process.
            again = pickle.loads(pickle.dumps(transport))
            assert torch.equal(await again.get("1/0/64"), buckets["1/0/64"])
            service = Service(new_service_name(), made, faults)
            replica = service.spawn(FakeActor, imports=TorchStoreTransport.imports)
            await service.watch(replica, deadline_s=60)
            fetched = await service.call(replica, "fetch", transport, "1/0/64", deadline_s=60)
            assert fetched == buckets["1/0/64"].tolist()
            with pytest.raises(WeightsError, match="torchstore holds no bucket 9/0/0"):
                await service.call(replica, "fetch", transport, "9/0/0", deadline_s=60)

            for key in ("9/0/0", ""):
                with pytest.raises(WeightsError, match=f"torchstore holds no bucket {key}"):
                    await transport.get(key)
            await transport.delete("9/0/0")  # nothing happens
            await transport.delete("1/0/64")
            await transport.delete("1/0/64")
            with pytest.raises(WeightsError, match="no bucket 1/0/64"):
                await transport.get("1/0/64")
            assert torch.equal(await transport.get("1/0/1"), buckets["1/0/1"])

            faults.closing = True
            await service.stop()

    asyncio.run(main())


def test_two_stores_know_nothing_of_each_other(tmp_path: Path):
    async def main() -> None:
        async with open_store(tmp_path) as (one, _, _), open_store(tmp_path) as (other, _, _):
            await one.put("1/0/0", bucket(10, seed=1))
            await other.put("1/0/0", bucket(20, seed=2))
            assert torch.equal(await one.get("1/0/0"), bucket(10, seed=1))
            await other.delete("1/0/0")
            assert torch.equal(await one.get("1/0/0"), bucket(10, seed=1))

    asyncio.run(main())
