"""The journal of one adapter's accepted requests on disk; none of them is lost if the process is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["create", "pass", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights", "refused"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_HEAD = struct.Struct("<IIqB")  # bytes of the body, its checksum, seq, kind


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """An accepted request."""

    seq: int
    """Its sequence number among the adapter's requests."""
    kind: Kind
    body: bytes
    """The request's body, unchanged; of a refused one, the error."""


class Journal:
    """A file of requests, appended to before their client hears that they are accepted.

    journal = Journal(folder / "journal")
    journal.append(JournalEntry(seq=3, kind="optim_step", body=body))
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, entry: JournalEntry) -> None:
        """Write a request at the end.

        Raises:
            OSError: it cannot be written; the file has not changed.
        """
        data = _encode(entry)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                num_bytes = 0
                while num_bytes < len(data):
                    # A disk that is nearly full takes a part only; the next write raises.
                    num_bytes += os.write(descriptor, data[num_bytes:])
            except OSError:
                # A half-written request would hide all that are appended after it.
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def read(self) -> list[JournalEntry]:
        """Return all complete requests. A last one cut off by a kill was never accepted, and is cut from the file."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        entries, place = [], 0
        while place + _HEAD.size <= len(data):
            size, checksum, seq, kind = _HEAD.unpack_from(data, place)
            body = data[place + _HEAD.size : place + _HEAD.size + size]
            if len(body) < size or zlib.crc32(body) != checksum or kind >= len(_KINDS):
                break
            entries.append(JournalEntry(seq=seq, kind=_KINDS[kind], body=body))
            place += _HEAD.size + size
        if place < len(data):
            os.truncate(self._path, place)
        return entries

    async def keep(self, after: int) -> None:
        """Keep only the requests after a sequence number; a snapshot has the effect of the earlier ones.

        Requests may be appended meanwhile, and are kept.

        Raises:
            OSError: it cannot be written; the file has not changed.
        """
        size, copy = self.size, self._path.with_name(f".{self._path.name}.partial")
        try:
            # In a thread, as a journal may have a GiB, and the event loop has other clients.
            await asyncio.to_thread(self._copy, copy, after, size)
            # Without an await until the rename, so that nothing is appended after the part that is copied here.
            with self._path.open("rb") as file, copy.open("ab") as copy_file:
                file.seek(size)
                shutil.copyfileobj(file, copy_file)
            copy.replace(self._path)
        finally:
            copy.unlink(missing_ok=True)

    def _copy(self, copy: Path, after: int, size: int) -> None:
        """Copy the requests after a sequence number from the first `size` bytes."""
        with self._path.open("rb") as file, copy.open("wb") as copy_file:
            while file.tell() < size:
                head = file.read(_HEAD.size)
                num_bytes, _, seq, _ = _HEAD.unpack(head)
                # Bodies that go are not read: those of a long training's passes are most of the file.
                if seq <= after:
                    file.seek(num_bytes, os.SEEK_CUR)
                else:
                    copy_file.write(head + file.read(num_bytes))
            copy_file.flush()
            os.fsync(copy_file.fileno())  # else the rename may reach the disk before the content


def _encode(entry: JournalEntry) -> bytes:
    return _HEAD.pack(len(entry.body), zlib.crc32(entry.body), entry.seq, _KINDS.index(entry.kind)) + entry.body
