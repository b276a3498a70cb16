"""Low CPU priority for a while, for work that must not slow down other processes."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_LESS = 5
"""Added to the nice value: such a thread gets a quarter of a core next to a busy one of normal priority."""
_CAP_SYS_NICE = 23


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Run the body at low priority, together with the threads and processes that it starts; then restore all of them.

    Does nothing if this process may not raise its priority again: only root may by default, else RLIMIT_NICE.
    """
    old_nice = os.getpriority(os.PRIO_PROCESS, 0)
    if not _may_return_to(old_nice):
        yield
        return
    _set(old_nice + _LESS)
    try:
        yield
    finally:
        while _set(old_nice):  # a thread may just have started another one
            pass


def _may_return_to(nice: int) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if limit == resource.RLIM_INFINITY or limit >= 20 - nice:
        return True
    status = Path("/proc/self/status").read_text()
    capabilities = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(capabilities >> _CAP_SYS_NICE & 1)


def _set(nice: int) -> int:
    """Set the nice value of all threads of this process and its descendants; return how many had another one."""
    num_changed = 0
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(OSError):  # it exited
            for thread in map(int, os.listdir(f"/proc/{process.pid}/task")):
                with contextlib.suppress(ProcessLookupError):
                    if os.getpriority(os.PRIO_PROCESS, thread) != nice:
                        os.setpriority(os.PRIO_PROCESS, thread, nice)
                        num_changed += 1
    return num_changed
