"""Python interpreters for packages whose requirements conflict with ours: the user's, or made once with uv."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.system.folders import check_own, make_private

CACHE = Path("~/.cache/forge_rl/interpreters")
"""Folder of the interpreters made with uv."""


def interpreter(
    requirements: Sequence[str],
    *,
    python: str = "",
    cache: Path = CACHE,
    flag: str = "--env verifiers:NAME,python=PATH",
) -> Path:
    """Return a Python interpreter that has the required packages; makes it on first use.

        interpreter(["verifiers==0.4.0", "./environments/reverse_text"])

    Args:
        requirements: packages, as in `uv pip install`. Paths are resolved.
        python: an interpreter that already has them; returned as is.
        flag: the flag that sets `python`, for errors.

    Raises:
        ConfigError: `python` does not exist, or making an interpreter failed: uv is missing, the package index is
            unreachable, or the packages do not resolve.
    """
    if python:
        path = shutil.which(Path(python).expanduser())
        if path is None:
            raise ConfigError(f"there is no interpreter {python}", hint="pass the python of a virtual environment")
        return Path(path).absolute()
    packages = [
        str(Path(requirement).resolve()) if Path(requirement).exists() else requirement for requirement in requirements
    ]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    # One folder for each version of Python and list of packages.
    name = hashlib.sha256("\n".join([version, *packages]).encode()).hexdigest()[:16]
    cache = cache.expanduser()
    make_private(cache, ConfigError, deep=False)  # interpreters link to their base interpreter
    folder, ready = cache / name, cache / name / ".ready"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be creating it
        if not ready.exists():
            print(f"creating an interpreter with {', '.join(requirements)} in {folder}, once", file=sys.stderr)
            _make(folder, packages, version, flag)
            # Written last, so that an installation that was interrupted is repeated.
            ready.write_text("\n".join(packages))
    check_own(folder, ConfigError, deep=False)
    return folder / "bin" / "python"


def _make(folder: Path, packages: Sequence[str], version: str, flag: str) -> None:
    local_uv = Path(sys.executable).with_name("uv")
    uv = str(local_uv) if local_uv.exists() else shutil.which("uv")
    if uv is None:
        raise ConfigError(
            "creating an interpreter needs uv, which is not installed",
            hint=f"install uv, or pass an interpreter: {flag}",
        )
    shutil.rmtree(folder, ignore_errors=True)
    for arguments in (
        ["venv", "--python", version, str(folder)],
        ["pip", "install", "--python", str(folder / "bin" / "python"), *packages],
    ):
        result = subprocess.run([uv, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            output = "\n".join(result.stderr.strip().splitlines()[-8:])
            raise ConfigError(
                f"cannot create an interpreter with {', '.join(packages)}:\n{output}",
                hint=f"if the package index is unreachable from here, pass an interpreter: {flag}",
            )
