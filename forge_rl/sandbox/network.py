"""Named network addresses for a session: its owner connects and passes bytes on. The session itself has no network.

A session asks for an address over a channel; if it was named, the answer is one end of a new local connection, and the
owner copies bytes between its other end and the address. Of a command's connection, the session sends the owner the end
that it has accepted, and the owner copies between that and the address. Names are resolved here, and one that leads to
a private address is refused: only the literal address can be named for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ConfigError
from forge_rl.sandbox.host import readable
from forge_rl.sandbox.inside.frames import MOST_ADDRESS
from forge_rl.system.tasks import TaskGroup

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_DIAL_S = 10.0
_PLACES = 4
"""Addresses of a host that are tried: where it has one of IPv6, the machine may have no way there."""
_CONNECTIONS = 16
"""Open connections of a session."""
_CHUNK = 1 << 16
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]")
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")))
"""Networks of IPv6 whose addresses stand for ones of IPv4."""


class _RefusedConnectionError(Exception):
    """A refusal, whose text the session gets."""


def named_addresses(addresses: Iterable[str]) -> frozenset[str]:
    """Return addresses in the form in which sessions ask for them.

    Raises:
        ConfigError: one is not HOST:PORT.
    """
    named = set()
    for address in addresses:
        host, _, port = address.lower().rpartition(":")
        host = host.removesuffix(".")
        if not (_HOST.fullmatch(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(
                f"network={address!r}", hint="name hosts and ports, such as example.org:443, 10.0.0.5:8080 or [::1]:80"
            )
        named.add(f"{_plain(host)}:{int(port)}")
    return frozenset(named)


class _GivenSocket(socket.socket):
    """A connection of which the session may hold another descriptor: it can make both block again at any time.

    Each read and write therefore says for itself that it does not wait.
    """

    @classmethod
    def of(cls, fd: int) -> _GivenSocket | None:
        """Take a descriptor; one that is not a stream socket is closed, which returns None."""
        try:
            connection = cls(fileno=fd)
        except OSError:
            os.close(fd)
            return None
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(size, flags | socket.MSG_DONTWAIT)

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        return super().send(data, flags | socket.MSG_DONTWAIT)

    def reset(self) -> None:
        """Close the connection so that its other end sees an error."""
        with self, contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class SessionNetwork:
    """The connections of one session; `close` ends them, as the end of the session does.

    Args:
        addresses: hosts with ports that the session may connect to, from `named_addresses`.
    """

    def __init__(self, addresses: frozenset[str]) -> None:
        self.addresses = addresses
        self._channel, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """`theirs` is the session's end, to be sent to it and then closed here."""
        self._channel.setblocking(False)
        self._relays: set[asyncio.Task[None]] = set()
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End all connections."""
        tasks = [self._serving, *self._relays]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> None:
        """Answer requests, one after another, until the session has ended or does not take its answers."""
        loop = asyncio.get_running_loop()
        # A session that does not take its answers makes `send` fail, as the channel never blocks: its service ends.
        with self._channel, contextlib.suppress(OSError), self._relays_end():
            while True:
                await readable(loop, self._channel)
                request, descriptors, _, _ = socket.recv_fds(self._channel, MOST_ADDRESS, 1)
                if not request:
                    return
                address = request.decode("ascii", "replace")
                if descriptors:
                    self._connect(address, descriptors)
                    continue
                try:
                    outside = await self._dial(address)
                except _RefusedConnectionError as refused:
                    self._channel.send(b"-" + str(refused).encode()[:MOST_ADDRESS])
                    continue
                ours, theirs = socket.socketpair()
                with theirs:
                    self._keep(_relay(ours, outside))
                    socket.send_fds(self._channel, [b"+"], [theirs.fileno()])

    def _keep(self, relay: Coroutine[None, None, None]) -> None:
        """Run the task that serves a connection; it counts against the session's connections until it ends."""
        task = asyncio.create_task(relay)
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    def _connect(self, address: str, descriptors: list[int]) -> None:
        """Serve a connection that a command has made; the descriptor may be anything."""
        for fd in descriptors[1:]:
            os.close(fd)
        inside = _GivenSocket.of(descriptors[0])
        if inside is None:
            return
        if len(self._relays) >= _CONNECTIONS:
            inside.reset()
            return
        self._keep(self._dial_and_relay(address, inside))

    async def _dial_and_relay(self, address: str, inside: _GivenSocket) -> None:
        try:
            outside = await self._dial(address, places=1)
        except _RefusedConnectionError:
            inside.reset()
            return
        except BaseException:
            inside.close()
            raise
        await _relay(inside, outside)

    @contextlib.contextmanager
    def _relays_end(self) -> Iterator[None]:
        """End all connections at the end of the context, when the session is gone."""
        try:
            yield
        finally:
            for relay in self._relays:
                relay.cancel()

    async def _dial(self, address: str, places: int = 0) -> socket.socket:
        """Connect to an address.

        Args:
            places: how many of the session's connections are this one already.

        Raises:
            _RefusedConnectionError: it was not named, or cannot be reached; says why.
        """
        if address not in self.addresses:
            raise _RefusedConnectionError("this address is not one of the session's network=(...)")
        if len(self._relays) - places >= _CONNECTIONS:
            raise _RefusedConnectionError(f"the session has {_CONNECTIONS} open connections")
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_DIAL_S):
                # Looked up once: what was checked is what is connected to, so that a name cannot lead elsewhere in
                # between.
                address_infos = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                reachable = [info for info in address_infos if _may_lead_to(host, str(info[4][0]))]
                if not reachable:
                    raise _RefusedConnectionError(
                        "its name leads to private addresses, which have to be named themselves"
                    )
                return await _connected(reachable[:_PLACES])
        except TimeoutError:
            raise _RefusedConnectionError(f"no connection within {_DIAL_S:g} s") from None
        except (socket.gaierror, UnicodeError):
            raise _RefusedConnectionError("it cannot be reached: unknown name") from None
        except OSError as error:  # asyncio's own text would disclose the resolved address to the session
            raise _RefusedConnectionError(f"it cannot be reached: {os.strerror(error.errno or 0)}") from None


async def _connected(address_infos: Sequence[tuple[Any, ...]]) -> socket.socket:
    """Connect to the first address of a host that answers.

    Raises:
        OSError: none does; the last one's error.
    """
    failure = OSError()
    for family, kind, protocol, _, target in address_infos:
        outside = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        outside.setblocking(False)
        try:
            async with asyncio.timeout(_DIAL_S / len(address_infos)):
                await asyncio.get_running_loop().sock_connect(outside, target)
            return outside
        except OSError as error:  # a TimeoutError too
            outside.close()
            failure = error
        except BaseException:
            outside.close()
            raise
    raise failure


def _plain(host: str) -> str:
    """Normalize an address; names stay."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host


def _may_lead_to(host: str, address: str) -> bool:
    """Return whether a host may lead to an IP address: a name only to a public one, a literal address to any."""
    if _is_address(host):
        return True
    # A zone, as in fe80::1%eth0, is no part of the address.
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and any(ip in network for network in _TRANSLATED):
        return False
    # ::ffff:10.0.0.1 reaches 10.0.0.1.
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return mapped.is_global and not mapped.is_multicast


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _relay(inside: socket.socket, outside: socket.socket) -> None:
    """Copy bytes both ways until both sides have ended, or one breaks."""
    with inside, outside, contextlib.suppress(OSError, ExceptionGroup):
        inside.setblocking(False)
        async with TaskGroup() as group:
            group.create_task(_copy(inside, outside))
            group.create_task(_copy(outside, inside))


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while part := await loop.sock_recv(source, _CHUNK):
        await loop.sock_sendall(target, part)
    # Half closed, as the source is: the other direction may still have bytes to carry.
    target.shutdown(socket.SHUT_WR)
