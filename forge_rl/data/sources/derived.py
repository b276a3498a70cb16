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
_HINT = "free space there; or convert the file to plain JSON lines, which are read in place"


def derived(path: Path, cache: Path, suffix: str, write: Callable[[BinaryIO], None]) -> Path:
    """Return the file that `write` makes from another; it is made again if that file changes.

    Raises:
        TaskError: the cache cannot be written.
        Exception: `write` raises it.
    """

    def build(temporary_path: Path) -> None:
        with temporary_path.open("wb") as file:
            write(file)

    # The name holds the source's state, so that a changed file gets a new copy and two runs share one.
    made_from = (str(path.resolve()), path.stat().st_mtime_ns, Identity.of(path))
    target = cache / f"{hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]}{suffix}"
    problem = f"cannot write a copy of {path} to {cache}"
    try:
        make_private(cache, TaskError, hint=_HINT)
    except TaskError as error:
        raise TaskError(f"{problem}: {error.message}", hint=error.hint) from error
    try:
        build_once(target, build, TaskError)
    except OSError as error:
        if error.errno is None:  # raised by pyarrow, which cannot read `path`
            raise
        raise TaskError(f"{problem}: {error.strerror or error}", hint=_HINT) from error
    return target


def decompressed(path: Path, cache: Path, compression: str) -> Path:
    """Return a decompressed copy of a file.

    Args:
        compression: gzip, zstd or bz2.

    Raises:
        TaskError: the file is broken, or its copy is too large for the cache.
    """
    import pyarrow as pa

    def write(file: BinaryIO) -> None:
        try:
            with pa.input_stream(str(path), compression=compression) as stream:
                while data := stream.read(_READ_BYTES):
                    file.write(data)
                    check_room(file, path)
        except (OSError, pa.ArrowException) as error:
            raise TaskError(
                f"{path} cannot be decompressed: {error}", hint="compress the file again, or free space"
            ) from error

    return derived(path, cache, ".jsonl", write)


def check_room(file: BinaryIO, path: Path) -> None:
    """Raise TaskError if a copy takes more than half of the free space, so that no file can fill the disk."""
    folder = Path(file.name).parent
    # What is written is gone from the free space, so at this point the copy takes half of what there was.
    if file.tell() > shutil.disk_usage(folder).free:
        raise TaskError(f"the copy of {path} takes more than half of the free space in {folder.parent}", hint=_HINT)
