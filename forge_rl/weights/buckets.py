"""Between tensors and a transport: shards travel in large buckets of bytes, two in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.fingerprint import fingerprint
from forge_rl.weights.manifest import Manifest, Shard, ShardReport

BUCKET_BYTES = 64 << 20
_ALIGN = 64


class Transport(Protocol):
    """Moves buckets between processes; an instance pickles, and works wherever it lands."""

    async def put(self, key: str, bucket: torch.Tensor) -> None:
        """Store a bucket, `[bytes] uint8`. Keys are written once."""

    async def get(self, key: str) -> torch.Tensor:
        """The stored bucket, `[bytes] uint8`; a WeightsError if it is not there."""

    async def delete(self, key: str) -> None:
        """Free a bucket; nothing happens if it is not there."""

    async def delete_version(self, version: int) -> None:
        """Free all buckets of a version, also those that no manifest names because its publish was given up."""


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """What one trainer rank holds of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Flat index, in the whole tensor, of its first element."""
    values: torch.Tensor
    """A run of whole rows, contiguous, of any dtype; empty where other ranks hold all."""


async def write_shards(
    transport: Transport, shards: Iterable[LocalShard], *, version: int, rank: int, dtype: torch.dtype
) -> list[ShardReport]:
    """Cast one rank's shards and put them, bucket by bucket.

    Args:
        transport: where to put them.
        shards: in the same order on every rank.
        version: the version that they belong to; part of the buckets' keys.
        rank: of this process among the trainer's; part of the buckets' keys.
        dtype: of the published tensors.
    """
    reports: list[ShardReport] = []
    pending: list[tuple[int, torch.Tensor]] = []
    number = used = 0
    putting: asyncio.Task[None] | None = None  # the last bucket travels while the next one is filled

    async def flush() -> None:
        nonlocal number, used, putting
        if pending:
            bucket = torch.empty(used, dtype=torch.uint8)
            for offset, values in pending:
                bucket[offset : offset + values.numel()].copy_(values)
            if putting is not None:
                await putting
            putting = asyncio.ensure_future(transport.put(f"{version}/{rank}/{number}", bucket))
            await asyncio.sleep(0)  # let it start
            pending.clear()
            number, used = number + 1, 0

    for local in shards:
        values = local.values.detach().to(dtype).contiguous().view(-1)
        if used and used + values.nbytes > BUCKET_BYTES:
            await flush()
        shard = None
        if values.numel():
            shard = Shard(bucket=f"{version}/{rank}/{number}", offset=used, start=local.start, elements=values.numel())
            pending.append((used, values.view(torch.uint8)))
            used += -(-values.nbytes // _ALIGN) * _ALIGN
        reports.append(
            ShardReport(
                name=local.name,
                shape=local.shape,
                dtype=str(dtype).removeprefix("torch."),
                fingerprint=fingerprint(values, local.shape, start=local.start),
                shard=shard,
            )
        )
    await flush()
    if putting is not None:
        await putting
    return reports


async def read_version(transport: Transport, manifest: Manifest, into: Callable[[str], torch.Tensor]) -> None:
    """Get a version's buckets, one after the other, and copy their shards into place.

    Args:
        transport: where the version lies.
        manifest: of the version.
        into: gives each tensor's place by its name, contiguous and of the manifest's shape and dtype.

    Raises:
        WeightsError: a bucket is missing or shorter than the manifest says.
    """
    by_bucket: dict[str, list[tuple[torch.Tensor, Shard]]] = {key: [] for key in manifest.buckets}
    for entry in manifest.tensors:
        flat = into(entry.name).view(-1)
        for shard in entry.shards:
            place = flat[shard.start : shard.start + shard.elements].view(torch.uint8)
            by_bucket[shard.bucket].append((place, shard))
    order = list(by_bucket)
    getting = asyncio.ensure_future(transport.get(order[0]))
    try:
        for number, key in enumerate(order):
            bucket = await getting
            if number + 1 < len(order):  # the next bucket travels while this one is copied
                getting = asyncio.ensure_future(transport.get(order[number + 1]))
                await asyncio.sleep(0)
            for place, shard in by_bucket[key]:
                values = bucket[shard.offset : shard.offset + place.numel()]
                if values.numel() != place.numel():
                    raise WeightsError(
                        f"bucket {key} of version {manifest.version} is cut short at {bucket.numel()} bytes"
                    )
                place.copy_(values)
    finally:
        getting.cancel()
