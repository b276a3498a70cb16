"""Decompresses the bytes of a layer in a thread, while another writes its files. Imports nothing of this library."""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Generator, Iterator

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed streams."""
_READ, _PART = 1 << 18, 1 << 20


class CompressionError(Exception):
    """A compressed stream that is damaged or cut off."""


def layer_chunks(fd: int, start: int, size: int) -> Generator[bytes, None, None]:
    """Yield a layer's uncompressed bytes, whichever way it is compressed. Close it before the file.

    Args:
        fd: an open file; its position is neither used nor changed.
        start, size: place and length of the layer in the file.

    Raises:
        CompressionError: they are damaged or cut off.
        OSError: they cannot be read.
    """
    pieces, magic = _pieces(fd, start, start + size), os.pread(fd, min(4, size), start)
    if magic.startswith(GZIP):
        return _ahead(_gunzipped(pieces))
    return _ahead(_unzstd(pieces)) if magic == ZSTD else pieces


def _pieces(fd: int, start: int, end: int) -> Generator[bytes, None, None]:
    while start < end:
        piece = os.pread(fd, min(_READ, end - start), start)
        if not piece:
            raise CompressionError("it is cut off")
        start += len(piece)
        yield piece


def _gunzipped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what gzip members, one after another, hold; in parts of bounded size, as a bomb has few bytes."""
    decoder = zlib.decompressobj(wbits=31)
    has_data = False
    try:
        for piece in pieces:
            data = piece
            # Some tools pad a member with zeros, however many: the next member begins after them.
            while data := data.lstrip(b"\0") if decoder.eof else data:
                if decoder.eof:
                    decoder = zlib.decompressobj(wbits=31)
                has_data = True
                if part := decoder.decompress(data, _PART):
                    yield part
                # The first: input left because the output is bounded. The second: input after the end of a member.
                data = decoder.unconsumed_tail or decoder.unused_data
            while not decoder.eof and (part := decoder.decompress(b"", _PART)):
                yield part
    except zlib.error as error:
        raise CompressionError(f"its gzip stream is damaged: {error}") from None
    if has_data and not decoder.eof:
        raise CompressionError("its gzip stream is cut off")


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.PythonFile(_PieceFile(pieces), mode="r"), "zstd") as stream:
            while part := stream.read(_PART):
                yield part
    except OSError as error:  # of Arrow, also for damage
        raise CompressionError(f"its zstd stream is damaged: {error}") from None


class _PieceFile:
    """Pieces as a readable file, for Arrow."""

    closed = False

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def read(self, size: int) -> bytes:
        piece = self._rest or next(self._pieces, b"")
        self._rest = piece[size:]
        return piece[:size]

    def close(self) -> None:
        self.closed = True


def _ahead(parts: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Yield parts that a thread makes meanwhile; both decompressing and writing leave the interpreter's lock."""
    # Bounded: a slow disk must not let a bomb pile up in memory.
    queued: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=8)
    is_wanted = True

    def make() -> None:
        try:
            for part in parts:
                queued.put(part)
                if not is_wanted:
                    break
            queued.put(None)
        except BaseException as error:
            queued.put(error)

    threading.Thread(target=make, daemon=True).start()
    part: bytes | BaseException | None = b""
    try:
        while (part := queued.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part
    finally:
        is_wanted = False
        # The thread may wait for room in the queue; what it puts last is no part.
        while isinstance(part, bytes):
            part = queued.get()
