"""Folders that nobody else has written to: checked before what is in them is read, run over or written through."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forge_rl.errors import ForgeError


def make_private(folder: Path, error: type[ForgeError], *, deep: bool = True) -> None:
    """Make a folder that only this user can enter, or check one that exists and close it to others.

        make_private(Path("runs/grpo-1"), CheckpointError)

    Args:
        deep: check all that is in it, as in `check_own`.

    Raises:
        ForgeError: in the cases of `check_own`; it is an `error`.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own(folder, error, deep=deep)
    with contextlib.suppress(OSError):  # a file system without modes, where the check has found nobody who may write
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o077)


def check_own(folder: Path, error: type[ForgeError], *, deep: bool = True) -> None:
    """Check that a folder and all that is in it are this user's or root's, and that nobody else may have put it there.

    Groups are trusted: who shares a folder with one, as umask 002 does, means to. Where a file system changes owners,
    as NFS does with root's files, those that it gives to new files are this user's. Links may lead to other places in
    the folder.

    Args:
        deep: look at all that is in it, and not only at the folder itself.

    Raises:
        ForgeError: something in it is somebody else's, can be written by anybody, leads out of it, or is neither file
            nor folder nor a socket. It is an `error`.
        OSError: it cannot be read.
    """
    found = next(_problems(folder, deep=deep), "")
    if found:
        raise error(
            f"{folder} cannot be trusted: {found}",
            hint="if you know all that is in it, mend it with chown -R and chmod -R go-w, or copy it with cp -rL; else "
            "choose another folder",
        )


def _problems(folder: Path, *, deep: bool) -> Iterator[str]:
    """Say what others may have put into a folder."""
    top, real = folder.lstat(), folder.resolve()
    status = real.stat()
    owners = {os.geteuid(), 0}
    if status.st_uid not in owners:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=real) as ours:
            owners.add(os.fstat(ours.fileno()).st_uid)
    if not {top.st_uid, status.st_uid} <= owners:
        yield f"it belongs to user {top.st_uid if top.st_uid not in owners else status.st_uid}"
    if status.st_mode & stat.S_IWOTH and any(real.iterdir()):
        yield f"anybody may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    open_to_all = bool(status.st_mode & stat.S_IXOTH)
    for place, folders, files in os.walk(real) if deep else ():
        for path in (Path(place, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                yield from _problem(path, real, owners, open_to_all=open_to_all)


def _problem(path: Path, top: Path, owners: set[int], *, open_to_all: bool) -> Iterator[str]:
    status = path.lstat()
    if status.st_uid not in owners:
        yield f"{path} belongs to user {status.st_uid}"
    elif stat.S_ISLNK(status.st_mode):
        if not (target := path.resolve()).is_relative_to(top):
            yield f"{path} is a link to {target}"
    elif not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        yield f"{path} is neither file nor folder"  # who opens a pipe waits for ever; a socket cannot be opened
    elif open_to_all and status.st_mode & stat.S_IWOTH:
        yield f"anybody may write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
