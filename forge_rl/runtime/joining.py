"""How a host joins a live run: its command, the address at which it serves, and what the controller accepts from it."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError
from forge_rl.runtime.addresses import is_trusted
from forge_rl.runtime.children import quiet_stderr
from forge_rl.system.terminal import clipped

if TYPE_CHECKING:
    from monarch.actor import HostMesh

_TAIL_BYTES = 4096
_SOCKET = re.compile(r"(?:[\w-]+<\w+>@)?ipc://(/[\w./-]{1,100})")
_TCP = re.compile(r"Tcp\(\[?([0-9a-fA-F:.]+?)\]?:[0-9]+\)")
"""Monarch's description of a transport."""


def join_command(folder: Path, name: str, *, python: str = "", interface: str = "", public: bool = False) -> list[str]:
    """Return the command by which a machine joins the run in a folder under a name."""
    command = [python or sys.executable, "-m", "forge_rl", "join", str(folder.resolve()), "--name", name]
    return command + ["--interface", interface] * bool(interface) + ["--public"] * public


def host_log(folder: Path, name: str) -> Path:
    """Return the file for the output of a command by which a host joins."""
    return folder.resolve() / "logs" / f"host-{name}.log"


def last_line(log: Path) -> str:
    """Return the last error in a host's log, or its last line, after a colon; "" if it is empty or missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    printed_lines = [clipped(line.strip(), lines=1, width=300) for line in reversed(lines) if line.strip()]
    errors = [line for line in printed_lines if line.startswith("error: ")]
    return next((f": {line}" for line in errors + printed_lines), "")


def controller_address() -> str:
    """Return the IP address on which Monarch serves in this process; "" if only processes of this machine reach it."""
    import monarch.config

    match = _TCP.search(str(monarch.config.get_global_config().get("default_transport")))
    return match[1] if match else ""


def attach_host(name: str, address: str, *, may_be_public: bool) -> HostMesh:
    """Connect to a worker of Monarch that serves at an address: a private IP address, or this user's socket here.

    Nothing is sent before the first process is spawned there.

    Raises:
        ConfigError: the address is something else, or the worker there could not reach this process.
    """
    # The address comes from the host that joins, and Monarch executes what it receives from there.
    socket = _SOCKET.fullmatch(address) if isinstance(address, str) else None
    if socket is None and not (isinstance(address, str) and is_trusted(address, may_be_public=may_be_public)):
        raise ConfigError(
            f"a host serves at {address!r:.100}, which is neither a private address nor a socket of this machine",
            hint="start it with: python -m apps.join FOLDER",
        )
    if socket is not None and not _is_own_socket(Path(socket[1])):
        raise ConfigError(f"{socket[1]} is not a socket of this user", hint="start the host as the user of the run")
    if socket is None and not controller_address():
        raise ConfigError(
            "the run serves only its own machine, which no other can join",
            hint="start it with --job allocation or slurm, whose network other machines reach",
        )
    with quiet_stderr():
        from monarch.actor import attach_to_workers

        return attach_to_workers(name=identifier(name), ca="trust_all_connections", workers=[address])


def identifier(name: str) -> str:
    """Return a host's name with only the characters that Monarch allows."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _is_own_socket(path: Path) -> bool:
    """Return whether a path is a socket that only this user can have put there."""
    try:
        # Links are not followed: they could lead to another user's socket.
        path_status, folder_status = path.lstat(), path.parent.lstat()
    except OSError:
        return False
    private = (
        stat.S_ISDIR(folder_status.st_mode)
        and folder_status.st_uid == os.geteuid()
        and not folder_status.st_mode & 0o077
    )
    return private and stat.S_ISSOCK(path_status.st_mode) and path_status.st_uid == os.geteuid()
