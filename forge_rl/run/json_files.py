"""Reads and writes a run's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, ForgeError


def write_json(path: Path, value: object) -> None:
    """Write a value as readable JSON, atomically: a killed process leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def read_object(
    path: Path, *, error: type[ForgeError] = ConfigError, hint: str = "choose another --out"
) -> dict[str, Any]:
    """Read a JSON object from an existing run; raises `error` if the file does not exist or is invalid."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it does not hold a JSON object")
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read: {cause}", hint=hint) from cause
    return content
