"""Pulls weights from other hosts: each bucket is copied once, by RDMA, from a host that has it to this host's segments.

Hosts serve checked buckets on, so most hosts copy from one another; see fanout.py. Monarch uses ibverbs if the hardware
has it, else TCP. A transfer cannot be stopped: an abandoned one runs to its end, under the lock that keeps its segment
from being reused (volume.writing).
"""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

from forge_rl.errors import ForgeError, WeightsError
from forge_rl.system.tasks import TaskGroup
from forge_rl.weights.manifest import Bucket, Manifest, SegmentRef
from forge_rl.weights.segment import writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.volume import Volume, writing

if TYPE_CHECKING:
    import torch

READS_IN_FLIGHT = 2
"""Concurrent reads of a version: while one bucket is checked, another is transferred."""

_DEADLINE_S = 600.0
_LEAST_RATE = 4 << 20  # bytes/s
_LEAST_TIMEOUT_S = 60

_Arrival = asyncio.Future[SegmentRef]
"""Future of a bucket's segment on this host, done once it is whole and checked."""


def deadline_s(size: int) -> float:
    """Timeout of a call that waits for `size` bytes from other hosts."""
    return _DEADLINE_S + size / _LEAST_RATE


async def ask(actor: Any, method: str, *args: object, actor_name: str, moves: int = 0) -> Any:
    """Call an actor of the store from any process; the timeout allows for the transfer of `moves` bytes.

    Raises:
        ForgeError: raised by the actor.
        WeightsError: the actor raised another error, died or timed out; `actor_name` is its name in the message.
    """
    try:
        async with asyncio.timeout(deadline_s(moves)):
            return await getattr(actor, method).call_one(*args)
    except Exception as error:
        # Monarch wraps an actor's exception; our own errors pass through with their hint, others become a sentence.
        remote = getattr(error, "exception", None)
        if isinstance(remote, ForgeError):
            raise remote from error
        # One line: a remote traceback belongs in the log that the hint names.
        cause = next(iter(str(remote or error).strip().splitlines()), type(error).__name__)
        raise WeightsError(
            f"{actor_name} does not answer to {method}: {cause}", hint="see logs/weights-*.log"
        ) from error


class SegmentBuffers:
    """RDMA buffers over this host's segments. To be used in endpoints of the actor that owns them."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[torch.Tensor, RDMABuffer]] = {}

    async def buffers(self, refs: Sequence[SegmentRef]) -> list[RDMABuffer]:
        """Return RDMA buffers over segments, created once per segment.

        Raises:
            WeightsError: a segment is gone, or was reused.
        """
        for ref in refs:
            memory = writable(ref)  # hardware can only register writable memory
            # Another mapping means another file under this path; the old buffer would send the removed file's bytes.
            if ref.path in self._buffers and self._buffers[ref.path][0] is not memory:
                await self.forget(ref.path)
            if ref.path not in self._buffers:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RDMATcpFallbackWarning)
                    self._buffers[ref.path] = memory, RDMABuffer(memory)
        return [self._buffers[ref.path][1] for ref in refs]

    async def forget(self, path: str) -> None:
        """Drop a freed segment's buffers, which keep its memory even if the file is gone."""
        if path in self._buffers:
            await self._buffers.pop(path)[1].drop()


class Peers(Protocol):
    """A host's connection to the index and to the other hosts."""

    async def join(self, buckets: Sequence[Bucket], failed: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the host to copy each bucket from, by key, and the keys of copies that this host need not keep.

        Args:
            failed: hosts that these buckets could not be copied from.

        Raises:
            WeightsError: no other host has a bucket, or it is not needed any more.
        """

    async def share(self, host: str, bucket: Bucket, moves: int) -> RDMABuffer:
        """Return a host's RDMA buffer over a bucket once it has arrived there, which takes as long as `moves` bytes do.

        Raises:
            WeightsError: the host does not have it, or could not get it.
        """

    async def watch(self, host: str) -> object:
        """Return or raise once a host can no longer be read from."""

    async def drop(self, keys: Collection[str]) -> None:
        """Free copies on this host."""


@dataclass(kw_only=True)
class _Pull:
    """A version on its way to this host."""

    manifest: Manifest
    arrivals: dict[Bucket, _Arrival]
    parents: dict[str, str] = field(default_factory=dict)
    """Host to copy each bucket from, by key."""
    watches: dict[str, asyncio.Future[object]] = field(default_factory=dict)


class Puller:
    """Pulls versions to this host, each bucket once however many wait for it.

    To be used in endpoints of one actor: RDMA needs an actor's context, which tasks inherit.

    Args:
        host: name of this host; its own buckets are not pulled.
        volume: segments of this host.
        peers: the index and the other hosts.
    """

    def __init__(self, host: str, volume: Volume, peers: Peers) -> None:
        self.received: Counter[str] = Counter()
        """Bytes received so far, by the host that sent them."""
        self._host = host
        self._volume = volume
        self._peers = peers
        self._buckets: dict[str, _Arrival] = {}
        self._joining: list[set[str]] = []
        """Keys pulled since each unanswered request to the index, whose answer may be too old for them."""
        self._tasks: set[asyncio.Future[Any]] = set()

    def pull(self, manifest: Manifest) -> None:
        """Start pulling a version's buckets, in the manifest's order, unless present or in flight.

        Failed buckets are retried.
        """
        # An answer of the index that is on its way may call these buckets stale, as it was asked before; `_place` keeps
        # them.
        for new_keys in self._joining:
            new_keys.update(manifest.keys)
        arrivals: dict[Bucket, _Arrival] = {}
        for bucket in manifest.buckets:
            old_arrival = self._buckets.get(bucket.key)
            has_failed = old_arrival is not None and old_arrival.done() and old_arrival.exception() is not None
            if bucket.host != self._host and (old_arrival is None or has_failed):
                arrival = self._buckets[bucket.key] = asyncio.get_running_loop().create_future()
                # Prefetched buckets may have nobody who waits for them.
                arrival.add_done_callback(_retrieve)
                arrivals[bucket] = arrival
        if arrivals:
            self._keep(asyncio.create_task(self._run(_Pull(manifest=manifest, arrivals=arrivals))))

    def knows(self, key: str) -> bool:
        """True if the bucket was pulled, or is on its way."""
        return key in self._buckets

    @property
    def known(self) -> tuple[str, ...]:
        """Keys of the buckets that were pulled, or are on their way."""
        return tuple(self._buckets)

    async def bucket(self, key: str) -> SegmentRef:
        """Return a bucket's segment on this host, once complete and checked; call `pull` first.

        Raises:
            AttestationError: the bytes received differ from the published ones; names the tensors.
            WeightsError: no host could send it, this one is out of memory, or the bucket was forgotten.
        """
        if key not in self._buckets:
            raise WeightsError(f"bucket {key} was not pulled to host {self._host!r}", hint="hold a lease while reading")
        # Shielded: several engines wait for one arrival, and a cancelled one must not end it for the others.
        return await asyncio.shield(self._buckets[key])

    def forget(self, keys: Collection[str]) -> None:
        """Forget buckets that are about to be freed, abandoning transfers in flight."""
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

    async def _run(self, pull: _Pull) -> None:
        """Pull buckets, several at a time; a bucket that no host can send fails the rest."""
        reserved: Mapping[str, SegmentRef] = {}
        try:
            pull.parents = await self._place(tuple(pull.arrivals), ())
            pending = {bucket: arrival for bucket, arrival in pull.arrivals.items() if not arrival.done()}
            # All segments at once, so that a host without room fails before anything is transferred.
            reserved = self._volume.reserve({bucket.key: bucket.bytes for bucket in pending})
            # One iterator for all readers: each takes the next bucket when it is done with its last.
            queue = zip(pending.items(), reserved.values(), strict=True)
            async with TaskGroup() as readers:
                for _ in range(READS_IN_FLIGHT):
                    readers.create_task(self._receive_all(pull, queue))
        except Exception as error:
            cause = _as_weights_error(error, pull.manifest.version, "")
            unfinished = {bucket.key: arrival for bucket, arrival in pull.arrivals.items() if not arrival.done()}
            for arrival in unfinished.values():
                arrival.set_exception(cause)
            self._volume.free(unfinished.keys() & reserved.keys())
        finally:
            for watch in pull.watches.values():
                watch.cancel()

    async def _place(self, buckets: Sequence[Bucket], failed: Collection[str]) -> dict[str, str]:
        """Ask the index where to copy buckets from, and free unneeded copies."""
        new_keys: set[str] = set()
        self._joining.append(new_keys)
        try:
            parents, stale = await self._peers.join(buckets, failed)
        finally:
            self._joining.remove(new_keys)
        await self._peers.drop(tuple(key for key in stale if key not in new_keys))
        return parents

    async def _receive_all(self, pull: _Pull, queue: Iterator[tuple[tuple[Bucket, _Arrival], SegmentRef]]) -> None:
        for (bucket, arrival), ref in queue:
            if not arrival.done():
                await self._receive(pull, bucket, arrival, ref)

    async def _receive(self, pull: _Pull, bucket: Bucket, arrival: _Arrival, ref: SegmentRef) -> None:
        """Copy a bucket from its parent or, if that fails, from the next host that the index names."""
        failed_hosts: list[str] = []
        while True:
            parent = pull.parents[bucket.key]
            try:
                await self._while_it_lives(pull, parent, self._copy(pull.manifest, bucket, arrival, ref, parent))
                break
            except Exception as error:
                if arrival.done():  # it was forgotten, and its segment was freed
                    break
                cause = _as_weights_error(error, pull.manifest.version, parent)
                failed_hosts.append(parent)
            try:
                rest = [
                    other
                    for other, other_arrival in pull.arrivals.items()
                    if not other_arrival.done() and pull.parents[other.key] == parent and other.host == bucket.host
                ]
                pull.parents |= await self._place(rest, failed_hosts)
                if arrival.done():
                    break
                self._volume.free((bucket.key,))  # the failed transfer may still write into it
                ref = self._volume.reserve({bucket.key: bucket.bytes})[bucket.key]
            except WeightsError:
                raise cause from None
            print(f"{cause.message}; it is pulled from host {pull.parents[bucket.key]!r} instead", flush=True)
        if not arrival.done():
            arrival.set_result(ref)

    async def _copy(self, manifest: Manifest, bucket: Bucket, arrival: _Arrival, ref: SegmentRef, parent: str) -> None:
        # Waits until the parent itself has the bucket.
        source = await self._peers.share(parent, bucket, manifest.bytes)
        read_task = asyncio.ensure_future(_read(source, ref))
        self._keep(read_task)
        # A read that is abandoned still writes into the segment; it runs to its end, under the lock it holds.
        memory = await asyncio.shield(read_task)
        self.received[parent] += bucket.bytes
        if not arrival.done():
            # Checked before it is served on, so that one host's bad bytes cannot spread down the tree.
            await asyncio.to_thread(_check, manifest, bucket, memory, parent)
            writable(ref)

    async def _while_it_lives(self, pull: _Pull, host: str, work: Coroutine[Any, Any, None]) -> None:
        if host not in pull.watches:
            pull.watches[host] = asyncio.ensure_future(self._peers.watch(host))
            pull.watches[host].add_done_callback(_retrieve)
        watch, task = pull.watches[host], asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            # The watch ended first: a dead host's transfer would only end at its timeout.
            if not task.done():
                watch.result()
                raise WeightsError(f"host {host!r} is gone", hint="start the run again")
            task.result()
        finally:
            task.cancel()
            task.add_done_callback(_retrieve)

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
    values = move([Move(None, entry.of(memory), entry.shape, TensorSlice.whole(entry.shape)) for entry in entries])
    fingerprints = {entry.name: value for entry, value in zip(entries, values, strict=True)}
    replace(manifest, tensors=entries).attest(fingerprints, f"bucket {bucket.key} from host {origin!r}")


def _as_weights_error(error: Exception, version: int, origin: str) -> WeightsError:
    # Task groups wrap the readers' errors; the first one is the cause.
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "exception", None) or error  # the exception inside an actor's error
    if isinstance(cause, WeightsError):
        return cause
    message = (str(cause).strip() or type(error).__name__).splitlines()[-1].strip()
    return WeightsError(
        f"version {version} cannot be pulled{origin and f' from host {origin!r}'}: {message}",
        hint="see logs/weights-*.log of both hosts",
    )


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's error, so that asyncio prints nothing if nobody waited for it."""
    if not future.cancelled():
        future.exception()
