"""Memory of this machine or, if lower, of the container that this process runs in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUP = Path("/sys/fs/cgroup")
_VERSIONS = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Folder and names of limit and use, for cgroup v2 and v1."""
_CACHES = ("inactive_file", "active_file")
"""Memory in use that the kernel takes back: copies of files."""


def host_bytes() -> int:
    """Return the machine's memory in bytes, or the container's limit if lower."""
    limits = [limit for limit, _ in _containers()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def available_bytes() -> int:
    """Return the bytes of memory still available; beyond them the kernel kills processes."""
    return min([int(psutil.virtual_memory().available), *(max(0, limit - usage) for limit, usage in _containers())])


def _containers() -> list[tuple[int, int]]:
    """Return limit and use of the container's memory, in bytes, for each cgroup version that sets a limit."""
    containers = []
    for version, limit_file, usage_file in _VERSIONS:
        folder = _CGROUP / version
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached_bytes = sum(int(stat.get(name, 0)) for name in _CACHES)
            containers.append(
                (int((folder / limit_file).read_text()), int((folder / usage_file).read_text()) - cached_bytes)
            )
    return containers
