"""Runs a command under a supervisor that kills all its descendants, even those in their own sessions.

This file also runs as a script that imports nothing else from this library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_S = 30.0
"""Maximum seconds of repeated kills; processes that the kernel keeps longer are left behind."""


def supervised(command: Sequence[str], limits: Mapping[str, int] | None = None) -> list[str]:
    """Return the command line of a supervisor that runs a command.

        Popen(supervised(["node", "agent.js"], {"RLIMIT_NOFILE": 64}), start_new_session=True)

    When the command exits, or on SIGTERM, or when the process that started it exits, the supervisor kills everything
    that the command has started, then exits with the command's status or signal. Only a SIGKILL to it bypasses this.

    Args:
        command: program and arguments.
        limits: resource limits per process, by their names in Python's `resource` module.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), json.dumps(dict(limits or {})), *command]


def _supervise(parent: int, limits: Mapping[str, int], command: Sequence[str]) -> NoReturn:
    prctl = ctypes.CDLL(None).prctl
    signals = {signal.SIGCHLD, signal.SIGTERM}
    # Blocked before the fork, so that no signal is lost before `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Orphaned descendants become children of this process, even those with a session of their own.
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    me = os.getpid()
    # The parent may have ended before the call above, in which case no signal comes.
    if os.getppid() != parent:
        sys.exit(1)
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if os.getppid() == me:
            _become(limits, command)
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # these belong to the command
        os.dup2(null, fd)
    status = None
    while status is None:
        received_signal = signal.sigwait(signals)
        status = _reaped().get(child)
        if received_signal == signal.SIGTERM:
            break
    statuses = _end_all()
    _end_as(statuses.get(child, -signal.SIGKILL) if status is None else status)


def _become(limits: Mapping[str, int], command: Sequence[str]) -> None:
    for name, value in limits.items():
        limit = getattr(resource, name)
        max_limit = resource.getrlimit(limit)[1]
        # Beyond the soft CPU time limit a process gets SIGXCPU, beyond the hard limit SIGKILL.
        hard = value + 5 * (name == "RLIMIT_CPU")
        hard = hard if max_limit == resource.RLIM_INFINITY else min(hard, max_limit)
        resource.setrlimit(limit, (min(value, hard), hard))
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())


def _end_all() -> dict[int, int]:
    """Kill all descendants and return their statuses; orphaned descendants are reparented to this process."""
    until = time.monotonic() + _MOST_S
    statuses: dict[int, int] = {}
    while time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot fork
            for pid in _descendants():
                with contextlib.suppress(OSError):  # it exited, or the PID was reused by another user
                    os.kill(pid, number)
        statuses |= _reaped()
        # WNOWAIT leaves the status of an exited child to `_reaped`.
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # no children left
            break
        time.sleep(0.002)
    return statuses


def _reaped() -> dict[int, int]:
    """Reap exited children and return their statuses by PID."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (child_status := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[child_status[0]] = os.waitstatus_to_exitcode(child_status[1])
    return statuses


def _descendants() -> list[int]:
    pids = [os.getpid()]
    # The list grows while it is walked.
    for pid in pids:
        with contextlib.suppress(OSError):  # it exited
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    pids += map(int, file.read().split())
    return pids[1:]


def _end_as(status: int) -> NoReturn:
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one may have arrived meanwhile
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
