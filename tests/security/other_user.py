"""Helpers to act as another user of the machine, `nobody`."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
NOBODY = 65534
ROOT = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_user(uid: int, work: Callable[[], T]) -> T:
    """Do work in a child that is another user, and return what it returns.

    Raises:
        AssertionError: it raised; says what.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            result: tuple[bool, object] = True, work()
        except BaseException:
            result = False, traceback.format_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        is_value, value = pickle.load(pipe)
    os.waitpid(child, 0)
    assert is_value, value
    return value  # type: ignore[no-any-return]


def connects(family: socket.AddressFamily, address: object) -> bool:
    """True if this user is let in at a socket."""
    with socket.socket(family) as client:
        client.settimeout(5)
        try:
            client.connect(address)  # type: ignore[arg-type]
        except OSError:
            return False
        return True


def opens(path: Path) -> Iterator[str]:
    """Names what this user may do with a path: list, read, write."""
    if os.path.isdir(path):  # False where nothing may be asked
        with contextlib.suppress(OSError):
            os.listdir(path)
            yield "list"
        if os.access(path, os.W_OK):
            yield "write"
        return
    for flag, name in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write")):
        with contextlib.suppress(OSError):
            os.close(os.open(path, flag | os.O_NONBLOCK))
            yield name


def can_make_networks() -> bool:
    """True if this machine lets its users make networks of their own."""
    command = [sys.executable, "-m", "forge_rl.runtime.private_network", sys.executable, "-c", "pass"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def python_of_all() -> str | None:
    """An interpreter of this version that other users can run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (getattr(sys, "_base_executable", sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            if subprocess.run([path, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/").returncode == 0:
                return path
        except OSError:
            continue
    return None
