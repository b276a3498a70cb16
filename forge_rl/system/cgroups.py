"""Cgroups that limit this process, as a container has them, or a job of Slurm or systemd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIPS = Path("/proc/self/cgroup")


def folders(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version and the folder of each cgroup in which a controller may limit this process.

        list(folders("memory"))  # [(2, Path("/sys/fs/cgroup/job_7")), (2, Path("/sys/fs/cgroup")), (1, ...)]

    Slurm and systemd limit a cgroup far above the process's own. In a container, only the top one may be visible.
    """
    paths = _paths(controller)
    for version, top in ((2, _CGROUP), (1, _CGROUP / controller)):
        path = PurePosixPath(paths.get(version, "/").lstrip("/"))
        for ancestor in (path, *path.parents):
            yield version, top / ancestor


def _paths(controller: str) -> dict[int, str]:
    """Return the path of this process's cgroup of each version."""
    paths: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for line in _MEMBERSHIPS.read_text().splitlines():
            # ID:CONTROLLERS:PATH; version 2 has no controllers there. A path with .. is outside of what is mounted.
            _, controllers, path = line.split(":", 2)
            if (not controllers or controller in controllers.split(",")) and "/.." not in path:
                paths[1 if controllers else 2] = path
    return paths
