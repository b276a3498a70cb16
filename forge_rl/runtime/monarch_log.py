"""Monarch's log, which Monarch opens when it is imported: only in a folder that nobody else can read or write."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from forge_rl.errors import ConfigError


def secure_monarch_log(parent: Path = Path("/tmp")) -> None:
    """Make the folder of Monarch's log this user's own, with mode 0700, or refuse to go on; and log warnings only.

    The folder is `/tmp/USER`, whatever TMPDIR is. Who makes it first could have Monarch append to any file of this user
    through a link, and read what it logs; so this comes before `import monarch`. Set MONARCH_FILE_LOG=info for more in
    it, some 20 MB an hour.

    Raises:
        ConfigError: the folder belongs to somebody else, or is no folder.
    """
    os.environ.setdefault("MONARCH_FILE_LOG", "warn")
    names = {os.environ.get("USER", "")}  # Monarch asks for both
    with contextlib.suppress(KeyError):  # a container's user may have no name
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    for name in names:
        if name in ("", ".", "..") or "/" in name:
            continue
        folder = parent / name
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(
                f"Monarch keeps its log in {folder}, which is not this user's folder",
                hint="remove it, or ask its owner",
            )
        folder.chmod(0o700)
        for file in folder.glob("monarch_log*"):
            # What was put there while others could write to the folder.
            if not stat.S_ISREG((kept := file.lstat()).st_mode) or kept.st_uid != os.geteuid() or kept.st_nlink > 1:
                file.unlink()
