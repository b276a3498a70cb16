"""Reads hostile tar streams: the ustar, PAX and GNU formats as images use them, with bounds on all that is kept.

tarfile is lenient where readers differ, keeps all entries in memory, and takes three times as long for small files.
Imports nothing of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

BLOCK = 512
FILE, HARD_LINK, LINK, CHARACTER_DEVICE, BLOCK_DEVICE, FOLDER, PIPE = "0123456"
_MAX_EXTENSION = 1 << 20
"""Bytes of the extended headers of one entry."""
_MAX_S = 1 << 33
_SPARSE = "sparse files are not supported"


class TarError(Exception):
    """A stream that is not a tar archive, is cut off, or has what no image needs."""


@dataclass(slots=True)
class TarEntry:
    """An entry; its name and target are unchecked bytes of the archive."""

    name: bytes
    kind: str
    """FILE, FOLDER, LINK and so on: the letter of the format."""
    mode: int
    """Permissions, with set-user-id, set-group-id and sticky bits."""
    uid: int
    gid: int
    size: int
    """Bytes of a file's content, which follows in the stream."""
    mtime_ns: int
    target: bytes
    """Target of a link or hard link."""
    device: tuple[int, int]


class ByteStream:
    """Chunks of bytes, read by length.

    Args:
        record: called with all bytes but those that `parts` has yielded.
        max_bytes: length at which reading fails, so that a bomb ends there.
    """

    def __init__(self, chunks: Iterator[bytes], record: Callable[[bytes], object], *, max_bytes: int) -> None:
        self._chunks, self._chunk, self._start = chunks, memoryview(b""), 0
        self._record = record
        self.left_bytes = max_bytes

    def _more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        # Before it is handed on: a bomb fails at the limit, whatever its archive claims about sizes.
        if len(chunk) > self.left_bytes:
            raise TarError("it has more bytes than a layer may have")
        self.left_bytes -= len(chunk)
        self._chunk, self._start = memoryview(chunk), 0
        return True

    def parts(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes in parts, without copying them.

        Raises:
            TarError: the stream ends before.
        """
        while size:
            if self._start == len(self._chunk) and not self._more():
                raise TarError("it is cut off")
            part = self._chunk[self._start : self._start + size]
            self._start += len(part)
            size -= len(part)
            yield part

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes as one object; for headers, which are short."""
        end = self._start + size
        if end <= len(self._chunk):
            data = bytes(self._chunk[self._start : end])
            self._start = end
        else:
            data = b"".join(self.parts(size))
        self._record(data)
        return data

    def is_at_end(self) -> bool:
        """Return whether nothing follows."""
        while self._start == len(self._chunk):
            if not self._more():
                return True
        return False

    def drain(self) -> None:
        """Read all that follows."""
        while self._start < len(self._chunk) or self._more():
            self._record(bytes(self._chunk[self._start :]))
            self._start = len(self._chunk)


class HeaderStream(Protocol):
    """A stream from which an archive is read."""

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes.

        Raises:
            TarError: there are fewer.
        """

    def is_at_end(self) -> bool:
        """Return whether nothing follows."""


def read_entries(stream: HeaderStream) -> Iterator[TarEntry]:
    """Yield the entries of an archive, up to its end. A file's content must be read before the next entry is.

    Raises:
        TarError: it is not an archive, is cut off, or has a feature that no image needs.
    """
    extension = _Extension()
    while not stream.is_at_end():
        header = stream.read(BLOCK)
        if not any(header):
            if not stream.is_at_end() and any(stream.read(BLOCK)):
                raise TarError("its end is followed by entries")
            return
        # x: PAX headers of the next entry, g: of all that follow, L and K: GNU's long name and long target.
        kind = _kind(header)
        if kind in "xgLK":
            extension.add(kind, stream, _number(header[124:136], "size"))
            continue
        entry = extension.entry(header, kind)
        extension = _Extension()
        # The caller reads the content; the rest of its last block follows.
        yield entry
        stream.read(-entry.size % BLOCK)
    if not extension.is_empty():
        raise TarError("it is cut off")


class _Extension:
    """Extended headers before an entry's own."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.name, self.target = b"", b""
        self._bytes = 0

    def is_empty(self) -> bool:
        return not (self.records or self.name or self.target)

    def add(self, kind: str, stream: HeaderStream, size: int) -> None:
        self._bytes += size + BLOCK
        if self._bytes > _MAX_EXTENSION:
            raise TarError(f"the headers of an entry have more than {_MAX_EXTENSION} bytes")
        data = stream.read(size)
        stream.read(-size % BLOCK)
        if kind == "L":
            self.name = data.partition(b"\0")[0]
        elif kind == "K":
            self.target = data.partition(b"\0")[0]
        elif kind == "x":
            self.records.update(_records(data))
        # Readers differ in whether these hold for all entries: what one of them checks, another would unpack elsewhere.
        elif _records(data).keys() & {"path", "linkpath", "size"}:
            raise TarError("a global header names or sizes entries")

    def entry(self, header: bytes, kind: str) -> TarEntry:
        records = self.records
        if kind == "S" or any(key.startswith("GNU.sparse.") for key in records):
            raise TarError(_SPARSE)
        # NUL is a file in the oldest archives, 7 one that was to be contiguous.
        if kind in "\0" + "7":
            kind = FILE
        if kind not in (FILE, HARD_LINK, LINK, CHARACTER_DEVICE, BLOCK_DEVICE, FOLDER, PIPE):
            raise TarError(f"an entry is of the unknown kind {kind!r}")
        name = header[:100].partition(b"\0")[0]
        # GNU's format has times where ustar has the prefix: "ustar" and a space.
        if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
            name = prefix + b"/" + name
        name = records.get("path", self.name or name)
        target = records.get("linkpath", self.target or header[157:257].partition(b"\0")[0])
        # PAX records may contain one, where the kernel's paths would end.
        if b"\0" in name or b"\0" in target:
            raise TarError("a name has a zero byte")
        size = _decimal(records["size"], "size") if "size" in records else _number(header[124:136], "size")
        mtime_ns = (
            _nanoseconds(records["mtime"])
            if "mtime" in records
            else _number(header[136:148], "time", signed=True) * 1_000_000_000
        )
        # Old archives have no kind for folders.
        if kind == FILE and name.endswith(b"/"):
            kind = FOLDER
        is_device = kind in (CHARACTER_DEVICE, BLOCK_DEVICE)
        return TarEntry(
            name,
            kind,
            _number(header[100:108], "mode") & 0o7777,
            _decimal(records["uid"], "uid") if "uid" in records else _number(header[108:116], "uid"),
            _decimal(records["gid"], "gid") if "gid" in records else _number(header[116:124], "gid"),
            size if kind == FILE else 0,
            max(0, min(mtime_ns, _MAX_S * 1_000_000_000)),
            target,
            (_number(header[329:337], "device"), _number(header[337:345], "device")) if is_device else (0, 0),
        )


def _kind(header: bytes) -> str:
    """Check a header's sum and return its letter."""
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != _number(header[148:156], "checksum"):
        raise TarError("it is not a tar archive, or a header is damaged")
    return chr(header[156])


def _number(field: bytes, title: str, *, signed: bool = False) -> int:
    if field[0] & 0x80:  # base 256
        value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field[1:], "big")
        if (value < 0 and not signed) or abs(value) >> 63:
            raise TarError(f"an entry's {title} is {value}")
        return value
    digits = field.strip(b" \0")
    if digits.translate(None, b"01234567"):
        raise TarError(f"an entry's {title} is {digits!r}")
    return int(digits or b"0", 8)


def _decimal(digits: bytes, title: str) -> int:
    if not digits.isdigit() or len(digits) > 19:
        raise TarError(f"an entry's {title} is {digits!r:.60}")
    return int(digits)


def _nanoseconds(text: bytes) -> int:
    seconds, _, fraction = text.removeprefix(b"-").partition(b".")
    if not (seconds + fraction).isdigit() or len(text) > 40:
        raise TarError(f"an entry's time is {text!r:.60}")
    sign = -1 if text.startswith(b"-") else 1
    return sign * (int(seconds or b"0") * 1_000_000_000 + int(fraction[:9].ljust(9, b"0")))


def _records(data: bytes) -> dict[str, bytes]:
    """Read the records of a PAX header: "LENGTH KEY=VALUE" and a new line each."""
    records, start = {}, 0
    while start < len(data):
        digits, _, _ = data[start : start + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[start + len(digits) + 1 : start + length]
        key, equals, value = record[:-1].partition(b"=")
        if not equals or not record.endswith(b"\n") or start + length > len(data):
            raise TarError("an extended header is damaged")
        records[key.decode("utf-8", "replace")] = value
        start += length
    return records
