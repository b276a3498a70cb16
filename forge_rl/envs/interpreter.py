"""Interpreters for packages whose requirements conflict with ours: named by the user, or made once with uv."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.folders import check_own, make_private

CACHE = Path("~/.cache/forge_rl/interpreters")
"""Folder of the interpreters that were made."""


def interpreter(
    requirements: Sequence[str],
    *,
    python: str = "",
    cache: Path = CACHE,
    flag: str = "--env verifiers:NAME,python=PATH",
) -> Path:
    """Return a Python interpreter that has some packages; it is made when it is first asked for.

        interpreter(["verifiers==0.4.0", "./environments/reverse_text"])

    Args:
        requirements: packages, as `uv pip install` takes them. Paths are resolved.
        python: an interpreter that has them already, which is returned as it is.
        flag: how the user names one.

    Raises:
        ConfigError: there is no such interpreter; or one cannot be made, because there is no uv, the registry does not
            answer, or the packages do not resolve.
    """
    if python:
        found = shutil.which(Path(python).expanduser())
        if found is None:
            raise ConfigError(f"there is no interpreter {python}", hint="name the python of a virtual environment")
        return Path(found).absolute()
    wanted = [str(Path(each).resolve()) if Path(each).exists() else each for each in requirements]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = hashlib.sha256("\n".join([version, *wanted]).encode()).hexdigest()[:16]
    cache = cache.expanduser()
    make_private(cache, ConfigError, deep=False)  # interpreters link to the one that they were made from
    folder, ready = cache / name, cache / name / ".ready"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making it
        if not ready.exists():
            print(f"making an interpreter with {', '.join(requirements)} in {folder}, once", file=sys.stderr)
            _make(folder, wanted, version, flag)
            ready.write_text("\n".join(wanted))
    check_own(folder, ConfigError, deep=False)
    return folder / "bin" / "python"


def _make(folder: Path, wanted: Sequence[str], version: str, flag: str) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise ConfigError(
            "there is no uv to make an interpreter with",
            hint=f"install uv, or name one: {flag}",
        )
    shutil.rmtree(folder, ignore_errors=True)
    for arguments in (
        ["venv", "--python", version, str(folder)],
        ["pip", "install", "--python", str(folder / "bin" / "python"), *wanted],
    ):
        done = subprocess.run([uv, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise ConfigError(
                f"no interpreter with {', '.join(wanted)} can be made:\n{said}",
                hint=f"if the registry cannot be reached from here, name another one: {flag}",
            )
