"""Messages between a fork server and its clients: programs with their file descriptors, and answers."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "FORGE_RL_REPLICA"
"""Environment variable that marks a replica's processes and all their descendants."""
_HEADER = struct.Struct("!I")
_MOST_BYTES = 1 << 24
_MOST_FDS = 128
_PEER = struct.Struct("3i")


class ForkRefusal(Exception):
    """A fork server does not start a program, for the reason in the message."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program to run in a forked process, with the state that it would inherit if it were executed."""

    words: Sequence[str]
    """Arguments of Python: `-m MODULE ...` or `-c CODE ...`, options of Python before them."""
    environment: Mapping[str, str]
    folder: str
    """Working directory."""
    umask: int
    niceness: int
    blocked: Sequence[int]
    """Signals that are blocked."""
    ignored: Sequence[int]
    """Signals that are ignored."""

    @classmethod
    def here(cls, words: Sequence[str], environment: Mapping[str, str]) -> Program:
        """Describe a program that this thread would execute now."""
        # Python can read the umask only by setting it; /proc shows it.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        ignored_bits = int(status["SigIgn"], 16)
        return cls(
            words=list(words),
            environment=dict(environment),
            folder=os.getcwd(),
            umask=int(status["Umask"], 8),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            ignored=[number for number in range(1, 65) if ignored_bits >> (number - 1) & 1],
        )


def send_program(connection: socket.socket, program: Program, fds: Mapping[int, int]) -> None:
    """Send a program with file descriptors, mapping the program's numbers to this process's descriptors."""
    body = json.dumps({**asdict(program), "fds": list(fds)}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
    # The descriptors travel with the header, as the receiver takes them with the first bytes that it reads.
    connection.sendmsg([_HEADER.pack(len(body))], rights)
    connection.sendall(body)


def receive_program(connection: socket.socket) -> tuple[Program, dict[int, int]]:
    """Receive a program, and this process's descriptors by the numbers under which the program gets them.

    Raises:
        EOFError: the other side is gone.
        ValueError: it sent something else.
    """
    size = array.array("i").itemsize
    data, rights, _, _ = connection.recvmsg(
        _HEADER.size, socket.CMSG_SPACE(_MOST_FDS * size), socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    )
    received_fds = array.array("i")
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received_fds.frombytes(content[: len(content) - len(content) % size])
    if len(data) < _HEADER.size:
        raise EOFError
    (length,) = _HEADER.unpack(data)
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    fields = json.loads(_receive(connection, length))
    numbers = fields.pop("fds")
    # The kernel drops descriptors for which the receiver has no room.
    if len(numbers) != len(received_fds):
        raise ValueError(f"{len(received_fds)} descriptors came, not {len(numbers)}")
    return Program(**fields), dict(zip(numbers, received_fds, strict=True))


def send_answer(connection: socket.socket, **fields: int | str) -> None:
    """Send an answer: `pid` of the program, `status` at its end, or the `refusal`."""
    body = json.dumps(fields).encode()
    connection.sendall(_HEADER.pack(len(body)) + body)


def receive_number(connection: socket.socket, name: str) -> int:
    """Receive an answer, and return its field with this name.

    Raises:
        EOFError: the other side is gone.
        ForkRefusal: the program is not started.
    """
    (length,) = _HEADER.unpack(_receive(connection, _HEADER.size))
    fields = json.loads(_receive(connection, min(length, _MOST_BYTES)))
    if "refusal" in fields:
        raise ForkRefusal(fields["refusal"])
    return int(fields[name])


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, and its user."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
