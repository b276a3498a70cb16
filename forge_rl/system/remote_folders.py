"""Folders in any of fsspec's file systems."""

from __future__ import annotations

from typing import Any

import fsspec  # type: ignore[import-untyped]

from forge_rl.errors import ForgeError
from forge_rl.system.terminal import clipped


def open_folder(address: str, *, flag: str, error: type[ForgeError]) -> tuple[Any, str]:
    """Return the file system of an address, and the folder's path in it.

        files, path = open_folder("s3://bucket/run", flag="--weights.mirror", error=WeightsError)

    Args:
        flag: flag that gave the address; the address may hold a password, so errors do not show it.
        error: class of the error to raise.

    Raises:
        ForgeError: the file system is unknown, or its package is not installed.
    """
    try:
        files, path = fsspec.url_to_fs(address, skip_instance_cache=True)
    except (ImportError, ValueError) as cause:
        raise error(
            f"{flag} is an address that fsspec cannot open: {clipped(str(cause), lines=1, width=200)}",
            hint="name a folder, such as s3://bucket/run (with s3fs installed) or file:///shared/run",
        ) from cause
    return files, path
