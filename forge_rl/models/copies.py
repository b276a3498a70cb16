"""Copies model folders into a host's own cache, under names made from their contents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import xxhash

from forge_rl.errors import ModelError
from forge_rl.models.bundled import default_cache
from forge_rl.models.cache import build_once
from forge_rl.models.hf_folder import model_files
from forge_rl.system.folders import make_private

_PIECE_BYTES = 8 << 20
_THREADS = 8

Contents = Mapping[str, tuple[int, str]]
"""Size in bytes and XXH3 of each file, by name."""


def contents_of(folder: Path) -> Contents:
    """Read all of a model's files and return their sizes and digests, for `copy_of`."""

    def digest(path: Path) -> tuple[int, str]:
        hasher = xxhash.xxh3_128()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
        return path.stat().st_size, hasher.hexdigest()

    paths = model_files(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(
            zip((path.relative_to(folder).as_posix() for path in paths), threads.map(digest, paths), strict=True)
        )


def copy_of(contents: Contents, open_file: Callable[[str], BinaryIO], cache: Path | None = None) -> Path:
    """Return a folder in this host's cache with these files; copy them if it is missing or has changed.

    Args:
        open_file: opens a file of the original to read.
        cache: folder of the cache; by default the user's.

    Raises:
        ModelError: the disk is full, or the original changed meanwhile.
        OSError: a file cannot be read or written.
    """
    name = xxhash.xxh3_128(json.dumps(sorted(contents.items())).encode()).hexdigest()
    folder = (cache or default_cache()) / "copies"
    folder.mkdir(parents=True, exist_ok=True)
    make_private(folder, ModelError, deep=False)
    target = folder / name

    def is_ready() -> bool:
        # Read again rather than trusted: a copy may have been cut short or changed on disk.
        return target.is_dir() and contents_of(target) == contents

    def build(new_folder: Path) -> None:
        needed_bytes, free_bytes = sum(size for size, _ in contents.values()), shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise ModelError(
                f"a copy of the model needs {needed_bytes / 1e9:.2f} GB but {folder} has {free_bytes / 1e9:.2f} GB "
                "free",
                hint="free space there, or choose another --cache",
            )
        new_folder.mkdir()
        for file in contents:
            (new_folder / file).parent.mkdir(exist_ok=True)
            with open_file(file) as source, (new_folder / file).open("xb") as destination:
                shutil.copyfileobj(source, destination, _PIECE_BYTES)
        # The original may be overwritten while it is copied, file by file.
        if contents_of(new_folder) != contents:
            raise ModelError(f"the model changed while it was copied to {folder}", hint="start again")

    # Several hosts may share the disk. Those whose copy is there read it at the same time, without the lock.
    if not is_ready():
        build_once(target, build, ModelError, is_ready=is_ready)
    return target
