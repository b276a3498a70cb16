"""Processes measured by benchmarks/weights.py: a writer of versions, and readers with their own parameters."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from monarch.actor import concurrent_endpoint
from monarch.rdma import RDMABuffer

from benchmarks.memory import private_bytes, sampled_peak
from forge_rl.runtime.service import ServiceActor
from forge_rl.weights import kernels
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.line_loops import copied_line, line_loop
from forge_rl.weights.manifest import Manifest, SegmentRef, ShardReport
from forge_rl.weights.segment import create_anonymous, writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard, Transport

Shapes = Sequence[tuple[str, tuple[int, ...]]]


class WriterActor(ServiceActor):
    """A trainer of one rank, without the training."""

    def __init__(self, shapes: Shapes) -> None:
        torch.manual_seed(0)
        self._weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes}
        self._scratch: SegmentRef | None = None

    @concurrent_endpoint
    async def step(self) -> None:
        """Change the weights, as an optimizer step would."""
        for weight in self._weights.values():
            weight.neg_()

    @concurrent_endpoint
    async def write(self, drafted: Manifest, transport: Transport) -> tuple[list[ShardReport], int]:
        """Write the rank's shards; return the reports, and the peak increase of private memory in bytes."""
        shards = [
            LocalShard(name=name, tensor_slice=TensorSlice.whole(weight.shape), values=weight)
            for name, weight in self._weights.items()
        ]
        before = private_bytes()
        with sampled_peak(private_bytes, 0.002) as peak:
            reports = await transport.write(drafted, shards, rank=0)
        return reports, peak[0] - before

    @concurrent_endpoint
    async def memcpy(self, threads: int) -> float:
        """Return the seconds of a plain copy of all weights into shared memory already touched."""
        return self._memcpy(threads)

    @concurrent_endpoint
    async def attestation_s(self, pairs: int) -> list[float]:
        """Return, per pair of runs, the extra seconds of the publish loop, which copies and fingerprints, over the same
        loop without fingerprints."""
        offset, moves = 0, []
        assert self._scratch is not None, "memcpy comes first"
        for weight in self._weights.values():
            target = writable(self._scratch)[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape)
            moves.append(Move(target, weight, tuple(weight.shape), TensorSlice.whole(weight.shape)))
            offset += weight.nbytes
        with _without_fingerprints():
            move(moves[:1])  # compiles it
        seconds = []
        for _ in range(pairs):
            with _without_fingerprints():
                plain_s = _move_s(moves)
            seconds.append(_move_s(moves) - plain_s)
        return seconds

    @concurrent_endpoint
    async def torchstore_put(self, transport: Any, prefix: str) -> None:
        """Put with plain torchstore: one call per tensor."""
        client = _torchstore(transport)
        for name, weight in self._weights.items():
            await client.put(f"{prefix}{name}", weight)

    @concurrent_endpoint
    async def torchstore_delete(self, transport: Any, prefix: str) -> None:
        """Delete the stored tensors."""
        client = _torchstore(transport)
        for name in self._weights:
            await client.delete(f"{prefix}{name}")

    @concurrent_endpoint
    async def rdma_buffers(self, bytes_each: int) -> list[Any]:
        """Return RDMABuffers over plain memory, as large as all weights together."""
        self._plain = torch.cat([weight.view(-1).view(torch.uint8) for weight in self._weights.values()])
        return [RDMABuffer(part) for part in self._plain.split(bytes_each)]

    def _memcpy(self, threads: int) -> float:
        size = sum(weight.nbytes for weight in self._weights.values())
        if self._scratch is None:
            self._scratch, _ = create_anonymous(size)
            # Touched first, as the first write to fresh shared memory is slow.
            writable(self._scratch).zero_()
            self._flat = torch.cat([weight.view(-1).view(torch.uint8) for weight in self._weights.values()])
        target, source, part = writable(self._scratch).data_ptr(), self._flat.data_ptr(), -(-size // threads)

        def copy(thread: int) -> None:
            offset = thread * part
            ctypes.memmove(target + offset, source + offset, min(part, size - offset))

        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(copy, range(threads)))
            return time.perf_counter() - began


def _move_s(moves: Sequence[Move]) -> float:
    began = time.perf_counter()
    move(moves)
    return time.perf_counter() - began


@functools.cache
def _plain_copy_rows() -> Callable[..., Any]:
    """`kernels.copy_rows` with a loop that only copies."""
    scope = kernels.__dict__ | {
        "copy_lines": line_loop(copied_line, sums=False),
        "_copy_words": numba.njit(nogil=True)(_copy_words),
    }
    copy_rows: Callable[..., Any] = numba.njit(nogil=True)(
        # The very code of `copy_rows`, with names that resolve to loops which only copy.
        types.FunctionType(kernels.copy_rows.py_func.__code__, scope)
    )
    return copy_rows


def _copy_words(target: Any, source: Any, first: int) -> np.uint64:
    for item in range(source.size):
        target[item] = source[item]
    return np.uint64(0)


@contextlib.contextmanager
def _without_fingerprints() -> Iterator[None]:
    """Have the body's `move` copy alone."""
    copy_rows = kernels.copy_rows
    kernels.copy_rows = _plain_copy_rows()
    try:
        yield
    finally:
        kernels.copy_rows = copy_rows


class ReaderActor(ServiceActor):
    """An engine that only loads."""

    def __init__(self, shapes: Shapes) -> None:
        self._weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: Transport) -> tuple[dict[str, int], int]:
        """Return fingerprints of the loaded weights, and the peak increase of private memory in bytes."""
        fingerprints: dict[str, int] = {}
        before = private_bytes()
        with sampled_peak(private_bytes, 0.002) as peak:
            async for bucket in transport.fetch(manifest):
                with bucket.open() as tensors:
                    moves = [
                        Move(self._weights[e.name], tensors[e.name], e.shape, TensorSlice.whole(e.shape))
                        for e in bucket.entries
                    ]
                    values = await asyncio.to_thread(move, moves)
                    del moves
                fingerprints |= {entry.name: value for entry, value in zip(bucket.entries, values, strict=True)}
        return fingerprints, peak[0] - before

    @concurrent_endpoint
    async def torchstore_get(self, transport: Any, prefix: str) -> None:
        """Get with plain torchstore: one call per tensor."""
        client = _torchstore(transport)
        for name, weight in self._weights.items():
            weight.copy_(await client.get(f"{prefix}{name}"))

    @concurrent_endpoint
    async def rdma_read(self, buffers: list[Any], sizes: list[int]) -> float:
        """Return the seconds to read RDMABuffers into plain memory, one after the other."""
        if not hasattr(self, "_plain"):
            self._plain = torch.zeros(sum(sizes), dtype=torch.uint8)
        began = time.perf_counter()
        for buffer, part in zip(buffers, self._plain.split(sizes), strict=True):
            await buffer.read_into(part)
        return time.perf_counter() - began


def _torchstore(transport: Any) -> Any:
    """Return torchstore's own client."""
    from torchstore.client import LocalClient

    return LocalClient(controller=transport._controller, strategy=transport._strategy)
