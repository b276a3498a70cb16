"""Describes a machine with only Python's standard library, as little else may be installed there."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tools.cuda_machine import driver_version, problems

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("torch", "triton", "torchtitan", "vllm", "torchmonarch", "transformers", "torchstore", "flashinfer-python")
_MODULES = ("torch", "torchtitan", "vllm", "monarch", "transformers", "pytest")
_QUERY = "name,memory.total,memory.used,driver_version,pcie.link.gen.current,pcie.link.width.current"


def describe() -> dict[str, object]:
    """Describe machine, versions and commit, with the date, without identifying the machine or its user."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "describe", "--always", "--dirty") or "unknown",
        "gpus": gpus(),
        "problems": problems(driver=driver_version(), include=Path(sysconfig.get_path("include"))),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "compiler": (_output("gcc", "--version") or "none").splitlines()[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "shared_memory_gib": round(shutil.disk_usage("/dev/shm").total / 2**30, 1),
        "disk_free_gib": round(shutil.disk_usage(ROOT).free / 2**30, 1),
        "versions": versions(PACKAGES),
    }


def gpus() -> list[dict[str, str]]:
    """List the GPUs that nvidia-smi reports, with their details."""
    lines = _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader").splitlines()
    names = _QUERY.split(",")
    rows = [[value.strip() for value in line.split(",")] for line in lines if line.strip()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed ones among the given packages."""
    installed = {}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def has() -> frozenset[str]:
    """Return the available needs of parts: names of modules, "gpu", and "gpus" if there are several."""
    needs = {name for name in _MODULES if importlib.util.find_spec(name) is not None}
    # nvidia-smi lists all GPUs, whatever this process may use.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus()) if visible is None else min(len(gpus()), len([name for name in visible.split(",") if name]))
    return frozenset(needs | ({"gpu"} if count else set()) | ({"gpus"} if count > 1 else set()))


def _output(*command: str) -> str:
    """Return a program's output; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
