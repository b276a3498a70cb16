"""Memory of this machine or, if lower, of the container or job that this process runs in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]

from forge_rl.system.cgroups import folders

_FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Names of limit and use, by version of cgroups."""
_CACHES = ("inactive_file", "active_file")
"""Memory in use that the kernel takes back: copies of files."""


def host_bytes() -> int:
    """Return the machine's memory in bytes, or the lowest limit of this process's cgroups if lower."""
    limits = [limit for limit, _ in _cgroups()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def available_bytes() -> int:
    """Return the bytes of memory still available; beyond them the kernel kills processes."""
    return min([int(psutil.virtual_memory().available), *(max(0, limit - usage) for limit, usage in _cgroups())])


def _cgroups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of memory, in bytes, of each cgroup that limits this process."""
    for version, folder in folders("memory"):
        limit_file, usage_file = _FILES[version]
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # In version 1, names without the prefix leave out the groups below, which the use includes.
            cached_bytes = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in _CACHES)
            usage = int((folder / usage_file).read_text()) - cached_bytes
            yield int((folder / limit_file).read_text()), usage
