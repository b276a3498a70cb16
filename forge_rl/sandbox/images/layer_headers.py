"""Keeps what an unpacked layer lacks of its archive, so that other hosts get the very bytes that its digest is of.

An archive is its headers, which compress to some 40 bytes a file, and the content of files, which is unpacked. Kept is
a gzip file of segments: R, a length of 4 bytes, and bytes; or F, a size of 8 bytes, a length of 2, and a path.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator

_HEADERS = "headers.gz"
_RAW, _FILE = struct.Struct("<cI"), struct.Struct("<cQH")
_PART = 1 << 20


class LayerHeaders:
    """Writes the headers of a layer into its folder, unless content that they refer to is lost."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _HEADERS)
        self._file = gzip.GzipFile(self._path, "wb", compresslevel=1)
        self._is_whole = True
        self.disk_bytes = 0
        """Length of the file, once it is closed."""

    def __enter__(self) -> LayerHeaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        os.chmod(self._path, 0o600)
        if self._is_whole:
            self.disk_bytes = os.path.getsize(self._path)
        else:
            os.unlink(self._path)

    def add(self, data: bytes) -> None:
        """Keep bytes of the archive that are in no file."""
        self._file.write(_RAW.pack(b"R", len(data)) + data)

    def add_content(self, path: str, size: int) -> None:
        """Note that a file's content is next."""
        if size:
            name = path.encode()
            self._file.write(_FILE.pack(b"F", size, len(name)) + name)

    def forget(self) -> None:
        """Note that a file of the layer was replaced: its content is lost, and the archive cannot be rebuilt."""
        self._is_whole = False


def has_archive(folder: str) -> bool:
    """Return whether `archive_parts` can be read."""
    return os.path.exists(os.path.join(folder, _HEADERS))


def archive_parts(folder: str, files: str) -> Iterator[bytes]:
    """Yield the uncompressed archive that a layer was unpacked from.

    Args:
        folder: folder of the layer.
        files: name of the folder in it with the unpacked files.

    Raises:
        OSError: a file has changed since it was unpacked, or cannot be read.
    """
    with gzip.open(os.path.join(folder, _HEADERS), "rb") as headers:
        while kind := headers.read(1):
            if kind == b"R":
                yield headers.read(_RAW.unpack(kind + headers.read(_RAW.size - 1))[1])
                continue
            _, size, length = _FILE.unpack(kind + headers.read(_FILE.size - 1))
            path = os.path.join(folder, files, headers.read(length).decode())
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                while size:
                    part = file.read(min(_PART, size))
                    if not part:
                        raise OSError(f"{path} has changed")
                    size -= len(part)
                    yield part
