"""Folders and small files: ownership checks before contents are used, failures to read, and files written whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forge_rl.errors import CheckpointError, ForgeError


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists.

    Raises:
        OSError: that cannot be found out, as on a file server that is away; `Path.exists` may then return False.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextlib.contextmanager
def reading(path: Path, hint: str = "nothing was changed: repeat the command once it can be read") -> Iterator[None]:
    """Convert an OSError in the body to a CheckpointError: an unreadable file is neither absent nor damaged."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be read: {error.strerror or error}", hint=hint
        ) from error


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a small file atomically: a killed process or machine, or a full disk, leaves the old one or the new one.

    Of several processes that write it at once, the last one's content stays.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())  # else the rename may reach the disk before the content
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def make_private(
    folder: Path,
    error: type[ForgeError],
    *,
    deep: bool = True,
    hint: str = "free space there, or choose another folder",
) -> None:
    """Create a folder that only this user can enter, or check an existing one and remove others' access.

        make_private(Path("runs/grpo-1"), CheckpointError)

    Args:
        error: class of the error to raise.
        deep: check the contents too, as in `check_own`.
        hint: what to do if it cannot be created or read.

    Raises:
        ForgeError: an `error`: the folder cannot be created or read, or the cases of `check_own`.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        check_own(folder, error, deep=deep)
    except OSError as cause:
        raise error(f"the folder {folder} cannot be written: {cause.strerror or cause}", hint=hint) from cause
    with contextlib.suppress(OSError):  # a file system without modes; the check found that nobody else may write
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o077)


def check_own(folder: Path, error: type[ForgeError], *, deep: bool = True) -> None:
    """Check that a folder and its contents belong to this user or root, and that nobody else could have put them there.

    Group permissions are accepted, as sharing with a group is deliberate (umask 002). If a file system maps owners, as
    NFS does with root's files, the owner that it gives to new files counts as this user. Links may point to other
    places inside the folder.

    Args:
        error: class of the error to raise.
        deep: check the contents too, not only the folder itself.

    Raises:
        ForgeError: an `error`: something belongs to another user, is world-writable, links out of the folder, or is
            neither a file, a folder nor a socket.
        OSError: the folder cannot be read.
    """
    problem = next(_problems(folder, deep=deep), "")
    if problem:
        raise error(
            f"{folder} cannot be trusted: {problem}",
            hint="if you trust its contents, fix it with chown -R and chmod -R go-w, or copy it with cp -rL; otherwise "
            "choose another folder",
        )


def _problems(folder: Path, *, deep: bool) -> Iterator[str]:
    """Yield descriptions of anything that others may have put into a folder."""
    top, real = folder.lstat(), folder.resolve()
    status = real.stat()
    owners = {os.geteuid(), 0}
    # A new file shows which owner the file system gives to this user's files.
    if status.st_uid not in owners:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=real) as ours:
            owners.add(os.fstat(ours.fileno()).st_uid)
    if not {top.st_uid, status.st_uid} <= owners:
        yield f"it belongs to user {top.st_uid if top.st_uid not in owners else status.st_uid}"
    if status.st_mode & stat.S_IWOTH and any(real.iterdir()):
        yield f"anybody may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    # World-writable contents are harmless in a folder that others cannot enter.
    open_to_all = bool(status.st_mode & stat.S_IXOTH)
    for place, folders, files in os.walk(real) if deep else ():
        for path in (Path(place, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                yield from _problem(path, real, owners, open_to_all=open_to_all)


def _problem(path: Path, top: Path, owners: set[int], *, open_to_all: bool) -> Iterator[str]:
    status = path.lstat()
    if status.st_uid not in owners:
        yield f"{path} belongs to user {status.st_uid}"
    elif stat.S_ISLNK(status.st_mode):
        if not (target := path.resolve()).is_relative_to(top):
            yield f"{path} is a link to {target}"
    elif not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        yield f"{path} is neither file nor folder"  # opening a pipe blocks forever; a socket cannot be opened
    elif open_to_all and status.st_mode & stat.S_IWOTH:
        yield f"anybody may write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
