"""Folders for the sockets and temporary files of Monarch's processes, and what killed processes left of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "forgerl-"  # short, for socket names
_UNLOCKED_S = 60.0
"""Age below which an unlocked folder may still be about to be locked by its process."""


def make_scratch() -> str:
    """Create a private folder, which is locked until this process ends, and remove those that killed processes left.

    Usually `clean_up_after` removes the folder, but it can be killed together with the process that it waits for.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too, or it belongs to another user
            _remove_unlocked(path)
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    fcntl.flock(os.open(folder, os.O_DIRECTORY), fcntl.LOCK_EX)  # stays open; children that are executed do not get it
    return folder


def _remove_unlocked(path: Path) -> None:
    """Remove a folder of this user unless its process lives or may not have locked it yet."""
    status = path.lstat()
    recent = time.time() - status.st_mtime < _UNLOCKED_S
    if recent or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    fd = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(fd)
