"""Control groups of a sandbox server and its sessions, version 1, 2 or both. Imports nothing of this library.

A server's tree is one folder per hierarchy, with a folder for each session. It is reached by open descriptors, so that
no process needs to see the file systems of cgroups.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "forge_rl-sandbox"
_PERIOD_US = 100_000
_TASKS_PER_CPU = 4


class GroupFds(NamedTuple):
    """Descriptors by which a process enters the cgroups of its session."""

    doors: list[int]
    last_doors: list[int]
    """Entered when all else is done: next to busy processes, a new cpu group may wait long for its first turns."""
    unified: int | None
    """Folder of the cgroup of version 2, into which a process can be forked; None without that version."""

    def close(self) -> None:
        """Close them in this process."""
        for fd in (*self.doors, *self.last_doors, *(() if self.unified is None else (self.unified,))):
            os.close(fd)


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy, and the folder of it in which a tree can be made."""

    version: int
    controllers: frozenset[str]
    folder: str


def hierarchies(mounts: str, memberships: str) -> list[Hierarchy]:
    """Find the hierarchies whose controllers a session needs, and one of version 2 to kill by, if there is one.

    Args:
        mounts: text of /proc/self/mountinfo.
        memberships: text of /proc/self/cgroup.
    """
    paths: dict[str, str] = {}
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        # Lines are ID:CONTROLLERS:PATH; version 2 has no controllers there, and so the key "".
        paths |= dict.fromkeys(names.split(","), path)
    session_hierarchies: list[Hierarchy] = []
    for line in mounts.splitlines():
        # Optional fields of unknown number come before the dash: see proc_pid_mountinfo(5).
        before, _, after = line.partition(" - ")
        root, folder = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup":
            controllers = frozenset(options.split(",")) & set(CONTROLLERS)
            # A container may see one hierarchy at several places: the first mount is taken.
            if controllers and not any(controllers & hierarchy.controllers for hierarchy in session_hierarchies):
                session_hierarchies.append(
                    Hierarchy(1, controllers, _below(folder, root, paths.get(min(controllers), "/")))
                )
        elif kind == "cgroup2":
            path, enabled = _enabled(folder, _below(folder, root, paths.get("", "/")))
            session_hierarchies.append(Hierarchy(2, enabled, path))
    return session_hierarchies


def _below(mount_point: str, root: str, path: str) -> str:
    """Return the folder of a cgroup below a mount that shows the hierarchy from `root` on."""
    inside = os.path.relpath(path, root)
    return mount_point if inside == "." or inside.startswith("..") else os.path.join(mount_point, inside)


def _enabled(mount_point: str, folder: str) -> tuple[str, frozenset[str]]:
    """Return the nearest cgroup of version 2 whose children get all controllers, or else the process's own."""
    candidate = folder
    # Up to the mount: a cgroup with processes of its own cannot hand out controllers, one above it may do so.
    while candidate.startswith(mount_point):
        with contextlib.suppress(OSError), open(os.path.join(candidate, "cgroup.subtree_control")) as file:
            enabled = frozenset(file.read().split()) & set(CONTROLLERS)
            if len(enabled) == len(CONTROLLERS):
                return candidate, enabled
        candidate = os.path.dirname(candidate)
    return folder, frozenset()


def here() -> list[Hierarchy]:
    """Find the hierarchies of this process."""
    with open("/proc/self/mountinfo") as mounts, open("/proc/self/cgroup") as memberships:
        return hierarchies(mounts.read(), memberships.read())


def lacking(hierarchies: list[Hierarchy]) -> str:
    """Return the names of the controllers that this process cannot use, or ""."""
    usable: set[str] = set()
    for hierarchy in hierarchies:
        if os.access(hierarchy.folder, os.W_OK):
            usable |= hierarchy.controllers
    return ", ".join(name for name in CONTROLLERS if name not in usable)


def name_of(pid: int) -> str:
    """Return the name of a process's tree; unique on the machine, also among containers that share its cgroups."""
    with open(f"/proc/{pid}/stat") as file:
        # A command's name may contain spaces and brackets. Field 22 is the start time, which tells apart users of one
        # PID.
        start_time = file.read().rpartition(")")[2].split()[19]
    return f"{_PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{start_time}"


def remove_abandoned(hierarchies: list[Hierarchy]) -> None:
    """Remove trees whose server was killed together with everything that watched it."""
    # Only trees of this process namespace: PIDs of another cannot be checked from here.
    space = f"{_PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}-"
    for hierarchy in hierarchies:
        for name in os.listdir(hierarchy.folder) if os.path.isdir(hierarchy.folder) else ():
            if name.startswith(space):
                alive = False
                with contextlib.suppress(OSError, ValueError):
                    alive = name_of(int(name.split("-")[-2])) == name
                if not alive:
                    CgroupTree(name, [hierarchy]).remove_all()


@dataclass(frozen=True)
class Meter:
    """An open file of a cgroup that counts `cpu_s`, `memory_bytes` (the most so far) or `kills` for memory."""

    fd: int
    kind: str
    key: str
    """The start of the line that counts; "" if the file is a number."""
    unit: float

    def read(self) -> float:
        """Return the count so far.

        Raises:
            ValueError: the kernel does not count it here.
        """
        # From the start each time: the same open file counts again and again.
        text = os.pread(self.fd, 1 << 14, 0).decode()
        if not self.key:
            return int(text) * self.unit
        for line in text.splitlines():
            if line.startswith(self.key):
                return int(line[len(self.key) :]) * self.unit
        raise ValueError(f"{self.key} is missing")


_MeterFile = tuple[str, str, str, float]
"""Name of a file, and the other fields of its `Meter`."""
_METERS: tuple[_MeterFile, ...] = (
    ("cpu.stat", "cpu_s", "usage_usec ", 1e-6),  # version 2, also where it has no controllers
    ("cpuacct.usage", "cpu_s", "", 1e-9),
    ("memory.peak", "memory_bytes", "", 1),
    ("memory.max_usage_in_bytes", "memory_bytes", "", 1),
    ("memory.events", "kills", "oom_kill ", 1),
    ("memory.oom_control", "kills", "oom_kill ", 1),
)


@dataclass
class CgroupTree:
    """The cgroups of one server. `close` or `remove_all` ends its use."""

    name: str
    hierarchies: list[Hierarchy]
    folders: list[int] = field(default_factory=list)
    """A descriptor of the tree's folder for each hierarchy."""
    _counting: list[tuple[int, _MeterFile]] = field(default_factory=list)
    """Files that work as meters here, each with its hierarchy's folder; empty until `find_meters`."""

    def __post_init__(self) -> None:
        for hierarchy in self.hierarchies:
            path = os.path.join(hierarchy.folder, self.name)
            # A tree that its server left can be opened here again, to be removed.
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o755)
            if hierarchy.version == 2 and hierarchy.controllers:
                with open(os.path.join(path, "cgroup.subtree_control"), "w") as file:
                    file.write(" ".join(f"+{name}" for name in sorted(hierarchy.controllers)))
            if hierarchy.version == 1 and "cpu" in hierarchy.controllers:
                # A group counts as one process beside those that are in none: all sessions as a few for each CPU.
                with open(os.path.join(path, "cpu.shares"), "w") as file:
                    file.write(str(1024 * _TASKS_PER_CPU * (os.cpu_count() or 1)))
            self.folders.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def bound(self, *, memory_bytes: int, processes: int) -> None:
        """Limit what all sessions use together, as their own limits may add up to more than the machine has."""
        for hierarchy, folder in zip(self.hierarchies, self.folders, strict=True):
            if "memory" in hierarchy.controllers:
                _limit_memory(folder, ".", hierarchy.version, memory_bytes)
            if "pids" in hierarchy.controllers:
                _write(folder, "pids.max", str(processes))

    def add(self, session: str, *, memory_bytes: int, processes: int, cpus: float, as_one: bool = True) -> None:
        """Make a session's cgroups with its limits.

        Args:
            as_one: version 2 ends all of a session that exceeds its memory, and not only its largest process.

        Raises:
            OSError: the machine allows no more.
        """
        quota = max(1000, int(cpus * _PERIOD_US))
        for hierarchy, folder in zip(self.hierarchies, self.folders, strict=True):
            os.mkdir(session, 0o755, dir_fd=folder)
            is_unified = hierarchy.version == 2
            if "memory" in hierarchy.controllers:
                _limit_memory(folder, session, hierarchy.version, memory_bytes)
                if is_unified:
                    # Otherwise, the kernel kills the session's largest process, and the rest goes on in an unknown
                    # state.
                    _write(folder, f"{session}/memory.oom.group", "1" if as_one else "0")
                    with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                        # Swapped pages would not count against its memory.
                        _write(folder, f"{session}/memory.swap.max", "0")
            if "pids" in hierarchy.controllers:
                _write(folder, f"{session}/pids.max", str(processes))
            if "cpu" in hierarchy.controllers:
                # Microseconds of CPU time in each period, over all CPUs.
                name, value = ("cpu.max", f"{quota} {_PERIOD_US}") if is_unified else ("cpu.cfs_quota_us", str(quota))
                _write(folder, f"{session}/{name}", value)

    def open_group(self, session: str) -> GroupFds:
        """Open what a process needs to enter a session's cgroups."""
        return GroupFds(self._doors(session, "memory", "pids"), self._doors(session, "cpu"), self._unified(session))

    def _doors(self, session: str, *controllers: str) -> list[int]:
        """Open the files by which a process enters a session's cgroups of version 1, by writing 0.

        A thread that moves itself takes no lock that all forks of the machine need. Whoever holds one of these can move
        any process in sight, so only this library's own code may have them.
        """
        return [
            os.open(f"{session}/tasks", os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
            for hierarchy, folder in zip(self.hierarchies, self.folders, strict=True)
            if hierarchy.version == 1 and not hierarchy.controllers.isdisjoint(controllers)
        ]

    def move(self, pid: int, session: str) -> None:
        """Move a process into a session's cgroups.

        Raises:
            ProcessLookupError: it has ended.
        """
        for folder in self.folders:
            _write(folder, f"{session}/cgroup.procs", str(pid))

    def _unified(self, session: str) -> int | None:
        """Open a session's folder of version 2, to fork into; None if there is none."""
        for hierarchy, folder in zip(self.hierarchies, self.folders, strict=True):
            if hierarchy.version == 2:
                return os.open(session, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        return None

    def processes(self, session: str) -> list[int]:
        """List a session's processes, as seen from this process's namespace."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                return [int(pid) for pid in _read(folder, f"{session}/cgroup.procs").split()]
        return []

    def kill(self, session: str) -> None:
        """Kill every process of a session."""
        for hierarchy, folder in zip(self.hierarchies, self.folders, strict=True):
            if hierarchy.version == 2:
                with contextlib.suppress(OSError):
                    # At once and with whatever is being forked, unlike signals to a list of processes.
                    _write(folder, f"{session}/cgroup.kill", "1")
                    return
        for pid in self.processes(session):  # called again until none is left: pids.max bounds them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, session: str) -> bool:
        """Remove a session's cgroups; False if a process is left."""
        for folder in self.folders:
            try:
                os.rmdir(session, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.EBUSY:
                    return False
                raise
        return True

    def kills_for_memory(self, session: str) -> int:
        """Return how many of a session's processes were killed because it was out of memory."""
        for hierarchy, folder in zip(self.hierarchies, self.folders, strict=True):
            if "memory" in hierarchy.controllers:
                with contextlib.suppress(OSError):
                    text = _read(
                        folder, f"{session}/{'memory.events' if hierarchy.version == 2 else 'memory.oom_control'}"
                    )
                    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)
        return 0

    def meters(self, session: str) -> list[Meter]:
        """Open the meters of a session: one of each kind that this machine has."""
        return [meter for meter, _ in self._open_meters(session)]

    def find_meters(self, session: str) -> None:
        """Find out which files work as meters here, by opening one session's files; all others have the same."""
        if self._counting:
            return
        opened_meters = list(self._open_meters(session))
        self._counting = [place for _, place in opened_meters]
        for meter, _ in opened_meters:
            os.close(meter.fd)

    def _open_meters(self, session: str) -> Iterator[tuple[Meter, tuple[int, _MeterFile]]]:
        kinds = set[str]()
        for place in self._counting or [(folder, file) for folder in self.folders for file in _METERS]:
            folder, (name, kind, key, unit) = place
            # Version 1 and 2 may both count a kind: the first file that works is the meter.
            if kind not in kinds:
                with contextlib.suppress(OSError):
                    fd = os.open(f"{session}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
                    meter = Meter(fd, kind, key, unit)
                    try:
                        meter.read()
                    except (OSError, ValueError):
                        os.close(fd)
                        continue
                    kinds.add(kind)
                    yield meter, place

    def close(self) -> None:
        """Close the descriptors; the cgroups stay."""
        for folder in self.folders:
            os.close(folder)
        self.folders.clear()

    def remove_all(self) -> None:
        """Kill all remaining processes and remove the tree."""
        # A process in the middle of a system call may take a while to die; one that never does must not hang its owner.
        deadline = time.monotonic() + 10
        sessions = {entry for folder in self.folders for entry in os.listdir(folder) if _is_folder(folder, entry)}
        for session in sessions:
            self.kill(session)
            while not self.remove(session) and time.monotonic() < deadline:
                time.sleep(0.005)
                self.kill(session)
        for folder in self.folders:
            # The name may lead to nothing here, as the folder may be below another root: go by its parent.
            parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.name, dir_fd=parent)
            os.close(parent)
        self.close()


def _is_folder(folder: int, entry: str) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(entry, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder))
        return True
    return False


def _limit_memory(folder: int, group: str, version: int, memory_bytes: int) -> None:
    _write(folder, f"{group}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}", str(memory_bytes))
    if version == 1:
        with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
            # Memory and swap together, so that there is no swap: not lower than the other limit at any time.
            _write(folder, f"{group}/memory.memsw.limit_in_bytes", str(memory_bytes))


def _write(folder: int, path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _read(folder: int, path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)
