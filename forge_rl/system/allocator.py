"""The memory allocator that a program gets when it is executed."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from forge_rl.system.variables import value_of

_FOLDERS = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_TCMALLOC = "libtcmalloc_minimal.so.4"
"""gperftools' allocator: Debian's and Ubuntu's libtcmalloc-minimal4, Red Hat's gperftools-libs."""


def allocator_environment(folders: Sequence[str] = _FOLDERS) -> dict[str, str]:
    """Return the environment variable with which a program uses tcmalloc; {} if it is not installed.

    LD_PRELOAD keeps the libraries that it names here. If an allocator is among them, it stays the one.

    Args:
        folders: where to look for the library.
    """
    libraries = value_of("LD_PRELOAD")
    paths = [path for folder in folders if os.path.exists(path := f"{folder}/{_TCMALLOC}")]
    return {"LD_PRELOAD": f"{paths[0]}:{libraries}".rstrip(":")} if paths and "malloc" not in libraries else {}
