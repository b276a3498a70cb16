"""Processes of this machine: watching and killing process trees, exit statuses, and causes of death."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CLEAN_UP_S = 10.0
"""Seconds allowed for a process that cleans up after killed ones."""
_STOPPED_INSPECTIONS = 3
"""Consecutive inspections that must find a process stopped."""
_NEW_OBJECTS = (1_000_000, 5, 10)
"""Garbage collection thresholds: new objects, and collections of each generation per collection of the next."""
_IDLE_S = 1.0
"""Seconds after which a waiting body collects garbage; by then other processes have received their work."""
_SWITCH_S = 0.0005
"""Thread switch interval in seconds."""
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes), linux/pidfd.h
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60
_LOG_TAIL_BYTES = 1 << 16
_EXCEPTION = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt): \S.*)")
"""Last line of a traceback, possibly after a logger's prefix."""
_POINTER = re.compile(r"root cause|EngineDead|Engine core init")
"""vLLM exceptions that only point to another one."""


class ProcessTree:
    """Processes of this user with all their descendants: watched for exit, inspected, and killed together.

    tree = ProcessTree("MY_SERVICE", "worker-0")  # its processes were started with MY_SERVICE=worker-0
    tree.watch(pid, lambda status: print(describe_exit(status)))
    tree.kill(wait_s=5.0)
    """

    def __init__(self, variable: str, value: str) -> None:
        self._variable = variable
        self._value = value
        self.roots: dict[int, psutil.Process] = {}
        """Watched processes by PID."""
        self.members: dict[int, psutil.Process] = {}
        """The roots and their descendants at the last inspection, by PID."""
        self._pidfds: dict[int, int] = {}
        self._stopped = 0
        """Number of consecutive inspections that found a process stopped."""

    @property
    def mark(self) -> str:
        """Value of the environment variable."""
        return self._value

    def watch(self, pid: int, on_end: Callable[[int | None], None]) -> None:
        """Add a root; as soon as it exits, `on_end` is called in this event loop with its exit status.

        Raises:
            psutil.NoSuchProcess, ProcessLookupError: it has already exited.
        """
        self.roots[pid] = self.members[pid] = psutil.Process(pid)
        # From here on the descriptor identifies the process, even if its PID is reused.
        fd = self._pidfds[pid] = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(fd, self._on_end, pid, on_end)

    def unwatch(self) -> None:
        """Stop watching, without calling `on_end`."""
        for pid in list(self._pidfds):
            self._unwatch(pid)

    def has_been_stopped(self, *, max_processes: int) -> bool:
        """Return True if three inspections in a row found a process stopped; see `has_stopped`. Call it regularly."""
        self._stopped = self._stopped + 1 if self.has_stopped(max_processes=max_processes) else 0
        return self._stopped >= _STOPPED_INSPECTIONS

    def has_stopped(self, *, max_processes: int) -> bool:
        """Inspect up to `max_processes` processes, starting from the roots; return True if any is stopped.

        Processes with a debugger attached do not count.
        """
        members: dict[int, psutil.Process] = {}
        is_stopped = False
        # Breadth first: if there are too many, the processes nearest to the roots are inspected.
        queue = deque(self.roots)
        while queue and len(members) < max_processes:
            pid = queue.popleft()
            with contextlib.suppress(psutil.NoSuchProcess):  # it exited
                process = self.members.get(pid) or psutil.Process(pid)
                is_stopped |= process.status() == psutil.STATUS_STOPPED and not is_traced(pid)
                members[pid] = process
                queue.extend(_children_of(pid))
        self.members = members
        return is_stopped

    def signal_roots(self, number: signal.Signals) -> None:
        """Send a signal to the living roots; if it kills them, `on_end` is still called."""
        for process in self.roots.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self, *, wait_s: float) -> list[int]:
        """Kill the members and every process with the environment variable, then wait for them to exit.

        Python's resource tracker gets a moment to clean up, as it exits on its own after the processes that it serves.

        Returns:
            PIDs that have not exited within `wait_s` seconds.
        """
        processes: set[psutil.Process] = set()
        cleaners: set[psutil.Process] = set()
        # Repeat until there are no new ones, as a process may just have forked.
        while (
            new_processes := {process for process in (*self.members.values(), *self._marked()) if _runs(process)}
            - processes
        ):
            processes |= new_processes
            for process in new_processes:
                with contextlib.suppress(psutil.Error):  # it exited
                    if cleans_up(process):
                        cleaners.add(process)
                    else:
                        process.kill()
        _wait(cleaners, _CLEAN_UP_S)
        for process in cleaners:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return _wait(processes, wait_s)

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it exited, or belongs to another user
                if process.environ().get(self._variable) == self._value:
                    yield process

    def _on_end(self, pid: int, on_end: Callable[[int | None], None]) -> None:
        status = exit_status(pid, self._pidfds[pid])
        self._unwatch(pid)
        on_end(status)

    def _unwatch(self, pid: int) -> None:
        fd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def is_traced(pid: int) -> bool:
    """Return True if a debugger is attached to a process."""
    with contextlib.suppress(OSError):  # it exited
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("TracerPid:"):
                return int(line.split()[1]) != 0
    return False


def _children_of(pid: int) -> Iterator[int]:
    """Yield the PIDs of a process's children; psutil would read the whole machine's process table."""
    with contextlib.suppress(OSError):  # it exited
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _wait(processes: Iterable[psutil.Process], wait_s: float) -> list[int]:
    """Wait for exits without reaping, which is Monarch's job; psutil would reap. Return the PIDs still alive."""
    poll = select.poll()
    pids: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                stack.callback(os.close, fd)
                if _runs(process):  # else the PID may have been reused
                    pids[fd] = process.pid
                    poll.register(fd, select.POLLIN)
        until = time.monotonic() + wait_s
        while pids and (left_s := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                del pids[fd]
    return list(pids.values())


def process_space() -> str:
    """Identify the machine's boot and PID namespace, within which a PID is unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def when_process_ends(pid: int, action: Callable[[], object]) -> None:
    """Run an action in a thread as soon as a process of this user exits; at once if it already has."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            poll = select.poll()  # select.select rejects descriptors of 1024 and above
            poll.register(fd, select.POLLIN)
            poll.poll()
            os.close(fd)
        action()

    threading.Thread(target=watch, name=f"watch-{pid}", daemon=True).start()


def exit_status(pid: int, pidfd: int) -> int | None:
    """Return a process's exit status without reaping it: negative for a signal, None if unknown.

    A parent can ask until it reaps the process; others can read /proc until then, or only root if the process is not
    dumpable; after that, Linux 6.15 and later still report it through the pidfd.
    """
    with contextlib.suppress(OSError):
        status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is not None:
            return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    with contextlib.suppress(OSError):
        # The exit code is the last field; the name before the last parenthesis may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    # struct pidfd_info starts with a mask of the fields wanted, which the kernel replaces by those that it has set.
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _EXIT_CODE_OFFSET)[0])
    return None


def cleans_up(process: psutil.Process) -> bool:
    """Return whether a process is Python's resource tracker, which cleans up after those that it serves, and exits."""
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def clean_up_after(folders: Sequence[str], pids: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process that waits on a pipe for this one to exit, then kills processes and removes folders."""
    # `read` returns once no process holds the other end of the pipe. A caller may drop the Popen object: CPython keeps
    # objects of living children, and thus their pipes, in subprocess._active.
    kill = f"kill -9 {' '.join(map(str, pids))}; " if pids else ""
    return subprocess.Popen(
        ["/bin/sh", "-c", f"trap '' TERM HUP INT; read end; {kill}rm -rf {shlex.join(folders)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
    )


def describe_exit(status: int | None, meanings: Mapping[int, str] | None = None) -> str:
    """Describe an `exit_status` in words; `meanings` has a service's own statuses."""
    if status is None:
        return "its process ended"
    if status == -9:
        return "its process was killed by SIGKILL (manually, or by the kernel when out of memory)"
    if status < 0:
        return f"its process was ended by {signal_name(-status)}"
    return (meanings or {}).get(status, f"its process exited with status {status}")


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGTERM, or SIG40 for a real-time signal, most of which have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def is_by_signal(cause: str) -> bool:
    """Return whether a cause of death, as `describe_exit` words it, is a signal: a crash, or a kill from outside."""
    return " by SIG" in cause


def last_error(log: Path) -> str:
    """Return the last exception in a log, ignoring those that only point to another one; "" if none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    errors = (match[1] for line in reversed(lines) if (match := _EXCEPTION.search(line)))
    return next((error[:300] for error in errors if not _POINTER.search(error)), "")


def cause_of(text: str, exit_meanings: Mapping[int, str] | None = None) -> str:
    """Extract a one-line cause from Monarch's message about a failure."""
    if match := re.search(r"Killed\(sig=(\d+)\)", text):
        return describe_exit(-int(match[1]))
    if match := re.search(r"exited with non-zero code (\d+)", text):
        return describe_exit(int(match[1]), exit_meanings)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "unknown"


@contextlib.contextmanager
def idle_collection() -> Iterator[None]:
    """Collect cyclic garbage once the body has run for a second.

    For a body in which this process waits for others: the collection blocks the event loop for about half a second if
    10,000 episodes are in flight.
    """
    timer = asyncio.get_running_loop().call_later(_IDLE_S, gc.collect)
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def responsive_loop() -> Iterator[None]:
    """Keep garbage collection and other threads from blocking the event loop for long while the body runs.

    Cyclic garbage is collected once per million new objects instead of 700, and at `idle_collection`: the objects of
    thousands of episodes live longer than that, hardly any are in cycles, and scanning them repeatedly would take as
    long as everything else. Imported objects are not scanned. The thread switch interval is a tenth of the default: the
    loop releases the GIL with every file read, and gets it back sooner from threads that compute in Python.
    """
    old_threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(*_NEW_OBJECTS)
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*old_threshold)
        gc.unfreeze()
