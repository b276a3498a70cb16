"""Reinforcement learning for language models that reason at length and call tools. Importing this starts nothing."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

_HOMES = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import \w+ as (\w+)$", Path(__file__).with_suffix(".pyi").read_text(), flags=re.MULTILINE
    )
}
"""Module of each public name. The stub is read, so that a name is written once for programs and for type checkers."""
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name on first use, as torch and Monarch take seconds to import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("forge_rl")
    if name not in _HOMES:
        raise AttributeError(f"module 'forge_rl' has no attribute {name!r}")
    from forge_rl.errors import ForgeError

    is_program = _asked_by_program()
    try:
        if "torch" not in sys.modules and is_program and name not in ("attach", "run_code"):
            from forge_rl.run.first_line import announce

            announce()
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ForgeError as error:
        if is_program:
            sys.exit(f"error: {error}")
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def _asked_by_program() -> bool:
    """Return True if the importer is a running program, such as `python -m recipes.grpo`, not a library or a prompt."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "__main__" and "__file__" in frame.f_globals
