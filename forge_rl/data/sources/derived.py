"""Files derived from others, made once in a private cache folder: decompressed copies, and indexes of rows."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from forge_rl.data.sources.tables import Identity
from forge_rl.errors import TaskError
from forge_rl.models.cache import build_once
from forge_rl.system.folders import make_private

_READ_BYTES = 1 << 20


def derived(path: Path, cache: Path, suffix: str, write: Callable[[Path], None]) -> Path:
    """Return the file that `write` makes from another; it is made again if that file changes.

    Raises:
        TaskError: the cache cannot be written.
    """
    made_from = (str(path.resolve()), path.stat().st_mtime_ns, Identity.of(path))
    target = cache / f"{hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]}{suffix}"
    try:
        make_private(cache, TaskError)
        build_once(target, write, TaskError)
    except OSError as error:
        raise TaskError(
            f"cannot write a copy of {path} to {cache}: {error.strerror or error}",
            hint="free space there; or convert the file to plain JSON lines, which are read in place",
        ) from error
    return target


def decompressed(path: Path, cache: Path, compression: str) -> Path:
    """Return a decompressed copy of a file.

    Args:
        compression: gzip, zstd or bz2.

    Raises:
        TaskError: the file is broken, or its copy is too large for the cache.
    """
    import pyarrow as pa

    def write(made: Path) -> None:
        with made.open("wb") as file:
            room = Room(path, file)
            try:
                with pa.input_stream(str(path), compression=compression) as stream:
                    while data := stream.read(_READ_BYTES):
                        room.check(len(data))
                        file.write(data)
            except (OSError, pa.ArrowException) as error:
                raise TaskError(
                    f"{path} cannot be decompressed: {error}", hint="compress the file again, or free space"
                ) from error

    return derived(path, cache, ".jsonl", write)


class Room:
    """Limits a copy to half of the free space, so that neither a large file nor a decompression bomb fills the disk."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._most = shutil.disk_usage(Path(file.name).parent).free // 2

    def check(self, more: int = 0) -> None:
        """Raise TaskError if the copy with so many more bytes is too large."""
        if self._file.tell() + more > self._most:
            raise TaskError(
                f"the copy of {self._path} needs more than {self._most:,} bytes, half of the free space in "
                f"{Path(self._file.name).parent.parent}",
                hint="free space there; or convert the file to plain JSON lines, which are read in place",
            )
