"""Builds files and folders once into a cache folder, even if several processes need them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from forge_rl.errors import ForgeError
from forge_rl.system.folders import check_own

Progress = Callable[[str, float], None]
"""Callback that takes the current step and the fraction done overall, 0 to 1."""


def build_once(
    target: Path,
    build: Callable[[Path], None],
    error: type[ForgeError],
    *,
    is_ready: Callable[[], bool] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Build a file or folder unless it exists: one process builds it, the others wait.

    Args:
        target: what to build, in a folder that is created if needed.
        build: writes the file or folder to the path that it is given, which is then renamed to `target`.
        error: class of the error for a folder that others could have written to.
        is_ready: whether `target` need not be built; by default, whether it exists.
        wait: called if another process is building.

    Raises:
        ForgeError: an `error`: other users can write to the folder.
        OSError: the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    check_own(target.parent, error, deep=False)
    with open(target.parent / f".{target.name}.lock", "a", opener=_open_no_link) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # no timeout: the kernel frees the lock if its holder dies
            wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Asked again under the lock: another process may have built it meanwhile.
        if (is_ready or target.exists)():
            return
        for left_over in target.parent.glob(f".{target.name}-*"):  # from a killed process: we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as place:
            new_path = Path(place) / target.name
            build(new_path)
            if target.is_symlink():
                target.unlink()
            elif target.exists():
                target.rename(Path(place) / "replaced")  # a rename cannot replace a folder that is not empty
            new_path.rename(target)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
