"""Peak memory of processes, sampled while they work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_NOTABLE = 1.005


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
    """Return the memory of a process and its descendants, counting each page once: also one that forked processes have
    in common, that several have mapped, or one process twice. Mapped files, such as libraries, do not count; 0 if it
    exited."""
    return sum(_of_tree(pid, _proportional_bytes))


def highs_of_tree(pid: int) -> Callable[[], int]:
    """Return a function to sample `tree_bytes` with, which takes a tenth of a second of CPU for 10 GiB.

    It returns 0 unless a bound that takes a few milliseconds, in which some pages count several times, is 0.5% higher
    than ever.
    """
    highest = 0

    def read() -> int:
        nonlocal highest
        shared = _of_tree(pid, lambda process: _resident(process, "Shmem"))
        bound = sum(_of_tree(pid, private_bytes)) + max(shared, default=0)
        if bound <= highest * _NOTABLE:
            return 0
        highest = bound
        return tree_bytes(pid)

    return read


def _of_tree(pid: int, read: Callable[[int], int]) -> list[int]:
    """Return what a function reads of a process and of each of its descendants that has not exited."""
    values = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(FileNotFoundError, ProcessLookupError):
                values.append(read(process.pid))
    return values


def _proportional_bytes(pid: int) -> int:
    """Return a process's share of its anonymous and shared memory: of a page with n mappings, an nth for each."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) << 10 for size in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", rollup, re.MULTILINE))


def _resident(pid: int | str, kind: str) -> int:
    match = re.search(rf"^Rss{kind}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0  # a zombie process has none
