"""Memory of this machine or, if lower, of the container or job that this process runs in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil  # type: ignore[import-untyped]

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIPS = Path("/proc/self/cgroup")
_VERSIONS = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Folder and names of limit and use, for cgroup v2 and v1."""
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
    paths = _paths()
    for version, limit_file, usage_file in _VERSIONS:
        path = PurePosixPath(paths.get(version, "/").lstrip("/"))
        # Slurm and systemd limit a cgroup far above the process's own. In a container, only the top one may be visible.
        for ancestor in (path, *path.parents):
            folder = _CGROUP / version / ancestor
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # In version 1, names without the prefix leave out the groups below, which the use includes.
                cached_bytes = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in _CACHES)
                usage = int((folder / usage_file).read_text()) - cached_bytes
                yield int((folder / limit_file).read_text()), usage


def _paths() -> dict[str, str]:
    """Return the path of this process's memory cgroup, by the folder of its version."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in _MEMBERSHIPS.read_text().splitlines():
            # ID:CONTROLLERS:PATH; version 2 has no controllers there. A path with .. is outside of what is mounted.
            _, controllers, path = line.split(":", 2)
            if (not controllers or "memory" in controllers.split(",")) and "/.." not in path:
                paths["memory" if controllers else ""] = path
    return paths
