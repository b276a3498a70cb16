"""Publishes versions to an fsspec address, for engines elsewhere: usually only the changed elements, sometimes
everything.

A version is a header, such as 0000000012.json, and parts with its tensors, such as 0000000012-000.bin. The header is
written last, so a reader sees a whole version or none. It names the version that it changes, unless it is full, and
each tensor's fingerprint, which a reader compares with its result: readers get the published bytes or an error.
Fingerprints are not signatures: anyone who can write to the address controls the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from forge_rl.errors import WeightsError
from forge_rl.weights.delta_codec import Words, apply_change, decode_whole, encode, words_of
from forge_rl.weights.delta_files import DeltaFolder, Header, TensorChange
from forge_rl.weights.manifest import Manifest, TensorEntry, TensorSpec
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard, Transport

if TYPE_CHECKING:
    import torch

_PART_BYTES = 64 << 20
"""Size at which a part is complete and written."""
_KEPT_FULL = 2
"""Number of newest full versions to keep, with their changes."""
_ATTEMPTS = 3
"""Attempts to read a version, since the publisher removes old versions meanwhile."""


class DeltaPublisher:
    """Writes versions to an address; keeps the last one in memory to find the elements that change.

        publisher = DeltaPublisher("s3://bucket/run")
        async with store.lease() as manifest:
            written_bytes = await publisher.publish(manifest, store.transport())

    Args:
        address: a folder in any of fsspec's file systems, which only this run writes to.
        full_every: number of versions after which one is written whole.

    Raises:
        WeightsError: the address is of an unknown file system.
    """

    def __init__(self, address: str, *, full_every: int = 20) -> None:
        self._folder = DeltaFolder(address)
        self._full_every = full_every
        self._full: list[int] = []
        """Numbers of the full versions that are kept."""
        self._next = -1
        self._words: dict[str, Words] = {}

    async def publish(self, manifest: Manifest, transport: Transport) -> int:
        """Write a version, which the caller has leased, and return the bytes written. After an error, the next version
        is full.

        Raises:
            WeightsError: the version cannot be read.
            OSError: it cannot be written.
        """
        if self._next < 0:
            numbers = await asyncio.to_thread(self._folder.numbers)
            self._next = max(numbers, default=-1) + 1
        # Nothing is kept until the version is written, so that no later one is compared with a failed one.
        old_words, self._words = self._words, {}
        # Numbers at the address are its own: versions may be skipped, and a rollback repeats theirs.
        number, self._next = self._next, self._next + 1
        is_full = not old_words or number - self._full[-1] >= self._full_every
        writer = _Writer(self._folder, number, {} if is_full else old_words)
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            async for bucket in buckets:
                with bucket.open() as tensors:
                    for entry in bucket.entries:
                        await asyncio.to_thread(writer.add, entry, tensors[entry.name])
        written_bytes = await asyncio.to_thread(writer.finish, manifest, None if is_full else number - 1)
        self._words = writer.held
        if is_full:
            self._full = [*self._full, number][-_KEPT_FULL:]
            await asyncio.to_thread(self._folder.remove_before, self._full[0])
        return written_bytes


class _Writer:
    """Writes one version."""

    def __init__(self, folder: DeltaFolder, number: int, old_words: dict[str, Words]) -> None:
        self.held: dict[str, Words] = {}
        """Copies of the version's tensors."""
        self._folder = folder
        self._number = number
        self._old_words = old_words
        self._changes: dict[str, TensorChange] = {}
        self._sizes: list[int] = []
        self._part = bytearray()

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Write a tensor's change."""
        words = words_of(tensor)
        old_words = self._old_words.pop(entry.name, None)
        fits = old_words is not None and (len(old_words), old_words.dtype) == (len(words), words.dtype)
        change = encode(words, old_words if fits else None)
        # `words` is a view of the bucket, which is gone after the block. An unchanged tensor needs no second copy.
        if change.kind == "same" and old_words is not None:
            self.held[entry.name] = old_words
        else:
            self.held[entry.name] = words.copy()
        self._changes[entry.name] = TensorChange(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,  # type: ignore[arg-type]
            fingerprint=entry.fingerprint,
            kind=change.kind,
            part=len(self._sizes) if change.data else 0,
            offset=len(self._part) if change.data else 0,
            bytes=len(change.data),
            changes=change.changes,
            gap_bytes=change.gap_bytes,  # type: ignore[arg-type]
        )
        self._part += change.data
        if len(self._part) >= _PART_BYTES:
            self._end_part()

    def finish(self, manifest: Manifest, base: int | None) -> int:
        """Write the header, which makes the version visible; returns the bytes written."""
        if self._part:
            self._end_part()
        tensors = tuple(self._changes[entry.name] for entry in manifest.tensors)
        header = Header(version=manifest.version, base=base, parts=tuple(self._sizes), tensors=tensors)
        data = header.model_dump_json(exclude_defaults=True).encode()
        self._folder.write(self._number, None, data)
        return sum(self._sizes) + len(data)

    def _end_part(self) -> None:
        self._folder.write(self._number, len(self._sizes), bytes(self._part))
        self._sizes.append(len(self._part))
        self._part.clear()


class DeltaSubscriber:
    """Holds the newest version at an address, equal to the published one bit for bit.

        subscriber = DeltaSubscriber("s3://bucket/run")
        if subscriber.update():
            async with store.publishing(subscriber.version, subscriber.specs, torch.bfloat16) as publication:
                reports = await store.transport().write(publication.draft, subscriber.shards(), rank=0)
                await publication.commit([reports])

    Args:
        address: the publisher's.
        most_bytes: maximum size of a version.
        expected: shapes of the model's tensors by name, if known; versions with others are refused.

    Raises:
        WeightsError: the address is of an unknown file system.
    """

    def __init__(
        self, address: str, *, most_bytes: int = 1 << 40, expected: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        self.version: int | None = None
        """Version that is held; None before the first, and after an error that left none."""
        self.tensors: dict[str, torch.Tensor] = {}
        """The version's tensors by name, on CPU, in the published order; the next update changes them in place."""
        self._folder = DeltaFolder(address)
        self._most_bytes = most_bytes
        self._expected = expected
        self._number: int | None = None
        self._entries: tuple[TensorEntry, ...] = ()
        self._changed: set[str] = set()

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors, in the published order; `changed` is False for those that the last update did not change.

        Each has its fingerprint, because a local store may lack an earlier update whose publication failed or was
        skipped.
        """
        return [
            TensorSpec(
                name=entry.name,
                shape=entry.shape,
                dtype=entry.dtype,
                changed=entry.name in self._changed,
                fingerprint=entry.fingerprint,
            )
            for entry in self._entries
        ]

    def shards(self) -> list[LocalShard]:
        """Return the tensors as one rank's shards, to publish them to a local store."""
        return [
            LocalShard(name=name, tensor_slice=TensorSlice.whole(tensor.shape), values=tensor)
            for name, tensor in self.tensors.items()
        ]

    def update(self) -> bool:
        """Bring the tensors to the newest version at the address; returns whether the version changed.

        Raises:
            AttestationError: a tensor differs from the published one; names the tensors.
            WeightsError: a file at the address is malformed or incomplete. Nothing is then held.
            OSError: the address cannot be read. The version held before is still held, unless it had begun to change.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._update()
            except BaseException as error:
                # Changes are applied in place, so a failure halfway leaves tensors of no version. Without a number, the
                # next update starts from a full one.
                if self._number is None or isinstance(error, WeightsError | FileNotFoundError):
                    self.version, self._number, self.tensors, self._entries = None, None, {}, ()
                # Only a missing file is worth another attempt: the publisher may have removed it for a newer full
                # version.
                if not isinstance(error, FileNotFoundError):
                    raise
                if attempt == _ATTEMPTS - 1:
                    raise WeightsError(
                        f"{self._folder.address} lacks a file of its newest version: {error}",
                        hint="let the run publish a full version to it again",
                    ) from error
        raise AssertionError

    def _update(self) -> bool:
        numbers = self._folder.numbers()
        if not numbers or self._number == numbers[-1]:
            return False
        chain = [(numbers[-1], self._header(numbers[-1]))]
        # Back to the version that is held, or to a full one. Bases are smaller than their version's number, so this
        # ends.
        while (base := chain[-1][1].base) is not None and base != self._number:
            chain.append((base, self._header(base)))
        self._changed = set()
        for number, header in reversed(chain):
            self._apply(number, header)
        return True

    def _header(self, number: int) -> Header:
        header = self._folder.header(number, self._most_bytes)
        shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        if self._expected is not None and shapes != self._expected:
            raise self._folder.malformed(number, "its tensors differ from the model's")
        return header

    def _apply(self, number: int, header: Header) -> None:
        """Bring the tensors to a version, and compare them with the published ones."""
        from forge_rl.weights.fingerprints import fingerprint

        layout = [(entry.name, entry.shape, entry.dtype) for entry in self._entries]
        if header.base is None:
            self.tensors, self._entries = {}, ()
        elif layout != [(tensor.name, tensor.shape, tensor.dtype) for tensor in header.tensors]:
            raise self._folder.malformed(number, "its tensors differ from those in the version that it changes")
        # Unchanged tensors keep the fingerprint that was computed when they were read.
        fingerprints = {entry.name: entry.fingerprint for entry in self._entries}
        # From here on the tensors belong to no version, until the fingerprints agree.
        self.version, self._number = None, None
        # One part in memory at a time.
        for part, size in enumerate(header.parts):
            data = memoryview(self._folder.read(number, part, size))
            for tensor in header.tensors:
                if tensor.part == part and tensor.kind != "same":
                    try:
                        self._decode(tensor, data[tensor.offset : tensor.offset + tensor.bytes])
                    except (OSError, ValueError) as error:
                        raise self._folder.malformed(number, f"{tensor.name!r} is torn: {error}") from error
                    fingerprints[tensor.name] = fingerprint(self.tensors[tensor.name], tensor.shape)
                    self._changed.add(tensor.name)
        self._entries = tuple(tensor.entry for tensor in header.tensors)
        manifest = Manifest(version=header.version, tensors=self._entries, buckets=())
        manifest.attest(fingerprints, f"what was read from {self._folder.address}")
        self.tensors = {entry.name: self.tensors[entry.name] for entry in self._entries}
        self.version, self._number = header.version, number

    def _decode(self, tensor: TensorChange, data: memoryview) -> None:
        import torch

        entry = tensor.entry
        if tensor.kind == "changed":
            words = words_of(self.tensors[tensor.name])
            apply_change(data, words, changes=tensor.changes, gap_bytes=tensor.gap_bytes)
            return
        item_bytes = entry.torch_dtype.itemsize
        words = decode_whole(data, numel=entry.numel, item_bytes=item_bytes)
        bits = torch.from_numpy(words.view("<u1"))
        self.tensors[tensor.name] = bits.view(entry.torch_dtype).view(entry.shape)
