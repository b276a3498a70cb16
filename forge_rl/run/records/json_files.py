"""Reads and writes a run's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.folders import write_whole


def write_json(path: Path, value: object) -> None:
    """Write a value as readable JSON, atomically: a killed process or machine leaves the old file or the new one."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_object(
    path: Path, *, error: type[ForgeError] = ConfigError, hint: str = "choose another --out"
) -> dict[str, Any]:
    """Read a JSON object from an existing run.

    Raises:
        ForgeError: of class `error`: the file does not exist, is invalid, or cannot be read at the moment. The hint
            tells the last case apart.
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it does not hold a JSON object")
    except (OSError, ValueError, RecursionError) as cause:
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            hint = "it may be intact: repeat the command once it can be read"
        raise error(f"{path} cannot be read: {cause}", hint=hint) from cause
    return content
