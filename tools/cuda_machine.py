"""Checks a machine for requirements of the CUDA extra that no wheel includes: driver, C compiler, Python headers.

`make setup EXTRA=cuda` runs it before downloading 9 GB. It needs only Python, and fails only if there is a driver:
without one, the extra can still be installed for inspection. `make check-cuda`, which never uses a GPU, passes
`--without-driver`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

DRIVER = 580
"""First driver that supports CUDA 13, for which torch's wheels are built."""


def problems(
    *,
    driver: str | None,
    include: Path,
    find_program: Callable[[str], str | None] = shutil.which,
) -> list[str]:
    """List missing requirements, each with a remedy.

    Args:
        driver: version of the NVIDIA driver; None if there is none.
        include: folder of Python's headers.
        find_program: returns the path of a program, or None.
    """
    missing = []
    if driver is None:
        missing.append("no NVIDIA driver answers (nvidia-smi): nothing will run on a GPU here")
    elif not driver.split(".")[0].isdecimal() or int(driver.split(".")[0]) < DRIVER:
        missing.append(f"the NVIDIA driver is {driver!r}: CUDA 13 needs {DRIVER} or later; update it, then restart")
    if not any(map(find_program, ("gcc", "cc", "clang"))):
        missing.append("there is no C compiler, with which Triton builds its launchers: apt install gcc")
    if not (include / "Python.h").is_file():
        missing.append(
            f"{include / 'Python.h'} is missing, which Triton's launchers include: apt install "
            f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        )
    return missing


def driver_version() -> str | None:
    """Return the driver version from nvidia-smi; None if it is missing or finds no driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def main(arguments: Sequence[str] = ()) -> int:
    """Print missing requirements; return 1 if there is a driver but something else is missing.

    With `--without-driver`, print that the driver is not checked, and return 0.
    """
    if "--without-driver" in arguments:
        print("cuda: the driver is not checked: this environment is for what needs no GPU", file=sys.stderr)
        return 0
    driver = driver_version()
    missing = problems(driver=driver, include=Path(sysconfig.get_path("include")))
    for line in missing:
        print(f"cuda: {line}", file=sys.stderr)
    return int(driver is not None and bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
