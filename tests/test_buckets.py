"""Buckets: what is written comes back, cut anywhere, from any number of ranks, and damage is noticed."""

import asyncio
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.errors import WeightsError
from forge_rl.weights import buckets
from forge_rl.weights.buckets import LocalShard, read_version, write_shards
from forge_rl.weights.fingerprint import fingerprint
from forge_rl.weights.manifest import Manifest, merge_reports
from tests.fakes import MemoryTransport


def random_tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}


def shards_of(tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> list[LocalShard]:
    """Rows cut as FSDP2 cuts them: ceil(rows / ranks) each, so that the last ranks may have none."""
    result = []
    for name, tensor in tensors.items():
        rows = -(-tensor.shape[0] // ranks)
        first = min(rank * rows, tensor.shape[0])
        values = tensor[first : first + rows]
        row = tensor[0].numel()
        result.append(
            LocalShard(name=name, shape=tuple(tensor.shape), start=first * row if len(values) else 0, values=values)
        )
    return result


async def publish(
    transport: MemoryTransport, tensors: dict[str, torch.Tensor], *, ranks: int, dtype: torch.dtype, version: int = 1
) -> Manifest:
    reports = [
        await write_shards(transport, shards_of(tensors, rank, ranks), version=version, rank=rank, dtype=dtype)
        for rank in range(ranks)
    ]
    return merge_reports(version, reports)


async def read_back(transport: MemoryTransport, manifest: Manifest) -> dict[str, torch.Tensor]:
    into = {entry.name: torch.full(entry.shape, -77.0).to(getattr(torch, entry.dtype)) for entry in manifest.tensors}
    await read_version(transport, manifest, into.__getitem__)
    return into


SHAPES = [(5, 3), (1,), (7,), (4, 8), (2, 3, 3), (33, 16)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_what_is_written_comes_back(ranks: int, dtype: torch.dtype, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    tensors = random_tensors(SHAPES)

    async def main() -> None:
        transport = MemoryTransport()
        manifest = await publish(transport, tensors, ranks=ranks, dtype=dtype)
        assert set(manifest.buckets) == set(transport.buckets)
        found = await read_back(transport, manifest)
        for entry in manifest.tensors:
            assert torch.equal(found[entry.name], tensors[entry.name].to(dtype))
            assert entry.fingerprint == fingerprint(found[entry.name], entry.shape)

    asyncio.run(main())


@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    bucket_bytes=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_comes_back(shapes: list[tuple[int, ...]], ranks: int, bucket_bytes: int):
    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
            transport = MemoryTransport()
            manifest = await publish(transport, random_tensors(shapes), ranks=ranks, dtype=torch.float32)
        found = await read_back(transport, manifest)
        assert all(torch.equal(found[name], tensor) for name, tensor in random_tensors(shapes).items())

    asyncio.run(main())


def test_a_bucket_is_filled_before_the_next_begins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 128)

    async def main() -> None:
        transport = MemoryTransport()
        # 40, 40, 40 and 400 bytes, each aligned to 64: two fit in 128, the third begins a bucket, the last is too large
        # for any and has one of its own.
        tensors = random_tensors([(10,), (10,), (10,), (100,)])
        manifest = await publish(transport, tensors, ranks=1, dtype=torch.float32)
        places = [(entry.shards[0].bucket, entry.shards[0].offset) for entry in manifest.tensors]
        assert places == [("1/0/0", 0), ("1/0/0", 64), ("1/0/1", 0), ("1/0/2", 0)]
        assert [bucket.numel() for bucket in transport.buckets.values()] == [128, 64, 448]

    asyncio.run(main())


def test_a_rank_without_elements_writes_no_bucket():
    async def main() -> None:
        transport = MemoryTransport()
        tensors = random_tensors([(1, 4)])
        await write_shards(transport, shards_of(tensors, 1, 2), version=1, rank=1, dtype=torch.float32)
        assert transport.buckets == {}

    asyncio.run(main())


def test_a_gradient_does_not_travel():
    async def main() -> None:
        transport = MemoryTransport()
        weight = torch.nn.Parameter(torch.randn(2, 2))
        manifest = await publish(transport, {"w": weight}, ranks=1, dtype=torch.bfloat16)
        found = await read_back(transport, manifest)
        assert torch.equal(found["w"], weight.detach().bfloat16())

    asyncio.run(main())


def test_later_changes_of_the_weights_do_not_reach_a_version():
    async def main() -> None:
        transport = MemoryTransport()
        tensors = random_tensors([(3, 4)])
        before = tensors["w0"].clone()
        manifest = await publish(transport, tensors, ranks=1, dtype=torch.float32)
        tensors["w0"].zero_()
        assert torch.equal((await read_back(transport, manifest))["w0"], before)

    asyncio.run(main())


def test_a_bucket_that_is_cut_short_is_noticed():
    async def main() -> None:
        transport = MemoryTransport()
        manifest = await publish(transport, random_tensors([(3, 4), (5,)]), ranks=1, dtype=torch.float32, version=9)
        transport.buckets["9/0/0"] = transport.buckets["9/0/0"][:70]
        with pytest.raises(WeightsError, match="bucket 9/0/0 of version 9 is cut short at 70 bytes"):
            await read_back(transport, manifest)

    asyncio.run(main())


def test_a_missing_bucket_is_noticed():
    async def main() -> None:
        transport = MemoryTransport()
        manifest = await publish(transport, random_tensors([(3, 4)]), ranks=2, dtype=torch.float32)
        await transport.delete("1/1/0")
        with pytest.raises(WeightsError, match="no bucket 1/1/0"):
            await read_back(transport, manifest)

    asyncio.run(main())


class FailingTransport(MemoryTransport):
    """Fails at the given call."""

    def __init__(self, *, put: int = -1, get: int = -1) -> None:
        super().__init__()
        self.left = {"put": put, "get": get}

    def _count(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] == 0:
            raise WeightsError(f"{what} failed")

    async def put(self, key: str, bucket: torch.Tensor) -> None:
        await asyncio.sleep(0)
        self._count("put")
        await super().put(key, bucket)

    async def get(self, key: str) -> torch.Tensor:
        await asyncio.sleep(0)
        self._count("get")
        return await super().get(key)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_transport_that_fails_at_any_bucket_is_told(at: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    tensors = random_tensors([(3,), (4,), (5,)])
    unseen: list[dict] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        with pytest.raises(WeightsError, match="put failed"):
            await publish(FailingTransport(put=at), tensors, ranks=1, dtype=torch.float32)
        transport = FailingTransport(get=at)
        manifest = await publish(transport, tensors, ranks=1, dtype=torch.float32)
        with pytest.raises(WeightsError, match="get failed"):
            await read_back(transport, manifest)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    gc.collect()
    assert unseen == []
