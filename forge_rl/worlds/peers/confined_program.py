"""Starts one program as a user of its own, inside of bubblewrap, with a few of the host's addresses; stdlib only.

python -I confined_program.py SETTINGS_JSON COMMAND...

The program finds itself in namespaces without a network. For each address that it may reach, a process here listens on
the loopback interface and passes bytes to a socket of the host's.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys

MOST_BYTES = 1 << 16


def relay(port: int, path: str, listener: socket.socket) -> None:
    """Pass bytes between connections to a port and the host's socket for it, until this process is killed."""
    while True:
        connection, _ = listener.accept()
        # A process per connection: a slow one holds up no other. They count as the program's, which would otherwise
        # start as many as it likes by connecting.
        try:
            child = os.fork()
        except OSError:  # the program has too many already
            child = -1
        if child:
            connection.close()
            continue
        listener.close()
        with socket.socket(socket.AF_UNIX) as host:
            host.connect(path)
            carry(connection, host)
        os._exit(0)


def carry(connection: socket.socket, host: socket.socket) -> None:
    """Copy both directions until both have ended."""
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ, host)
    selector.register(host, selectors.EVENT_READ, connection)
    while selector.get_map():
        for key, _ in selector.select():
            try:
                data = key.fileobj.recv(MOST_BYTES)
                key.data.sendall(data)
            except OSError:
                return
            # One direction has ended, which the other side is told; the other may still carry data.
            if not data:
                selector.unregister(key.fileobj)
                try:
                    key.data.shutdown(socket.SHUT_WR)
                except OSError:
                    return


def listen(ports: dict[str, str]) -> None:
    """Start a process that listens, and its children that relay, which are reaped by the kernel."""
    sockets = {}
    for port in ports:
        # All ports listen before the program starts, so that its first connection is not refused.
        sockets[port] = socket.create_server(("127.0.0.1", int(port)))
    for port, path in ports.items():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):  # else a reader of the program's output would wait for this process too
                os.dup2(null, fd)
            relay(int(port), path, sockets[port])
    for server in sockets.values():
        server.close()


def become_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def filter_calls(program: bytes) -> None:
    """Apply a seccomp filter for good; bubblewrap has forbidden new privileges."""
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of 8-byte instructions, and their address.
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
    if libc.prctl(22, 2, fprog, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    with open("/proc/self/oom_score_adj", "w") as file:
        # If memory runs out, the kernel kills this program first.
        file.write("1000")
    # Before the ports: relays run as the program's user and under its limits as well.
    if settings["uid"]:
        become_user(settings["uid"])
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"], settings["processes"]))
    listen(settings["ports"])
    if settings["filter"]:
        filter_calls(bytes.fromhex(settings["filter"]))
    # Only these variables: the rest of the environment may hold keys.
    variables = {name: os.environ[name] for name in settings["variables"] if name in os.environ}
    os.execvpe(command[0], command, {**variables, "HOME": settings["home"], "TMPDIR": "/tmp"})


if __name__ == "__main__":
    main()
