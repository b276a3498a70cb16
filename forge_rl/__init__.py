"""Reinforcement learning for language models that reason at length and call tools. Importing this starts nothing."""

from __future__ import annotations

import sys

from forge_rl.system.lazy import public_names

_NAMES = public_names(__file__)
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> object:
    """Import a public name on first use, as torch and Monarch take seconds to import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("forge_rl")
    if name not in _NAMES:
        raise AttributeError(f"module 'forge_rl' has no attribute {name!r}")
    from forge_rl.errors import ForgeError

    is_program = _asked_by_program()
    try:
        if "torch" not in sys.modules and is_program and name not in ("attach", "run_code"):
            from forge_rl.run.first_line import announce

            announce()
        value = _NAMES[name]
    except ForgeError as error:
        if is_program:
            sys.exit(f"error: {error}")
        raise
    except KeyboardInterrupt:  # a program that is stopped while it loads is stopped like any other
        if is_program:
            print("stopped by Ctrl-C", file=sys.stderr)
            sys.exit(130)
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
