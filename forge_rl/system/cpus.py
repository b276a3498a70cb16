"""CPU cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from forge_rl.system.cgroups import folders


def cpu_cores() -> int:
    """Return the number of cores that this process may use: those it may run on or, if fewer, what its cgroups allow.

    Kubernetes and Docker limit a container's CPU time, and let it see all cores of the machine.
    """
    quotas = []
    for version, folder in folders("cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # not there, or "max"
            quota, period = _quota(version, folder)
            if quota > 0:  # version 1 has -1 for no limit
                quotas.append(math.ceil(quota / period))
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quota(version: int, folder: Path) -> tuple[int, int]:
    """Return the CPU time that a cgroup may use in each period, and the period, both in microseconds."""
    if version == 2:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
