"""The torchstore transport: buckets are stored in a torchstore volume in its own process.

torchstore is optional, and only imported when a store is opened.

Each rank writes its part of a bucket under a key with a random suffix, so that late writes of an abandoned publish are
never mistaken for a later one's. The bucket's own key marks it as wanted: a rank that finds it gone after storing a
part deletes the part.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any, cast

import torch

from forge_rl.errors import WeightsError
from forge_rl.system.memory import available_bytes
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Bucket, Manifest, Piece, SegmentRef, ShardReport, TensorEntry
from forge_rl.weights.segment import SegmentBucket, create_anonymous, release, writable
from forge_rl.weights.transports.protocol import LocalShard, to_write

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

INSTALL = "install it by: pip install 'forge_rl[torchstore]'"

_ALIGN = 64
_DEADLINE_S = 600.0
_MORE_ROOM = "free memory, or lower --weights.keep-versions or --weights.bucket-mib"


class TorchStoreTransport:
    """Client of one torchstore: a `Transport`. It can be pickled, as it holds only actor handles."""

    imports = ("torchstore",)
    """Modules that the store's process must import before it starts actors, which share it."""

    def __init__(self, controller: object, strategy: object) -> None:
        self._controller = controller
        self._strategy = strategy

    @staticmethod
    def is_installed() -> bool:
        """True if torchstore can be imported."""
        return importlib.util.find_spec("torchstore") is not None

    @staticmethod
    async def open(mesh: ProcMesh) -> TorchStoreTransport:
        """Spawn a store on a process mesh; it lives as long as the mesh.

        Its controller is a separate actor on that mesh. torchstore's singleton lives in the client's process, and after
        a crash every later look-up fails.
        """
        from torchstore.storage_volume import StorageVolume
        from torchstore.strategy import SingletonStrategy

        from forge_rl.weights.transports.torchstore_controller import AsyncController

        strategy = SingletonStrategy()
        volumes = await StorageVolume.spawn(num_volumes=1, mesh=mesh, id_func=strategy.get_volume_id)
        controller = mesh.spawn("torchstore_controller", AsyncController)
        await controller.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=volumes)
        return TorchStoreTransport(controller, await controller.get_controller_strategy.call_one())

    async def reserve(self, drafted: Manifest) -> Manifest:
        """Mark the buckets as wanted if memory allows: torchstore has no limit, and the kernel would kill it."""
        needed_bytes = sum(bucket.bytes for bucket in drafted.written)
        _check_room(f"version {drafted.version} in torchstore", needed_bytes)
        await asyncio.gather(*(self._ask("put", bucket.key, "wanted") for bucket in drafted.written))
        return drafted

    async def write(self, drafted: Manifest, shards: Iterable[LocalShard], *, rank: int) -> list[ShardReport]:
        """Put a rank's part of each bucket. Nothing is in flight when it ends, even by an error.

        Raises:
            WeightsError: the version was abandoned meanwhile.
        """
        writes = ((entry, shard) for entry, shard in to_write(drafted, shards) if shard.tensor_slice.numel)
        reports: list[ShardReport] = []
        upload: asyncio.Task[None] | None = None  # a bucket is sent while the next one is filled
        try:
            for bucket, shards_of in groupby(writes, key=lambda pair: pair[0].bucket):
                part = f"{bucket}/{rank}-{secrets.token_hex(8)}"
                buffer, part_reports = await asyncio.to_thread(_pack, part, list(shards_of))
                reports += part_reports
                if upload is not None:
                    # Shielded, and awaited in `finally`: a put cannot be cancelled halfway without leaving a part that
                    # nobody deletes.
                    await asyncio.shield(upload)
                upload = asyncio.create_task(self._put(bucket, part, buffer))
            if upload is not None:
                await asyncio.shield(upload)
        finally:
            if upload is not None:
                await asyncio.gather(upload, return_exceptions=True)
        return reports

    async def prefetch(self, manifest: Manifest) -> None:
        """Do nothing: torchstore keeps no copies on other hosts."""

    async def fetch(self, manifest: Manifest) -> AsyncGenerator[SegmentBucket, None]:
        """Yield buckets one by one. At most two are in memory: the one being read, and the next one in flight."""
        bucket_entries = list(zip(manifest.buckets, manifest.entries.values(), strict=True))
        download: asyncio.Task[dict[str, torch.Tensor]] | None = None
        try:
            for (bucket, entries), next_pair in zip_longest(bucket_entries, bucket_entries[1:]):
                with _anonymous(bucket) as segment:
                    download = download or asyncio.create_task(self._get_parts(entries))
                    await _to_its_end(_unpack, await download, segment, entries)
                    # Fetch the next bucket while the caller loads this one.
                    download = asyncio.create_task(self._get_parts(next_pair[1])) if next_pair else None
                    yield SegmentBucket(segment=segment, entries=entries)
        finally:
            if download is not None:
                download.cancel()
                await asyncio.gather(download, return_exceptions=True)

    async def free(self, keys: Collection[str]) -> None:
        """Delete buckets with all their parts, including parts of abandoned publishes, which no manifest names."""
        await asyncio.gather(*(self._delete(key) for key in keys))
        # Parts are listed after the markers are gone, so a put in progress finds its marker missing and deletes its
        # part itself.
        bucket_keys = set(keys)
        parts = [key for key in await self._ask("keys") if key.rpartition("/")[0] in bucket_keys]
        await asyncio.gather(*(self._delete(part) for part in parts))

    async def _put(self, bucket: str, part: str, buffer: torch.Tensor) -> None:
        # Put one byte first: the part is then listed, and can be freed if this process dies during the transfer.
        await self._ask("put", part, buffer[:1].clone())
        await self._ask("put", part, buffer)
        # `free` deletes the marker before it lists the parts: whichever of the two comes last deletes this part.
        if not await self._ask("exists", bucket):
            await self._delete(part)
            raise WeightsError(f"bucket {bucket} was freed while it was written: its version was given up")

    async def _get_parts(self, entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
        keys = dict.fromkeys(piece.part for entry in entries for piece in entry.pieces)
        return {key: await self._get(key) for key in keys}

    async def _get(self, part: str) -> torch.Tensor:
        try:
            return cast(torch.Tensor, await self._ask("get", part))
        except KeyError as error:
            raise WeightsError(f"torchstore holds no {part}", hint="hold a lease while reading") from error

    async def _delete(self, key: str) -> None:
        with contextlib.suppress(KeyError):
            await self._ask("delete", key)

    async def _ask(self, method: str, *args: object) -> Any:
        """Call torchstore's client.

        Raises:
            KeyError: torchstore does not hold the key.
            WeightsError: it does not answer.
        """
        from torchstore.client import LocalClient

        client = LocalClient(controller=self._controller, strategy=self._strategy)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await getattr(client, method)(*args)
        except Exception as error:
            if _is_missing(error):
                raise KeyError(*args[:1]) from error
            raise WeightsError(
                f"torchstore does not answer to {method}: {_cause_of(error)}", hint="see logs/weights-*.log"
            ) from error


def _pack(part: str, writes: Sequence[tuple[TensorEntry, LocalShard]]) -> tuple[torch.Tensor, list[ShardReport]]:
    """Cast and fingerprint a rank's slices of one bucket into one buffer, `[bytes] uint8`."""
    # Slices lie one after the other, each aligned so that it can be viewed as its dtype.
    places, num_bytes = [], 0
    for entry, shard in writes:
        size = shard.tensor_slice.numel * entry.torch_dtype.itemsize
        places.append(slice(num_bytes, num_bytes + size))
        num_bytes += -(-size // _ALIGN) * _ALIGN
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    moves = []
    for (entry, shard), place in zip(writes, places, strict=True):
        target = buffer[place].view(entry.torch_dtype).view(shard.tensor_slice.size)
        moves.append(Move(target, shard.values.detach(), entry.shape, shard.tensor_slice))
    return buffer, [
        ShardReport(
            name=shard.name,
            tensor_slice=shard.tensor_slice,
            fingerprint=fingerprint,
            piece=Piece(tensor_slice=shard.tensor_slice, part=part, offset=place.start),
        )
        for (_, shard), place, fingerprint in zip(writes, places, move(moves), strict=True)
    ]


def _unpack(parts: Mapping[str, torch.Tensor], segment: SegmentRef, entries: Sequence[TensorEntry]) -> None:
    """Copy the ranks' slices into the bucket; each part is `[bytes] uint8`."""
    bucket = writable(segment)
    for entry in entries:
        for piece in entry.pieces:
            values = parts[piece.part]
            size = piece.tensor_slice.numel * entry.torch_dtype.itemsize
            piece_bytes = values[piece.offset : piece.offset + size]
            # A part whose process died during the transfer may still be the single byte that `_put` stores first.
            if piece_bytes.numel() != size:
                raise WeightsError(f"{piece.part} is cut short at {values.numel()} bytes, within {entry.name!r}")
            piece.tensor_slice.of(entry.of(bucket)).copy_(
                piece_bytes.view(entry.torch_dtype).view(piece.tensor_slice.size)
            )


@contextlib.contextmanager
def _anonymous(bucket: Bucket) -> Iterator[SegmentRef]:
    """Shared memory for a bucket, freed when the block ends."""
    _check_room(f"bucket {bucket.key} in shared memory", bucket.bytes)
    try:
        segment, fd = create_anonymous(bucket.bytes)
    except OSError as error:
        raise WeightsError(
            f"no room for bucket {bucket.key} in shared memory: {bucket.bytes} bytes are needed ({error.strerror})",
            hint=_MORE_ROOM,
        ) from error
    try:
        yield segment
    finally:
        release(segment)
        os.close(fd)


async def _to_its_end(work: Callable[..., object], *args: object) -> None:
    """Run a function in a thread and wait for its end even if cancelled, so that its arguments can be freed."""
    # A thread cannot be cancelled, and the segment that it writes to is unmapped as soon as the caller leaves.
    thread = asyncio.create_task(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(thread)
    finally:
        while not thread.done():
            with contextlib.suppress(asyncio.CancelledError):  # the first one is raised
                await asyncio.wait((thread,))
        thread.exception()  # retrieved so that asyncio prints nothing


def _check_room(purpose: str, needed: int) -> None:
    free = available_bytes()
    if needed > free:
        raise WeightsError(f"no room for {purpose}: {needed} bytes are needed, {free} are free", hint=_MORE_ROOM)


def _is_missing(error: Exception) -> bool:
    """True if a torchstore actor reports a missing key."""
    if isinstance(error, KeyError):  # its client raises it for any error
        return "Unable to locate" in str(error)
    return isinstance(getattr(error, "exception", None), KeyError)


def _cause_of(error: Exception) -> str:
    """Last line of Monarch's error."""
    message = str(error.args[0] if error.args else error).strip()
    return message.splitlines()[-1].strip() if message else type(error).__name__
