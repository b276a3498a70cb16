"""Private network namespace for a program, so that no other user of the machine can reach its sockets (Linux).

python -m forge_rl.runtime.private_network ipython

Monarch listens on abstract Unix sockets, gloo and vLLM on loopback ports, all without authentication, and all of them
belong to a network namespace. In its own namespace a program has only a loopback interface: nobody else can reach what
it starts, and it cannot reach other machines. Ports meant for others are opened by a process that stays outside and
passes the sockets in; see `listen_outside`.

This file also runs as a script that imports nothing else from this library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

_VARIABLE = "FORGE_RL_PRIVATE_NETWORK"
"""Environment variable with the descriptor of the channel to the process outside, and the PID that owns it."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_NS_GET_USERNS = 0xB701
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def is_private() -> bool:
    """Return True if, according to the kernel, no other user of the machine is in this process's network.

    Without privileges, a network is private if it belongs to a user namespace that maps only this user. For root, it is
    private if it was created by `enter` or `ip netns` and no process of another user is in it.
    """
    return _is_of_one_user() or _is_apart()


def has_way_out() -> bool:
    """Return True if `enter` started this process, so that it may use `listen_outside`."""
    return _channel() is not None


def enter(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command in a private network; PID, open files and working directory stay."""
    inside, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-I", __file__, "--outside", str(outside.fileno())],
        pass_fds=[outside.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it ends with the channel, not with Ctrl-C
        env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
    )
    outside.close()
    sys.stdout.flush()
    sys.stderr.flush()
    inside.set_inheritable(True)
    # Only a single-threaded process may create a user namespace, so a fresh interpreter does it.
    os.execv(sys.executable, [sys.executable, "-I", __file__, "--inside", str(inside.fileno()), *command])


def listen_outside(host: str, port: int) -> socket.socket:
    """Return a socket that listens in the machine's network on a port; 0 picks a free one.

    Raises:
        OSError: the port is in use, or the address does not exist.
    """
    fd = _channel()
    if fd is None:
        raise OSError(errno.EBADF, "this process has no channel out of its network")
    with socket.socket(fileno=os.dup(fd)) as channel:
        channel.send(json.dumps([host, port]).encode())
        reply, fds, _, _ = socket.recv_fds(channel, 4096, 1)
    if not fds:
        raise OSError(*json.loads(reply or '[5, "the process outside has ended"]'))
    return socket.socket(fileno=fds[0])


def _is_of_one_user() -> bool:
    with open("/proc/self/uid_map") as file:
        mappings = [line.split() for line in file]
    if len(mappings) != 1 or mappings[0][2] != "1":
        return False
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        # The user namespace that owns the network must be this process's own, which maps this user alone.
        owner = fcntl.ioctl(network, _NS_GET_USERNS)
    except OSError:  # the namespace belongs to a more privileged user
        return False
    finally:
        os.close(network)
    try:
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))
    finally:
        os.close(owner)


def _is_apart() -> bool:
    namespace = os.stat("/proc/self/ns/net")
    has_left = False
    for process in _who_may_be_outside():
        with contextlib.suppress(OSError):  # no permission
            has_left |= not os.path.samestat(namespace, (process / "ns" / "net").stat())
    if not has_left:
        return False
    # A process whose network cannot be read counts as being in this one.
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid != os.geteuid() and os.path.samestat(namespace, (process / "ns" / "net").stat()):
                return False
        except (FileNotFoundError, ProcessLookupError):  # it exited
            continue
        except OSError:
            return False
    return True


def _who_may_be_outside() -> Iterator[Path]:
    """Find the process that `enter` started outside, and this process's ancestors, which `ip netns` leaves outside."""
    pid = os.getpid()
    with contextlib.suppress(OSError):  # not every kernel lists children
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"--outside" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                yield Path(f"/proc/{child}")
    while (pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) > 0:
        yield Path(f"/proc/{pid}")


def _channel() -> int | None:
    """Return the descriptor of this process's channel to the process outside, if any."""
    fd, _, pid = os.environ.get(_VARIABLE, "").partition(" ")
    if not fd.isdecimal() or pid != str(os.getpid()):
        return None
    try:
        with socket.socket(fileno=os.dup(int(fd))) as channel:
            return int(fd) if channel.type == socket.SOCK_SEQPACKET and channel.family == socket.AF_UNIX else None
    except OSError:
        return None


def _inside(channel: int, command: Sequence[str]) -> NoReturn:
    """Create the network and exec the command in it."""
    try:
        _unshare()
        with socket.socket() as any_socket:  # the loopback interface is initially down
            request = struct.pack("16sH14x", b"lo", 0)
            flags = struct.unpack_from("16xH", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[0]
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    except OSError as error:
        sys.exit(
            f"error: this machine does not let its users create private networks: {error.strerror}\n"
            "hint: drop --private-network, and keep other users off the machine or run in your own container"
        )
    os.environ[_VARIABLE] = f"{channel} {os.getpid()}"
    os.execvp(command[0], list(command))


def _unshare() -> None:
    """Create the network namespace: directly if privileged, else in a user namespace that keeps this user's UID."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # In this order: gid_map can be written without privileges only once setgroups is denied (user_namespaces(7)).
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _outside(channel: socket.socket) -> None:
    """Open ports for the process inside until it exits."""
    # Empty once no process holds the other end of the channel.
    while request := channel.recv(4096):
        host, port = json.loads(request)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, port), family=family, backlog=2048) as listener:
                socket.send_fds(channel, [b"ok"], [listener.fileno()])
        except OSError as error:
            channel.send(json.dumps([error.errno, str(error.strerror or error)]).encode())


if (_inherited := _channel()) is not None:  # children, such as environments, must not open ports outside
    os.set_inheritable(_inherited, False)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--outside"]:
        _outside(socket.socket(fileno=int(sys.argv[2])))
    elif sys.argv[1:2] == ["--inside"]:
        _inside(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:] and not sys.argv[1].startswith("-"):
        enter(sys.argv[1:])
    else:
        sys.exit("usage: python -m forge_rl.runtime.private_network COMMAND [ARGUMENT ...]")
