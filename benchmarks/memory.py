"""Peak memory of processes, sampled while they work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_NEW_PEAK = 1.005
"""Ratio to the highest bound so far above which a sample may be a new peak."""


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
    """Return the memory of a process and its descendants; 0 if it exited.

    Each page counts once, even if forked processes share it, several processes map it, or one maps it twice. Mapped
    files, such as libraries, do not count.
    """
    return sum(_read_tree(pid, _proportional_bytes))


def tree_sampler(pid: int) -> Callable[[], int]:
    """Return a function for `sampled_peak` that returns `tree_bytes` where these may be a new peak, and else 0.

    `tree_bytes` takes a tenth of a second of CPU for 10 GiB. So it is called only when an upper bound, which counts
    some pages several times and takes a few milliseconds, exceeds its highest value so far by 0.5%.
    """
    highest = 0

    def read() -> int:
        nonlocal highest
        shared = _read_tree(pid, lambda process: _resident(process, "Shmem"))
        bound = sum(_read_tree(pid, private_bytes)) + max(shared, default=0)
        if bound <= highest * _NEW_PEAK:
            return 0
        highest = bound
        return tree_bytes(pid)

    return read


def _read_tree(pid: int, read: Callable[[int], int]) -> list[int]:
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
