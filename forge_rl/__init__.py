"""Reinforcement learning for language models that reason at length and call tools. Importing this starts nothing."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from forge_rl.algorithms import ClippedSurrogate, batch_advantages, group_advantages
    from forge_rl.envs.protocol import Observation, Step
    from forge_rl.envs.tools import ToolEnv
    from forge_rl.errors import ForgeError
    from forge_rl.packing.rows import pack
    from forge_rl.run.attach import attach
    from forge_rl.run.launch import launch
    from forge_rl.run.run import Run
    from forge_rl.run.run_config import RunConfig
    from forge_rl.run.start import Starting, start
    from forge_rl.types import Batch, Episode, Group, Sampling, Score, Task, Turn

__all__ = [
    "Batch",
    "ClippedSurrogate",
    "Episode",
    "ForgeError",
    "Group",
    "Observation",
    "Run",
    "RunConfig",
    "Sampling",
    "Score",
    "Starting",
    "Step",
    "Task",
    "ToolEnv",
    "Turn",
    "attach",
    "batch_advantages",
    "group_advantages",
    "launch",
    "pack",
    "start",
]

_HOMES = {
    "Batch": "types",
    "ClippedSurrogate": "algorithms",
    "Episode": "types",
    "ForgeError": "errors",
    "Group": "types",
    "Observation": "envs.protocol",
    "Run": "run.run",
    "RunConfig": "run.run_config",
    "Sampling": "types",
    "Score": "types",
    "Starting": "run.start",
    "Step": "envs.protocol",
    "Task": "types",
    "ToolEnv": "envs.tools",
    "Turn": "types",
    "attach": "run.attach",
    "batch_advantages": "algorithms",
    "group_advantages": "algorithms",
    "launch": "run.launch",
    "pack": "packing.rows",
    "start": "run.start",
}


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
        if "torch" not in sys.modules and is_program and name != "attach":
            from forge_rl.run.first_line import announce

            announce()
        return getattr(importlib.import_module(f"forge_rl.{_HOMES[name]}"), name)
    except ForgeError as error:
        if is_program:
            sys.exit(f"error: {error}")
        raise


def _asked_by_program() -> bool:
    """Return True if the importer is a running program, such as `python -m recipes.grpo`, not a library or a prompt."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "__main__" and "__file__" in frame.f_globals
