"""Sizes of a real trainer's versions, written as the elements that changed. Part of `hosts`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.long_row import row_of
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.factory import make_train_engine
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainEngine, TrainSettings
from forge_rl.packing.rows import Minibatch
from forge_rl.weights.deltas import DeltaPublisher, DeltaSubscriber
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Manifest, ShardReport, TensorEntry, complete, draft
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard, to_write

_TOKENS = 256


@dataclass(frozen=True)
class _Bucket:
    entries: tuple[TensorEntry, ...]
    tensors: Mapping[str, torch.Tensor]

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        yield self.tensors


class LocalTransport:
    """Holds the last version of one rank in its own memory: a `Transport`, bucket by bucket."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    async def reserve(self, drafted: Manifest) -> Manifest:
        return drafted

    async def write(self, drafted: Manifest, shards: Iterable[LocalShard], *, rank: int) -> list[ShardReport]:
        placed = list(to_write(drafted, shards))
        self._tensors = {entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype) for entry, _ in placed}
        full_slices = {entry.name: TensorSlice.whole(entry.shape) for entry, _ in placed}
        moves = [
            Move(self._tensors[entry.name], shard.values.detach(), entry.shape, full_slices[entry.name])
            for entry, shard in placed
        ]
        return [
            ShardReport(name=entry.name, tensor_slice=full_slices[entry.name], fingerprint=value)
            for (entry, _), value in zip(placed, move(moves), strict=True)
        ]

    async def prefetch(self, manifest: Manifest) -> None:
        pass

    async def fetch(self, manifest: Manifest) -> AsyncGenerator[_Bucket, None]:
        for entries in manifest.entries.values():
            yield _Bucket(entries, self._tensors)

    async def free(self, keys: Collection[str]) -> None:
        pass


def delta_bytes(rank: int, model: Path, address: str, lr: float, updates: int) -> tuple[int, int, list[int]]:
    """Publish a trainer's weights to an address before and after each of its updates, and read them back.

    Args:
        rank: rank of this process, the only one of its group.
        model: folder of the model to train, with float32 weights that are published in bfloat16.
        address: a folder in any of fsspec's file systems.

    Returns:
        Bytes of a version, of the first one as written, and of each change.
    """
    torch.manual_seed(0)
    engine = make_train_engine(model, TrainSettings(dtype="float32", seq_len=_TOKENS, optimizer=OptimizerConfig(lr=lr)))
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    transport, sizes = LocalTransport(), []
    publisher, subscriber = DeltaPublisher(address), DeltaSubscriber(address)
    manifest = _version(engine, transport, 0)
    for number in range(updates + 1):
        if number:
            row = row_of(_TOKENS, vocab)
            minibatch = Minibatch(rows=(row,), tokens=len(row), sequences=1)
            (metrics,) = engine.train_batch(
                [minibatch], StepRequest(loss=ClippedSurrogate(), total_updates=updates)
            ).metrics
            assert metrics, "the update was skipped"
            manifest = _version(engine, transport, number)
        sizes.append(asyncio.run(publisher.publish(manifest, transport)))
        assert subscriber.update(), "a version is missing"
        for name, tensor in subscriber.tensors.items():
            assert torch.equal(tensor.view(torch.int16), transport._tensors[name].view(torch.int16)), name
    return manifest.bytes, sizes[0], sizes[1:]


def _version(engine: TrainEngine, transport: LocalTransport, version: int) -> Manifest:
    drafted = draft(engine.specs(), version=version, dtype=torch.bfloat16)
    return complete(drafted, [asyncio.run(transport.write(drafted, engine.local_shards(), rank=0))])
