"""Network namespaces for commands, whose loopback has a listener for each of a session's named addresses.

Programs connect as usual, by a name of /etc/hosts or an address. What a listener accepts goes to the session's owner,
who alone connects to the outside. Runs out of the commands' reach; imports only modules of this folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from forge_rl.sandbox.inside import kernel

MOST_ADDRESSES = 64
"""Listeners of a session, within its open files."""
_BACKLOG = 64
_SET_FLAGS, _UP = 0x8914, 1  # linux/sockios.h, linux/if.h
# linux/rtnetlink.h and linux/if_addr.h.
_NEW_ADDRESS, _REQUEST, _ACKNOWLEDGE, _CREATE, _NO_DETECTION, _ADDRESS, _LOCAL = 20, 1, 4, 0x400, 2, 1, 2
_LOOPBACK = 1
"""Index of a namespace's first interface."""
_EXISTS = -17


class Gate(NamedTuple):
    """A named address, and where commands reach it."""

    name: str
    """HOST:PORT, as the owner knows it."""
    address: str
    """IP address on the commands' loopback."""
    port: int


class Passage(NamedTuple):
    """The network of one command, whose descriptors `close` closes."""

    users: int
    """Descriptor of the user namespace that the network belongs to."""
    network: int
    listeners: dict[int, Gate]

    def enter(self) -> None:
        """Make the network this process's own."""
        kernel.enter_network(self.users, self.network)

    def close(self) -> None:
        for fd in (self.users, self.network, *self.listeners):
            os.close(fd)


def gates_of(names: Sequence[str]) -> tuple[list[Gate], str]:
    """Return the gates of named addresses, and the lines of /etc/hosts by which programs find those that are names."""
    places: dict[str, str] = {}
    gates = []
    for name in names:
        host, _, port = name.rpartition(":")
        try:
            _packed(host)
            address = host
        except OSError:
            # Not 127.0.0.1, at whose ports a command's own servers listen.
            address = places.setdefault(host, f"127.1.0.{len(places) + 1}")
        gates.append(Gate(name, address, int(port)))
    return gates, "".join(f"{address} {host}\n" for host, address in places.items())


def opened(gates: Sequence[Gate]) -> Passage:
    """Make a network with a loopback only, which has the gates' addresses and listens there.

    Raises:
        OSError: it cannot be made here; says at which address.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        # A child enters the namespaces and sends them here: this process must stay outside, to start bubblewrap for the
        # next command.
        child = os.fork()
        if child == 0:
            try:
                _send_passage(theirs, gates)
            except BaseException as error:
                theirs.send(str(error).encode("utf-8", "replace")[:1024] or b"?")
            finally:
                os._exit(0)
        theirs.close()
        text, descriptors, _, _ = socket.recv_fds(ours, 1024, MOST_ADDRESSES + 2)
        os.waitpid(child, 0)
    # The kernel drops descriptors without an error where a process has no room for more.
    if len(descriptors) != len(gates) + 2:
        for fd in descriptors:
            os.close(fd)
        raise OSError(f"the network of a command could not be made: {text.decode('utf-8', 'replace') or 'killed'}")
    for fd in descriptors:
        os.set_inheritable(fd, False)
    users, network, *listeners = descriptors
    return Passage(users, network, dict(zip(listeners, gates, strict=True)))


def pass_on(listener: int, gate: Gate, owner: socket.socket) -> None:
    """Hand a connection that waits at a listener to the owner; reset it if the owner has no room for it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener)) as waiting:
        # Non-blocking: the command may have given up meanwhile, and the listener is empty then.
        connection, _ = waiting.accept()
        with connection:
            try:
                socket.send_fds(owner, [gate.name.encode()], [connection.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                # A linger of 0 s makes closing send a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _send_passage(channel: socket.socket, gates: Sequence[Gate]) -> None:
    uid = os.getuid()
    kernel.enter_user_namespace(uid, kernel.NEW_NETWORK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # struct ifreq: 16 bytes of name, flags, and the rest of 40 bytes. A new network's loopback is down.
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        for address in {gate.address for gate in gates}:
            _add_address(route, address)
    descriptors = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]
    for gate in gates:
        listener = socket.socket(_packed(gate.address)[0], socket.SOCK_STREAM)
        try:
            # Ports below 1024 too: this process has all capabilities in its own user namespace, to which the network
            # belongs.
            listener.bind((gate.address, gate.port))
        except OSError as error:
            raise OSError(f"{gate.name}: {error}") from None
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        descriptors.append(listener.detach())
    socket.send_fds(channel, [b"+"], descriptors)


def _packed(address: str) -> tuple[int, bytes]:
    """Return the family and the bytes of an IP address.

    Raises:
        OSError: it is none.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.inet_pton(family, address)


def _add_address(route: socket.socket, address: str) -> None:
    """Give the loopback of this process's network one more address."""
    family, packed = _packed(address)
    # struct ifaddrmsg: family, length of the prefix in bits, flags, scope, index; then an rtattr for each address.
    body = struct.pack("BBBBI", family, 8 * len(packed), _NO_DETECTION, 0, _LOOPBACK)
    for kind in (_LOCAL, _ADDRESS):
        body += struct.pack("HH", 4 + len(packed), kind) + packed
    # struct nlmsghdr: length, type, flags, sequence, port.
    head = struct.pack("IHHII", 16 + len(body), _NEW_ADDRESS, _REQUEST | _ACKNOWLEDGE | _CREATE, 1, 0)
    route.send(head + body)
    # An NLMSG_ERROR, also for success: a header of 16 bytes, then 0 or a negative errno.
    [code] = struct.unpack_from("i", route.recv(4096), 16)
    if code not in (0, _EXISTS):
        raise OSError(-code, f"{address}: {os.strerror(-code)}")
