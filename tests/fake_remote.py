"""A host's weights on a real process, as far as other hosts are concerned: shares buckets, and pulls them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from monarch.actor import concurrent_endpoint
from monarch.rdma import RDMABuffer, get_rdma_backend

from forge_rl.errors import WeightsError
from forge_rl.runtime.service import ServiceActor
from forge_rl.weights.fanout import Fanout
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Bucket, Manifest, SegmentRef, ShardReport, TensorSpec, complete, draft, is_of
from forge_rl.weights.segment import readable, writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.remote import Puller, SegmentBuffers
from forge_rl.weights.volume import Volume
from tests.fake_host import bytes_of


class RemoteActor(ServiceActor):
    """A volume that writes versions itself, and that can be told to go wrong."""

    def __init__(self, host: str, root: Path) -> None:
        self._host = host
        self._root = root
        self._shared = SegmentBuffers()
        self._fanout = Fanout(3)
        self._refusals = 0
        self._shares: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._gates: dict[str, asyncio.Event] = {}

    @concurrent_endpoint
    async def open(self, others: Mapping[str, Any]) -> None:
        self.volume = Volume(self._root)
        self.puller = Puller(self._host, self.volume, _Peers(self, others))

    @concurrent_endpoint
    async def close(self) -> None:
        await self.puller.close()
        self.volume.close()

    @concurrent_endpoint
    async def publish(self, specs: Sequence[TensorSpec], version: int, bucket: int, base: Manifest | None) -> Manifest:
        """Random weights, as a trainer of one rank writes them."""
        drafted = draft(specs, version=version, dtype=torch.bfloat16, base=base, bucket_bytes=bucket)
        refs = self.volume.reserve({bucket.key: bucket.bytes for bucket in drafted.written})
        drafted = replace(
            drafted,
            buckets=tuple(
                replace(b, host=self._host, segment=refs[b.key]) if b.key in refs else b for b in drafted.buckets
            ),
        )
        reports = []
        torch.manual_seed(version)
        for entry in drafted.tensors:
            if is_of(entry.bucket, version):
                values = entry.of(writable(refs[entry.bucket]))
                values.view(-1).view(torch.uint8).random_(0, 256)
                tensor_slice = TensorSlice.whole(entry.shape)
                reports.append(
                    ShardReport(
                        name=entry.name, tensor_slice=tensor_slice, fingerprint=fingerprint(values, entry.shape)
                    )
                )
        return complete(drafted, [reports])

    @concurrent_endpoint
    async def tamper(self, manifest: Manifest, name: str) -> None:
        """Change one bit of a published tensor."""
        entry = next(entry for entry in manifest.tensors if entry.name == name)
        ref = self.volume.find(entry.bucket)
        assert ref is not None
        entry.of(writable(ref)).view(-1).view(torch.uint8)[-1] ^= 1

    @concurrent_endpoint
    async def refuse(self, times: int) -> None:
        """Do not share, the next few times."""
        self._refusals = times

    @concurrent_endpoint
    async def share(self, key: str) -> RDMABuffer:
        self._shares[key] += 1
        if self._refusals:
            self._refusals -= 1
            raise RuntimeError("staged: nothing is shared")
        ref = await self.puller.bucket(key) if self.puller.knows(key) else self.volume.find(key)
        assert ref is not None
        return (await self._shared.buffers([ref]))[0]

    @concurrent_endpoint
    async def join(self, host: str, buckets: Sequence[Bucket], failed: Collection[str]) -> dict[str, str]:
        return self._fanout.join(host, buckets, failed=failed)

    @concurrent_endpoint
    async def never(self) -> None:
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def hold(self, key: str) -> None:
        """Let no read of this bucket begin until `let_go`."""
        self._gates[key] = asyncio.Event()

    @concurrent_endpoint
    async def let_go(self, key: str) -> None:
        self._gates[key].set()

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> None:
        self.puller.pull(manifest)

    @concurrent_endpoint
    async def local(self, key: str) -> SegmentRef:
        return await self.puller.bucket(key)

    @concurrent_endpoint
    async def impatient(self, key: str, seconds: float) -> bool:
        """Tells whether a reader that waits only so long gets the bucket."""
        try:
            await asyncio.wait_for(self.puller.bucket(key), seconds)
        except TimeoutError:
            return False
        return True

    @concurrent_endpoint
    async def digest(self, ref: SegmentRef) -> str:
        return sha256(readable(ref).numpy().tobytes()).hexdigest()

    @concurrent_endpoint
    async def free(self, keys: tuple[str, ...]) -> None:
        self.puller.forget(keys)
        for ref in self.volume.free(keys):
            await self._shared.forget(ref.path)

    @concurrent_endpoint
    async def counts(self) -> tuple[Counter[str], Counter[str], str]:
        """Counts how often each bucket was shared and read from elsewhere, and names Monarch's transport."""
        return self._shares, self._reads, get_rdma_backend()

    @concurrent_endpoint
    async def received(self) -> dict[str, int]:
        return dict(self.puller.received)

    @concurrent_endpoint
    async def held(self) -> tuple[int, list[str]]:
        """Bytes of the volume; files of segments that this process still maps though they are gone."""
        gc.collect()  # errors hold what their frames held
        maps = await asyncio.to_thread(Path("/proc/self/maps").read_text)
        return bytes_of(self.volume), [
            line for line in maps.splitlines() if str(self._root) in line and line.endswith("(deleted)")
        ]

    @concurrent_endpoint
    async def speed(self, manifest: Manifest, others: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds of RDMABuffer alone, one bucket after the other, and of the puller; all from another host."""
        host = manifest.buckets[0].host
        scratch = self.volume.reserve({f"scratch {bucket.key}": bucket.bytes for bucket in manifest.buckets})
        memory = [writable(ref) for ref in scratch.values()]
        buffers = [await others[host].share.call_one(key) for key in manifest.keys]
        began = time.perf_counter()
        for buffer, target in zip(buffers, memory, strict=True):
            await buffer.read_into(target)
        alone = time.perf_counter() - began
        self.volume.free(tuple(scratch))
        began = time.perf_counter()
        self.puller.pull(manifest)
        for key in manifest.keys:
            await self.puller.bucket(key)
        pulled = time.perf_counter() - began
        self.puller.forget(manifest.keys)
        self.volume.free(manifest.keys)
        return alone, pulled


class _Peers:
    """The first host has the index; copies are kept until they are freed."""

    def __init__(self, actor: RemoteActor, others: Mapping[str, Any]) -> None:
        self._actor = actor
        self._others = others

    async def join(self, buckets: Sequence[Bucket], failed: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        first = next(iter(self._others.values()))
        try:
            return await first.join.call_one(self._actor._host, tuple(buckets), tuple(failed)), ()
        except Exception as error:
            raise getattr(error, "exception", WeightsError("the index is gone")) from error

    async def share(self, host: str, bucket: Bucket, moves: int) -> _Counted:
        return _Counted(self._actor, bucket.key, await self._others[host].share.call_one(bucket.key))

    async def watch(self, host: str) -> object:
        return await self._others[host].never.call_one()

    async def drop(self, keys: Collection[str]) -> None:
        assert not keys


class _Counted:
    """An RDMABuffer whose reads are counted, and can be held back."""

    def __init__(self, actor: RemoteActor, key: str, buffer: RDMABuffer) -> None:
        self._actor = actor
        self._key = key
        self._buffer = buffer

    async def read_into(self, memory: torch.Tensor, *, timeout: int) -> None:
        if self._key in self._actor._gates:
            await self._actor._gates[self._key].wait()
        self._actor._reads[self._key] += 1
        await self._buffer.read_into(memory, timeout=timeout)
