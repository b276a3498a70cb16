"""Folders in any of fsspec's file systems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from forge_rl.errors import ForgeError
from forge_rl.system.terminal import clipped

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Protocols whose files appear whole or not at all. They have no folders: making one would make the bucket."""
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")


class RemoteFolder:
    """A folder in any of fsspec's file systems.

        folder = RemoteFolder("s3://bucket/run", flag="--weights.mirror", error=WeightsError)
        folder.write("step-000001/manifest.json", data)

    A file's name is its path in the folder. If the file system fails, methods raise an OSError in place of the errors
    of its library; FileNotFoundError means that the file is not there.

    Args:
        address: the folder's; it may hold a password, so errors do not show it.
        flag: flag that gave the address.
        error: class of the error to raise if it cannot be opened.

    Raises:
        ForgeError: the file system is unknown, or its package is not installed.
    """

    def __init__(self, address: str, *, flag: str, error: type[ForgeError]) -> None:
        try:
            files, root = fsspec.url_to_fs(address, skip_instance_cache=True)
        except (ImportError, ValueError) as cause:
            raise error(
                f"{flag} is an address that fsspec cannot open: {clipped(str(cause), lines=1, width=200)}",
                hint="name a folder, such as file:///shared/run, or s3://bucket/run after pip install 'forge_rl[s3]'",
            ) from cause
        self._files: Any = files
        self._root: str = root
        protocols = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
        self._in_buckets = not protocols.isdisjoint(_OBJECT_STORES)

    def names(self) -> list[str]:
        """List the files and folders in this one: none if it does not exist, an OSError if its bucket does not."""
        with _as_os_error():
            # fsspec caches listings, which lack what other processes have written since.
            self._files.invalidate_cache()
            try:
                paths: list[str] = self._files.ls(self._root, detail=False)
            except FileNotFoundError as error:
                if self._in_buckets and error.__cause__ is not None:  # the store's answer: there is no such bucket
                    raise OSError(str(error)) from error
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        try:
            self.size(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        with _as_os_error():
            self._files.invalidate_cache()  # a listing may be older than the file
            return int(self._files.info(self._path(name))["size"] or 0)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a file; if it has more than `max_bytes` bytes, only the first `max_bytes` + 1."""
        size = self.size(name)
        with _as_os_error():
            # Object stores refuse a range of an empty file.
            data: bytes = self._files.cat_file(self._path(name), start=0, end=min(size, max_bytes + 1)) if size else b""
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: readers see it complete or not at all."""
        path = self._path(name)
        with _as_os_error():
            # An object store shows a file only once it is complete; elsewhere the rename does that.
            if self._in_buckets:
                self._files.pipe_file(path, data)
                return
            folder, _, file_name = path.rpartition("/")
            self._files.makedirs(folder, exist_ok=True)
            self._files.pipe_file(draft := f"{folder}/.{file_name}.part", data)
            self._files.mv(draft, path)

    def put(self, source: Path, name: str) -> None:
        """Copy a local file here; readers may see it before it is complete."""
        path = self._path(name)
        with _as_os_error():
            if not self._in_buckets:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(source), path)

    def get(self, name: str, to: Path) -> None:
        """Copy a file to a local one."""
        with _as_os_error():
            self._files.get_file(self._path(name), str(to))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with _as_os_error(), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its contents, if it exists."""
        with _as_os_error(), suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert errors of a file system's library to OSError, without the password of an address in the message."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of any library
        message = clipped(_PASSWORD.sub("", str(error)), lines=1, width=300)
        raise OSError(f"{type(error).__name__}: {message}") from error
