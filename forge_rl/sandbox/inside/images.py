"""Reads and writes files of an image's root from outside of it, without running any program of the image.

Runs in the session's own process, with its user's rights. Links and `..` lead nowhere outside of the root, as the
kernel resolves paths within it. Imports nothing of this library but its neighbour.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from dataclasses import dataclass

from forge_rl.sandbox.inside import kernel

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of images that set none."""
HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh")
_MOST_PASSWD = 1 << 20
_FOLDER = os.O_PATH | os.O_DIRECTORY


@dataclass(frozen=True)
class User:
    """The user as whom an image's commands run, as they see it."""

    uid: int
    gid: int
    home: str


class Root:
    """The root folder of an image's session. Its content is hostile: it may be anything, and change at any time.

    Args:
        path: path of the folder, as this process sees it.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a path of the root.

        Raises:
            OSError: it does not exist, or cannot be opened so.
        """
        root = os.open(self._path, _FOLDER | os.O_CLOEXEC)
        try:
            return kernel.open_within(root, path, flags, mode)
        finally:
            os.close(root)

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a regular file.

        Raises:
            OSError: it is something else, or has more than `max_bytes`.
        """
        # A pipe in the image would block the open until somebody writes to it.
        with open(self.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise OSError(f"more than {max_bytes} bytes")
        return content

    def write(self, path: str, data: bytes) -> None:
        """Write a file, with the folders above it.

        Raises:
            OSError: something else is there, or it does not fit.
        """
        os.close(self.make_folder(os.path.dirname(path)))
        # For writing, O_NONBLOCK makes the open of a pipe fail instead of waiting for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
        with open(self.open(path, flags, 0o644), "wb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")
            file.write(data)

    def make_folder(self, path: str) -> int:
        """Open a folder; make it, and those above it, if they do not exist."""
        try:
            return self.open(path or "/", _FOLDER)
        except FileNotFoundError:
            above = self.make_folder(os.path.dirname(path.rstrip("/")))
        try:
            # A program of the session may have made it meanwhile; a link instead of a folder fails in the open below.
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.basename(path.rstrip("/")), 0o755, dir_fd=above)
        finally:
            os.close(above)
        return self.open(path, _FOLDER)

    def apply(self, packed: bytes, folder: str) -> None:
        """Make the changes that `workspaces.changes.packed` has packed.

        Args:
            folder: to which their paths are relative.

        Raises:
            OSError: they do not fit, or something else is where they belong.
        """
        start = packed.index(b"\n") + 1
        place = start + int(packed[:start])
        entries, content = json.loads(packed[start:place]), memoryview(packed)  # copies could exceed the memory limit
        # Deletions first, what is inside of a folder before the folder; entries list a folder before its content.
        for path, kind, _, _ in reversed(entries):
            if kind:
                parent = self.open(os.path.join(folder, os.path.dirname(path)), _FOLDER)
                try:
                    (os.rmdir if stat.S_ISDIR(kind) else os.unlink)(os.path.basename(path), dir_fd=parent)
                finally:
                    os.close(parent)
        for path, _, mode, length in entries:
            if mode:
                self._make(os.path.join(folder, path), mode, content[place : place + length])
                place += length

    def _make(self, path: str, mode: int, data: memoryview) -> None:
        if stat.S_ISDIR(mode):
            os.close(self.make_folder(path))
            return
        parent, name = self.make_folder(os.path.dirname(path)), os.path.basename(path)
        try:
            if stat.S_ISLNK(mode):
                os.symlink(bytes(data), os.fsencode(name), dir_fd=parent)
                return
            # A link in place of the file would have been a change of its own.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), mode & 0o777)
        finally:
            os.close(parent)


def shell(root: Root) -> str:
    """Return the path of an image's shell: bash, or else sh.

    Raises:
        OSError: it has none.
    """
    for path in _SHELLS:
        with contextlib.suppress(OSError):
            os.close(root.open(path, os.O_PATH))
            return path
    raise OSError(errno.ENOENT, "the image has no shell: give a program and its arguments")


def user(root: Root, name: str) -> User:
    """Find a user in an image's /etc/passwd.

    Args:
        name: NAME, UID or either with :GROUP, as images have it; "" for root.

    Raises:
        OSError: the image does not know the name.
    """
    owner, _, group = (name or "0").partition(":")
    lines = _table(root, "/etc/passwd", 6)
    # A numeric user need not be in /etc/passwd, a name must be.
    line = next((line for line in lines if owner in (line[0], line[2])), None)
    uid = _number(owner if line is None else line[2])
    gid = _number("0" if line is None else line[3])
    if group:
        entry = next((entry for entry in _table(root, "/etc/group", 3) if group in (entry[0], entry[2])), None)
        gid = _number(group if entry is None else entry[2])
    if uid is None or gid is None:
        raise OSError(f"the image's user {name!r:.80} is not in its /etc/passwd")
    return User(uid, gid, "/" if line is None or not line[5].startswith("/") else line[5])


def _table(root: Root, path: str, columns: int) -> list[list[str]]:
    try:
        text = root.read(path, _MOST_PASSWD).decode("utf-8", "replace")
    except OSError:
        return []
    rows = [line.split(":") for line in text.splitlines()]
    return [row for row in rows if len(row) >= columns]


def _number(text: str) -> int | None:
    """Return the number of a user or group from its text; None if the text is not a number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
