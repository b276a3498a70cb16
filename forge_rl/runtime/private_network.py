"""A network of a program's own: no other user of the machine reaches its sockets (Linux).

python -m forge_rl.runtime.private_network ipython

Monarch listens on abstract Unix sockets, gloo and vLLM on ports of the loopback interface, and none of them asks who
connects. All of these belong to a network namespace. In one of its own a program has a loopback interface and nothing
else: what it starts is reached by itself alone, and it reaches no other machine. Ports that others are meant to reach
are opened by a process that stays outside and hands them in; see `listen_outside`.

This file is also run alone, by an interpreter that imports nothing else of this library.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

_VARIABLE = "FORGE_RL_PRIVATE_NETWORK"
"""Environment variable with the descriptor of the channel to the process outside, and the process whose it is."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def _keep_channel() -> None:
    """Leave the channel to this process: children, such as those that run worlds, open no ports outside."""
    fd, pid = os.environ[_VARIABLE].split()
    if int(pid) == os.getpid():
        os.set_inheritable(int(fd), False)


def is_private() -> bool:
    """Return True if this process is in a network of its own that `enter` made."""
    return _VARIABLE in os.environ


def enter(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command in a network of its own; it keeps its number, files and folder."""
    ours, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-I", __file__, "--outside", str(outside.fileno())],
        pass_fds=[outside.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it ends with the channel, not by Ctrl-C
    )
    outside.close()
    sys.stdout.flush()
    sys.stderr.flush()
    ours.set_inheritable(True)
    # Only a process of one thread may make a user namespace, so a fresh interpreter does it.
    os.execv(sys.executable, [sys.executable, "-I", __file__, "--inside", str(ours.fileno()), *command])


def listen_outside(host: str, port: int) -> socket.socket:
    """Return a socket that listens in the machine's own network, on a port, or with 0 on a free one.

    Raises:
        OSError: the port is in use, or there is no such address.
    """
    channel = socket.socket(fileno=os.dup(int(os.environ[_VARIABLE].split()[0])))
    with channel:
        channel.send(json.dumps([host, port]).encode())
        reply, fds, _, _ = socket.recv_fds(channel, 4096, 1)
    if not fds:
        raise OSError(*json.loads(reply or '[5, "the process outside has ended"]'))
    return socket.socket(fileno=fds[0])


def _inside(channel: int, command: Sequence[str]) -> NoReturn:
    """Make the network, and become the command in it."""
    try:
        _unshare()
        with socket.socket() as any_socket:  # the loopback interface begins switched off
            request = struct.pack("16sH14x", b"lo", 0)
            flags = struct.unpack_from("16xH", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[0]
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    except OSError as error:
        sys.exit(
            f"error: this machine does not let its users make networks of their own: {error.strerror}\n"
            "hint: leave out --private-network, and keep other users off the machine or run in a container of your own"
        )
    os.environ[_VARIABLE] = f"{channel} {os.getpid()}"
    os.execvp(command[0], list(command))


def _unshare() -> None:
    """Leave the network, as who may, or in a user namespace in which this user keeps its number."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _outside(channel: socket.socket) -> None:
    """Open ports for the process inside until it ends."""
    while request := channel.recv(4096):
        host, port = json.loads(request)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, port), family=family, backlog=2048) as listener:
                socket.send_fds(channel, [b"ok"], [listener.fileno()])
        except OSError as error:
            channel.send(json.dumps([error.errno, str(error.strerror or error)]).encode())


if is_private():
    _keep_channel()

if __name__ == "__main__":
    if sys.argv[1:2] == ["--outside"]:
        _outside(socket.socket(fileno=int(sys.argv[2])))
    elif sys.argv[1:2] == ["--inside"]:
        _inside(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:] and not sys.argv[1].startswith("-"):
        enter(sys.argv[1:])
    else:
        sys.exit("usage: python -m forge_rl.runtime.private_network COMMAND [ARGUMENT ...]")
