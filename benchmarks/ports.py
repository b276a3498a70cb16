"""A free port of this machine, for servers that must be given one."""

from __future__ import annotations

import contextlib
import random
import socket


def unused_port() -> int:
    """Return a port of this host on which nobody listens.

    The system hands out ports from 32768 on, to a connection that another process opens meanwhile too; not these.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
