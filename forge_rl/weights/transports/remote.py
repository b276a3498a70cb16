"""Weights from another host: each bucket is copied once, by RDMA, from its segments to this host's.

Monarch uses ibverbs if the hardware has it, else TCP. A transfer cannot be stopped: an abandoned one runs to its end,
under the lock that keeps its segment from being reused (volume.writing).
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

from forge_rl.errors import ForgeError, WeightsError
from forge_rl.weights.manifest import Bucket, Manifest, SegmentRef
from forge_rl.weights.segment import writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.volume import Volume, writing

if TYPE_CHECKING:
    import torch

READS_IN_FLIGHT = 2
"""Concurrent reads from one host, so that one bucket transfers while another is checked."""

_DEADLINE_S = 600.0
_LEAST_RATE = 4 << 20  # bytes/s
_LEAST_TIMEOUT_S = 60

_Arrival = asyncio.Future[SegmentRef]
"""Segment of a bucket on this host, once it is whole and checked."""


async def ask(actor: Any, method: str, *args: object, what: str) -> Any:
    """Call an actor of the store from any process.

    Raises:
        ForgeError: raised by the actor.
        WeightsError: the actor raised another error, died or timed out; calls it `what`.
    """
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await getattr(actor, method).call_one(*args)
    except Exception as error:
        remote = getattr(error, "exception", None)
        if isinstance(remote, ForgeError):
            raise remote from error
        cause = next(iter(str(remote or error).strip().splitlines()), type(error).__name__)
        raise WeightsError(f"{what} does not answer to {method}: {cause}", hint="see logs/weights-*.log") from error


class Shared:
    """RDMA buffers over this host's segments. Used in endpoints of the actor that owns them."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[torch.Tensor, RDMABuffer]] = {}

    async def buffers(self, refs: Sequence[SegmentRef]) -> list[RDMABuffer]:
        """Return RDMA buffers over segments, created once per segment.

        Raises:
            WeightsError: a segment is gone, or was reused.
        """
        for ref in refs:
            memory = writable(ref)  # hardware can only register writable memory
            if ref.path in self._held and self._held[ref.path][0] is not memory:
                await self.forget(ref.path)
            if ref.path not in self._held:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RDMATcpFallbackWarning)
                    self._held[ref.path] = memory, RDMABuffer(memory)
        return [self._held[ref.path][1] for ref in refs]

    async def forget(self, path: str) -> None:
        """Drop a freed segment's buffers, which keep its memory even if the file is gone."""
        if path in self._held:
            await self._held.pop(path)[1].drop()


class Puller:
    """Pulls versions to this host, each bucket once however many wait for it.

    Used in endpoints of one actor: RDMA needs an actor's context, which tasks inherit.

    Args:
        host: name of this host; its own buckets are not pulled.
        volume: segments of this host.
        share: asks `(host, keys)` for that host's RDMA buffers of these buckets.
        watch: waits, given a host, as long as it can be read from; may raise.
    """

    def __init__(
        self,
        host: str,
        volume: Volume,
        *,
        share: Callable[[str, tuple[str, ...]], Awaitable[Sequence[RDMABuffer]]],
        watch: Callable[[str], Awaitable[object]],
    ) -> None:
        self._host = host
        self._volume = volume
        self._share = share
        self._watch = watch
        self._buckets: dict[str, _Arrival] = {}
        self._tasks: set[asyncio.Future[Any]] = set()

    def pull(self, manifest: Manifest) -> None:
        """Start pulling a version's buckets, in the manifest's order, unless present or in flight.

        Failed buckets are retried.
        """
        missing: dict[str, dict[Bucket, _Arrival]] = {}
        for bucket in manifest.buckets:
            before = self._buckets.get(bucket.key)
            has_failed = before is not None and before.done() and before.exception() is not None
            if bucket.host != self._host and (before is None or has_failed):
                arrival = self._buckets[bucket.key] = asyncio.get_running_loop().create_future()
                arrival.add_done_callback(_retrieve)
                missing.setdefault(bucket.host, {})[bucket] = arrival
        for origin, arrivals in missing.items():
            self._keep(asyncio.create_task(self._pull(manifest, origin, arrivals)))

    async def bucket(self, key: str) -> SegmentRef:
        """Return a bucket's segment on this host, once complete and checked; call `pull` first.

        Raises:
            AttestationError: the bytes received differ from the published ones; names the tensors.
            WeightsError: the other host died, this one is out of memory, or the bucket was forgotten.
        """
        if key not in self._buckets:
            raise WeightsError(f"bucket {key} was not pulled to host {self._host!r}", hint="hold a lease while reading")
        return await asyncio.shield(self._buckets[key])

    def forget(self, keys: Collection[str]) -> None:
        """Drop buckets that are about to be freed, abandoning those in flight."""
        for key in keys:
            future = self._buckets.pop(key, None)
            if future is not None and not future.done():
                future.set_exception(
                    WeightsError(f"bucket {key} was freed on its way", hint="hold a lease while reading")
                )

    async def close(self) -> None:
        """Abandon all transfers in flight."""
        self.forget(tuple(self._buckets))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pull(self, manifest: Manifest, origin: str, arrivals: Mapping[Bucket, _Arrival]) -> None:
        """Pull buckets from one host, several at a time; the first failure ends all."""
        reserved: Mapping[str, SegmentRef] = {}
        try:
            reserved = self._volume.reserve({bucket.key: bucket.bytes for bucket in arrivals})
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_host(origin))
                buffers = await self._share(origin, tuple(bucket.key for bucket in arrivals))
                queue = zip(arrivals.keys(), arrivals.values(), reserved.values(), buffers, strict=True)
                async with asyncio.TaskGroup() as readers:
                    for _ in range(READS_IN_FLIGHT):
                        readers.create_task(self._read_all(queue, manifest, origin))
                watching.cancel()
        except Exception as error:
            cause = _as_weights_error(error, manifest.version, origin)
            failed = {bucket.key: arrival for bucket, arrival in arrivals.items() if not arrival.done()}
            for arrival in failed.values():
                arrival.set_exception(cause)
            self._volume.free(failed.keys() & reserved.keys())

    async def _watch_host(self, origin: str) -> None:
        await self._watch(origin)
        raise WeightsError(f"host {origin!r} is gone", hint="start the run again")

    async def _read_all(
        self, queue: Iterator[tuple[Bucket, _Arrival, SegmentRef, RDMABuffer]], manifest: Manifest, origin: str
    ) -> None:
        for bucket, arrival, ref, source in queue:
            try:
                if not arrival.done():
                    read = asyncio.ensure_future(_read(source, ref))
                    self._keep(read)
                    memory = await asyncio.shield(read)
                if not arrival.done():
                    await asyncio.to_thread(_check, manifest, bucket, memory, origin)
                    writable(ref)
            except WeightsError:
                if not arrival.done():  # else it was forgotten, and its segment was freed
                    raise
            if not arrival.done():
                arrival.set_result(ref)

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)


async def _read(source: RDMABuffer, ref: SegmentRef) -> torch.Tensor:
    with writing(Path(ref.path).parent):
        memory = await asyncio.to_thread(writable, ref)  # checks that it was not reused
        await source.read_into(memory, timeout=_LEAST_TIMEOUT_S + ref.bytes // _LEAST_RATE)
    return memory


def _check(manifest: Manifest, bucket: Bucket, memory: torch.Tensor, origin: str) -> None:
    from forge_rl.weights.fingerprints import Move, move  # with torch, which a volume that pulls nothing does not need

    entries = manifest.entries[bucket.key]
    found = move([Move(None, entry.of(memory), entry.shape, TensorSlice.whole(entry.shape)) for entry in entries])
    fingerprints = {entry.name: value for entry, value in zip(entries, found, strict=True)}
    replace(manifest, tensors=entries).attest(fingerprints, f"bucket {bucket.key} from host {origin!r}")


def _as_weights_error(error: Exception, version: int, origin: str) -> WeightsError:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "exception", None) or error  # of an actor's error, what it raised
    if isinstance(cause, WeightsError):
        return cause
    said = (str(cause).strip() or type(error).__name__).splitlines()[-1].strip()
    return WeightsError(
        f"version {version} cannot be pulled from host {origin!r}: {said}", hint="see logs/weights-*.log of both hosts"
    )


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve an error that nobody may have waited for, so that asyncio prints nothing."""
    if not future.cancelled():
        future.exception()
