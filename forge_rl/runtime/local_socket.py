"""Unix sockets in a folder, reachable only by processes of this user, also from another network namespace.

A Unix socket's path has at most 108 bytes, which deep folders exceed, so paths are relative to the folder's descriptor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def listening(folder: Path, name: str) -> Iterator[socket.socket]:
    """Listen while the body runs, in a folder that only this user may enter; replaces an existing socket.

    Raises:
        OSError: the file system does not support sockets, or the folder is not writable.
    """
    with _opened(folder) as fd, socket.socket(socket.AF_UNIX) as listener:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        os.fchmod(listener.fileno(), 0o600)  # becomes the mode of the socket file
        listener.bind(_path(fd, name))
        try:
            listener.listen(16)
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)


def connect(folder: Path, name: str, *, timeout_s: float) -> socket.socket:
    """Connect to a socket in a folder.

    Raises:
        OSError: nobody is listening, or another user is.
    """
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(timeout_s)
        with _opened(folder) as fd:
            client.connect(_path(fd, name))
        if not peer_is_own(client):
            raise PermissionError(f"another user is listening at {folder / name}")
    except BaseException:
        client.close()
        raise
    return client


def peer_is_own(connection: socket.socket) -> bool:
    """Return True if the process at the other end belonged to this user when it connected or began to listen."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _path(fd: int, name: str) -> str:
    return f"/proc/self/fd/{fd}/{name}"
