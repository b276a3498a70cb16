"""Connects a session's Python code to its named addresses through the session's owner.

Runs inside of sessions: nothing outside trusts it. It replaces `socket.socket` and `socket.getaddrinfo`, so that
Python's clients work unchanged: a stream socket is a local one until `connect` asks the owner for a connection.
"""

from __future__ import annotations

import _thread
import os
import socket
from typing import Any

from forge_rl.sandbox.inside.frames import MOST_ADDRESS

_Plain = socket.socket
_channel: socket.socket | None = None
_names: frozenset[str] = frozenset()
_turn = _thread.allocate_lock()


class _Socket(_Plain):
    """A stream socket whose `connect` asks the session's owner."""

    _peer: Any = None

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        kind = socket.SOCK_STREAM if type == -1 else type & ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        if fileno is None and family in (-1, socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
            # The filter refuses sockets of the network. A local one with a closed peer holds the descriptor until
            # `connect`.
            end, other_end = _pair()
            other_end.close()
            super().__init__(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=end.detach())
            if type != -1 and type & socket.SOCK_NONBLOCK:
                self.setblocking(False)
        else:
            super().__init__(family, type, proto, fileno)

    def connect(self, address: Any) -> None:
        if self._peer is not None:
            raise OSError(106, "Transport endpoint is already connected")
        timeout = self.gettimeout()
        # The connection takes over this socket's number: event loops and TLS may have noted it already.
        connection_fd = _ask(str(address[0]), int(address[1]))
        os.dup2(connection_fd, self.fileno(), inheritable=False)
        os.close(connection_fd)
        self.settimeout(timeout)
        self._peer = address[:2]

    def connect_ex(self, address: Any) -> int:
        try:
            self.connect(address)
        except OSError as error:
            return error.errno or 1
        return 0

    def getpeername(self) -> Any:
        return super().getpeername() if self._peer is None else self._peer

    def setsockopt(self, *option: Any) -> None:
        """Ignore all options: none has a meaning here."""


def _pair() -> tuple[socket.socket, socket.socket]:
    """Make a local connection of plain sockets."""
    # `socket.socketpair` would return sockets of the class that replaces `socket.socket`.
    import _socket

    first, second = _socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _Plain(fileno=first.detach()), _Plain(fileno=second.detach())


def _ask(host: str, port: int) -> int:
    """Ask the owner for a connection to an address; return its descriptor.

    Raises:
        OSError: this session has no network, or the owner refuses; says why.
    """
    if _channel is None:
        raise OSError(101, "Network is unreachable")
    request = f"{host.lower().rstrip('.')}:{port}".encode("ascii", "replace")[:MOST_ADDRESS]
    with _turn:  # answers come in the order of requests
        _channel.send(request)
        answer, descriptors, _, _ = socket.recv_fds(_channel, MOST_ADDRESS, 1)
    if descriptors:
        return descriptors[0]
    raise ConnectionRefusedError(111, f"{host}:{port}: {answer[1:].decode('utf-8', 'replace') or 'refused'}")


def _find(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> list[Any]:
    """Answer for `getaddrinfo` with the name itself, which the owner resolves."""
    name = host.decode() if isinstance(host, bytes) else str(host)
    number = {"http": 80, "https": 443}.get(str(port), port)
    if f"{name.lower().rstrip('.')}:{number}" not in _names:
        # Refused here only for a clear message: the owner checks each request itself.
        raise socket.gaierror(socket.EAI_NONAME, f"{name}:{number} is not one of the session's network=(...)")
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (name, int(number)))]


def give(channel: int, names: list[str]) -> None:
    """Let this process connect to named addresses, by a channel to its owner."""
    global _channel, _names, _turn
    forget()
    _channel, _names, _turn = _Plain(fileno=channel), frozenset(names), _thread.allocate_lock()
    socket.socket, socket.getaddrinfo = _Socket, _find  # type: ignore[misc]


def forget() -> None:
    """Close the channel: two processes that read from it would get each other's answers."""
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None
