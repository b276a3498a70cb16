"""Secures Monarch's log, which Monarch opens on import, in a folder that nobody else can read or write."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from forge_rl.errors import ConfigError


def secure_monarch_log(parent: Path = Path("/tmp")) -> None:
    """Give this user the folder of Monarch's log with mode 0700, or fail; and restrict the log to warnings.

    The folder is `/tmp/USER`, regardless of TMPDIR. Another user who created it first could read the log, and through a
    link make Monarch append to any file of this user; so call this before `import monarch`. Set MONARCH_FILE_LOG=info
    for a fuller log, about 20 MB per hour.

    Raises:
        ConfigError: the folder belongs to another user, or is not a folder.
    """
    os.environ.setdefault("MONARCH_FILE_LOG", "warn")
    names = {os.environ.get("USER", "")}  # Monarch uses either
    with contextlib.suppress(KeyError):  # a container's user may have no name
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    for name in names:
        if name in ("", ".", "..") or "/" in name:
            continue
        folder = parent / name
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        folder_status = folder.lstat()
        if not stat.S_ISDIR(folder_status.st_mode) or folder_status.st_uid != os.geteuid():
            raise ConfigError(
                f"Monarch keeps its log in {folder}, which is not a folder of this user",
                hint="remove it, or ask its owner to",
            )
        folder.chmod(0o700)
        for file in folder.glob("monarch_log*"):
            # May have been put there while others could write to the folder; another process may remove it too.
            with contextlib.suppress(FileNotFoundError):
                file_status = file.lstat()
                if (
                    not stat.S_ISREG(file_status.st_mode)
                    or file_status.st_uid != os.geteuid()
                    or file_status.st_nlink > 1
                ):
                    file.unlink()
