"""Trainer ranks and readers of weights, as actors: every value follows from the version and the tensor's name."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from monarch.actor import concurrent_endpoint

from forge_rl.runtime.service import ServiceActor
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard, Transport
from forge_rl.weights.transports.torchstore import TorchStoreTransport

RANKS = 4

LAYOUT: dict[str, tuple[tuple[int, ...], tuple[TensorSlice, ...]]] = {
    # Rows, as FSDP cuts them: the last rank has fewer.
    "embed": ((50, 64), tuple(TensorSlice((13 * r, 0), (min(13, 50 - 13 * r), 64)) for r in range(RANKS))),
    # Columns, as TP cuts them.
    "out": ((32, 96), tuple(TensorSlice((0, 24 * r), (32, 24)) for r in range(RANKS))),
    # Experts by EP, their last dim by TP.
    "experts": ((4, 16, 32), tuple(TensorSlice((r // 2 * 2, 0, r % 2 * 16), (2, 16, 16)) for r in range(RANKS))),
    # Larger than a bucket: rows by FSDP, columns by TP.
    "head": ((64, 160), tuple(TensorSlice((r // 2 * 32, r % 2 * 80), (32, 80)) for r in range(RANKS))),
    # Fewer rows than ranks.
    "bias": ((3,), tuple(TensorSlice((r,), (1 if r < 3 else 0,)) for r in range(RANKS))),
    # One rank has it.
    "scale": ((), (TensorSlice((), ()),)),
}
"""Shape of each tensor, and which slice which rank holds."""

BUCKET_BYTES = 16 << 10


def specs(unchanged: Collection[str] = ()) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=shape, changed=name not in unchanged) for name, (shape, _) in LAYOUT.items()]


def values_of(version: int, name: str) -> torch.Tensor:
    """A whole tensor of the trainer's, float32."""
    generator = torch.Generator().manual_seed(version * 65536 + zlib.crc32(name.encode()) % 65536)
    return torch.randn(LAYOUT[name][0], generator=generator)


def shards_of(version: int, rank: int) -> list[LocalShard]:
    return [
        LocalShard(
            name=name, tensor_slice=slices[rank], values=torch.nn.Parameter(slices[rank].of(values_of(version, name)))
        )
        for name, (_, slices) in LAYOUT.items()
        if rank < len(slices)
    ]


async def read(transport: Transport, manifest: Manifest, pause: asyncio.Event | None = None) -> dict[str, torch.Tensor]:
    """All tensors, copied; their fingerprints must be those of the manifest.

    Args:
        transport: of this host.
        manifest: of the version.
        pause: waited for within the first bucket.
    """
    tensors_read = {}
    async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
        async for bucket in buckets:
            if pause is not None:
                await pause.wait()
            with bucket.open() as tensors:
                tensors_read |= {name: tensor.clone() for name, tensor in tensors.items()}
            for entry in bucket.entries:
                assert fingerprint(tensors_read[entry.name], entry.shape) == entry.fingerprint, entry.name
    return tensors_read


def held_by_this_process() -> tuple[int, int]:
    """Open files, and mappings of segments without a name; Monarch opens and renews its connections as it likes."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().count("forge_rl-weights")
    opened = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            opened += not os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "pipe:", "anon_inode:"))
    return opened, mapped


class DyingTransport(TorchStoreTransport):
    """Its process is killed when a part's bytes have arrived, before torchstore's index hears of them."""

    async def _ask(self, method: str, *args: Any) -> Any:
        if method == "put" and isinstance(args[1], torch.Tensor) and args[1].numel() > 1:
            from torchstore.transport import Pipe, Request

            volume, _ = self._strategy.select_storage_volume()  # type: ignore[attr-defined]
            await Pipe(volume).put_to_storage_volume(args[0], Request.from_any(args[1]))
            os.kill(os.getpid(), signal.SIGKILL)
        return await super()._ask(method, *args)


class FakeRank(ServiceActor):
    """A process that writes as any rank, and reads."""

    def __init__(self) -> None:
        self._going_on = asyncio.Event()

    @concurrent_endpoint
    async def write(
        self, transport: Transport, drafted: Manifest, ranks: Sequence[int], version: int | None = None
    ) -> list[list[ShardReport]]:
        """Write as these ranks, the values of the draft's version or of another one."""
        version = drafted.version if version is None else version
        return [await transport.write(drafted, shards_of(version, rank), rank=rank) for rank in ranks]

    @concurrent_endpoint
    async def write_zeros(self, transport: Transport, drafted: Manifest) -> list[ShardReport]:
        """Write all tensors of a draft, whatever they are, as the only rank."""
        shapes = ((entry.name, entry.shape) for entry in drafted.tensors)
        shards = (
            LocalShard(name=name, tensor_slice=TensorSlice.whole(shape), values=torch.zeros(shape))
            for name, shape in shapes
        )
        return await transport.write(drafted, shards, rank=0)

    @concurrent_endpoint
    async def read(self, transport: Transport, manifest: Manifest) -> dict[str, torch.Tensor]:
        return await read(transport, manifest)

    @concurrent_endpoint
    async def read_one_bucket(self, transport: Transport, manifest: Manifest) -> int:
        """Give up after the first bucket; returns how many tensors it held."""
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            async for bucket in buckets:
                with bucket.open() as tensors:
                    assert all(tensor.numel() for tensor in tensors.values())
                return len(bucket.entries)
        raise AssertionError("there was no bucket")

    @concurrent_endpoint
    async def read_slowly(self, transport: Transport, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Stop within the first bucket until `go_on`."""
        tensors = await read(transport, manifest, self._going_on)
        self._going_on.clear()
        return tensors

    @concurrent_endpoint
    async def go_on(self) -> None:
        self._going_on.set()

    @concurrent_endpoint
    async def held(self) -> tuple[int, int]:
        return held_by_this_process()
