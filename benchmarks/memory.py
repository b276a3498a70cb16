"""Peak memory of processes, sampled while they work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]


@contextmanager
def sampled_peak(read: Callable[[], int], every_s: float) -> Iterator[list[int]]:
    """Sample a number of bytes in a thread while the body runs; the list's one element is the highest seen so far."""
    done, peak = threading.Event(), [read()]

    def sample() -> None:
        while not done.wait(every_s):
            peak[0] = max(peak[0], read())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def private_bytes(pid: int | str = "self") -> int:
    """Return a process's memory that is neither shared nor file-backed."""
    return _resident(pid, "Anon")


def tree_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants: the private memory of each, and the largest shared memory
    that any one of them has mapped, as they share it. Mapped files, such as libraries, do not count; 0 if it exited."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        private, shared = [0], [0]
        for process in [root, *root.children(recursive=True)]:
            with suppress(FileNotFoundError, ProcessLookupError):
                private.append(private_bytes(process.pid))
                shared.append(_resident(process.pid, "Shmem"))
        return sum(private) + max(shared)
    return 0


def _resident(pid: int | str, kind: str) -> int:
    match = re.search(rf"^Rss{kind}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0  # a zombie process has none
