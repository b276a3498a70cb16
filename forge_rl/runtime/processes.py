"""Processes of this machine: which belong together, which are stopped, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

_CLEAN_UP_S = 2.0
"""So long what cleans up after killed processes may take."""


def process_space() -> str:
    """The machine's boot, and the namespace of processes on it: where a process's number means that process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def state_of(pid: int) -> tuple[str, int] | None:
    """A process's state, such as "S" for asleep or "T" for stopped, and its start in ticks; None if there is none.

    Number and start together name a process for ever.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])


def children_of(pid: int) -> Iterator[int]:
    """Processes that a process started and that it has not waited for."""
    with contextlib.suppress(OSError):  # it ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())


def family_of(pids: Mapping[int, int], *, most: int) -> dict[int, tuple[str, int]]:
    """State and start of processes and their descendants, the nearest first, until there are `most`."""
    found: dict[int, tuple[str, int]] = {}
    queue = deque(pids)
    while queue and len(found) < most:
        pid = queue.popleft()
        state = state_of(pid)
        if state is not None and state[1] == pids.get(pid, state[1]):
            found[pid] = state
            queue.extend(children_of(pid))
    return found


def kill(known: Mapping[int, int], mark: str, *, wait_s: float) -> list[int]:
    """Kill processes of this user and wait for their end.

    Args:
        known: by number, with the start of each.
        mark: "NAME=value"; whoever has this in its environment is killed too.
        wait_s: how long to wait.

    Returns:
        Those that have not ended.
    """

    def ours(pid: int) -> bool:
        state = state_of(pid)
        if state is None or state[0] in "ZX":
            return False
        return known.get(pid) == state[1] or _has_mark(pid, mark)

    fds: dict[int, int] = {}
    cleaners: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        seen: set[int] = set()
        # Again until there are no more: one may just have forked.
        while fresh := {pid for pid in {*known, *_all_pids()} - seen if ours(pid)}:
            seen |= fresh
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):  # it ended
                    fd = os.pidfd_open(pid)
                    stack.callback(os.close, fd)
                    if not ours(pid):  # the number is another's by now
                        continue
                    if _cleans_up(pid):
                        cleaners[fd] = pid
                    else:
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                        fds[fd] = pid
        _wait(cleaners, _CLEAN_UP_S)
        for fd in cleaners:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        return _wait(fds | cleaners, wait_s)


def _cleans_up(pid: int) -> bool:
    """Whether it is Python's own tracker of semaphores and the like, which ends when those that it serves have."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _has_mark(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read().split(b"\0")
    except OSError:  # it ended, or is somebody else's
        return False


def _wait(fds: dict[int, int], wait_s: float) -> list[int]:
    """Wait for the ends behind pidfds; returns the numbers of those that live."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    until = time.monotonic() + wait_s
    while fds and (left_s := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            poll.unregister(fd)
            del fds[fd]
    return list(fds.values())
