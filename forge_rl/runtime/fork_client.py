"""Stands in for `python`: has a fork server run a program, and ends as it ends; without a server, becomes the program.

python -m forge_rl.runtime.fork_client -m MODULE ...

The parent sees one process, which outlives stop signals and takes the program with it when it is killed or its parent
ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from forge_rl.runtime.fork_messages import (
    MARK,
    ForkRefusal,
    Program,
    peer,
    receive_number,
    send_program,
)
from forge_rl.runtime.signals import STOP_SIGNALS

FORK_MODULES = "FORGE_RL_FORK_MODULES"
"""Environment variable with the modules, comma-separated, that a fork server imports for a program."""
FORK_SERVER = "FORGE_RL_FORK_SERVER"
"""Environment variable of a program that a fork server runs: name of the server, and the modules that it imports."""
PATIENCE = "FORGE_RL_FORK_PATIENCE_S"
"""Environment variable: seconds for which a program waits for the imports of its server, and is then executed; no
limit if unset."""
NO_FORK = "FORGE_RL_NO_FORK"
"""Environment variable with which the user has every program executed; no fork server is started."""
FAILURE = "FORGE_RL_FORK_FAILURE"
"""Environment variable of a program that no fork server runs: why not."""
MARK_ROOM = 512
"""Bytes of a server's own mark: room for the marks of the processes that it forks."""
_OF_ONE_PROCESS = ("HYPERACTOR_", "MONARCH_", "FORGE_RL_FORK_", MARK)
"""Prefixes of variables that differ between processes, and that no import reads."""
_BOUND_S = 10.0
"""Seconds for a new server to exist; its imports take longer, and requests wait for them."""
_LOOK_S = 1.0
_STOPPED_LOOKS = 3


def server_variable(key: str, environment: Mapping[str, str | None], modules: str) -> str:
    """Return the value of FORK_SERVER for a program.

    Imports read the environment, so that each environment has a server of its own.

    Args:
        key: a secret of the run.
        environment: the program's, as far as known; None for a variable that it does not have.
        modules: as in FORK_MODULES.
    """
    variables = sorted((name, value) for name, value in environment.items() if not name.startswith(_OF_ONE_PROCESS))
    # The key makes the name unguessable, and separates the servers of concurrent runs.
    name = hashlib.sha256(repr((key, variables, modules)).encode()).hexdigest()[:32]
    return f"forge_rl-{name}:{modules}"


def start_server(variable: str, environment: Mapping[str, str], owner: int) -> None:
    """Start the server of a FORK_SERVER variable, unless it runs; it ends with the process `owner`."""
    name, _, modules = variable.partition(":")
    with contextlib.suppress(OSError):
        _connect(name).close()
        return
    shared = {key: value for key, value in environment.items() if not key.startswith(_OF_ONE_PROCESS)}
    # OpenBLAS would start threads on import; titles of processes must leave their marks in /proc alone.
    defaults = {"OPENBLAS_NUM_THREADS": "1", "SPT_NOENV": "1"}
    subprocess.Popen(
        # Its output goes nowhere: programs have their own descriptors, and each requester hears of failed imports.
        [sys.executable, "-m", "forge_rl.runtime.fork_server", name, str(owner), *modules.split(",")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**defaults, **shared, MARK: "-" * MARK_ROOM},
    )


async def await_server(variable: str, deadline_s: float) -> None:
    """Wait until a server that was started has imported its modules, has ended, or the deadline has passed."""
    import asyncio  # which programs' clients do without

    until = time.monotonic() + _BOUND_S
    while time.monotonic() < until:
        try:
            connection = _connect(variable.partition(":")[0])
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
            continue
        except OSError:  # it is another user's: programs are executed
            return
        with connection, contextlib.suppress(OSError):  # a TimeoutError is one
            connection.setblocking(False)
            connection.shutdown(socket.SHUT_WR)  # a request that says nothing: it is closed as soon as it is read
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_recv(connection, 1)
        return


def main(words: Sequence[str]) -> NoReturn:
    """Run a program, given as Python's arguments, in a process forked by the server of this environment."""
    # Opened before anything else: a descriptor still refers to the parent after its PID has been reused.
    parent_fd = os.pidfd_open(os.getppid())
    environment = dict(os.environ)
    program = Program.here(words, environment)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    variable = environment[FORK_SERVER]
    try:
        connection = _server(variable, environment)
        send_program(connection, program, {fd: fd for fd in (0, 1, 2)})
        _wait(connection, parent_fd, float(environment.get(PATIENCE, "inf")))
        pid = receive_number(connection, "pid")
    except (OSError, EOFError, ForkRefusal, ValueError) as error:
        _execute(program, f"{type(error).__name__}: {error}".removesuffix(": "))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # these belong to the program
        os.dup2(null, fd)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(parent_fd, select.POLLIN)
    # Exiting closes the connection, upon which the keeper ends the program.
    if parent_fd in dict(poll.poll()):
        os._exit(1)
    try:
        status = receive_number(connection, "status")
    except (OSError, EOFError):  # its keeper was killed
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        status = -signal.SIGKILL
    _end_as(status)


def _server(variable: str, environment: Mapping[str, str]) -> socket.socket:
    """Connect to the server; start it first if necessary."""
    name = variable.partition(":")[0]
    until = time.monotonic() + _BOUND_S
    start_server(variable, environment, os.getppid())
    while True:
        try:
            return _connect(name)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
        if peer(connection)[1] != os.geteuid():
            raise PermissionError(f"the socket {name} belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def _wait(connection: socket.socket, parent_fd: int, patience_s: float) -> None:
    """Wait for an answer unless the server is stopped.

    Raises:
        TimeoutError: the server is stopped, or has not answered in time.
    """
    until = time.monotonic() + patience_s
    server = peer(connection)[0]
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(parent_fd, select.POLLIN)
    stopped_looks = 0
    while not (events := dict(poll.poll(_LOOK_S * 1000))):
        with contextlib.suppress(OSError):
            # A stopped server still appears to accept connections, since the kernel does that.
            state = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0]
            stopped_looks = stopped_looks + 1 if state in ("T", "t") else 0
        if stopped_looks == _STOPPED_LOOKS:
            raise TimeoutError("the fork server is stopped")
        if time.monotonic() > until:
            raise TimeoutError(f"the fork server still imports after {patience_s:g} s")
    if parent_fd in events:
        os._exit(1)


def _execute(program: Program, failure: str) -> NoReturn:
    """Become the program, which learns from FAILURE why it is not forked."""
    for number in STOP_SIGNALS:
        if number not in program.ignored:
            signal.signal(number, signal.SIG_DFL)
    environment = {name: value for name, value in program.environment.items() if name != FORK_SERVER}
    os.execve(sys.executable, [sys.executable, *program.words], environment | {FAILURE: failure})


def _end_as(status: int) -> NoReturn:
    """Exit with a status, or by a signal if the status is negative."""
    if status < 0:
        # The crash was the program's; this process must not dump core for it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no other handler
            signal.signal(-status, signal.SIG_DFL)
        # A blocked signal would stay pending, and the process would exit with a status instead.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1:])
