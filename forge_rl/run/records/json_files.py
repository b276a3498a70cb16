"""Reads and writes a run's JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.folders import write_whole


def write_json(path: Path, value: object) -> None:
    """Write a value as readable JSON, atomically: a killed process or machine leaves the old file or the new one."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def check_report(path: Path | None) -> None:
    """Check that the file of a flag --json, if it is set, can be written, before hours are spent on its content.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
    """
    if path is not None and path.is_dir():
        raise ConfigError(f"--json: {path} is a folder", hint="name a file in it")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json: the folder {path.parent} does not exist", hint="create it, or set another")


def write_report(path: Path, report: Mapping[str, object]) -> None:
    """Write the file that --json names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_json(path, report)
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}", hint="set another") from error


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
