"""Reads run folders, of live and ended runs. They may come from another machine: reads are bounded and checked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge_rl.errors import ConfigError
from forge_rl.system.folders import is_there

State = Literal["running", "finished", "stopped", "failed", "unknown", "unreadable"]
"""unknown: a process of another machine, whose locks are not seen here, had the folder last and left no summary.
unreadable: a folder that this user may not enter."""
_HOLDER = re.compile(r"process \d+ on (\S+)")
_MOST_BYTES = 1 << 28
"""Maximum size of a file of metrics that is read."""
_MOST_JSON_BYTES = 1 << 22
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """Summary of a run, as lists of runs show it."""

    folder: Path
    state: State
    model: str = ""
    step: int = 0
    """Last step in its metrics."""
    steps: int | None = None
    """Number of steps that it was to take; None if unknown."""
    changed_s: float = 0.0
    """Time of its last metrics, in seconds since 1970."""
    reward: float | None = None
    """Mean reward of the last step with one."""
    score_before: float | None = None
    score_after: float | None = None
    best_step: int | None = None


def list_runs(place: Path) -> list[PastRun]:
    """List the runs in a folder, the latest last, after those that cannot be read.

    Raises:
        ConfigError: the folder does not exist.
    """
    try:
        folders = sorted(place.iterdir())
    except OSError as error:
        raise ConfigError(f"{place} cannot be listed: {error.strerror}", hint="name the folder of your runs") from None
    locked, runs = _locked(), list[PastRun]()
    for folder in folders:
        try:
            if all(is_there(folder / name) for name in ("config.json", "versions.json")):
                runs.append(read_run(folder, locked))
        except OSError:  # in a shared place, run folders are private to their users
            runs.append(PastRun(folder=folder, state="unreadable"))
    return sorted(runs, key=lambda run: run.changed_s)


def read_run(folder: Path, locked: set[int] | None = None) -> PastRun:
    """Read the summary of a run.

    Args:
        locked: inodes of locked files; read from this machine by default.
    """
    locked = _locked() if locked is None else locked
    config, summary = read_bounded(folder / "config.json"), read_bounded(folder / "summary.json")
    # The last rows suffice for the step, the reward and the score.
    rows = list(metrics_of(folder, tail=True))
    changed, lock = 0.0, 0
    with contextlib.suppress(OSError):
        changed = (folder / "metrics.jsonl").stat().st_mtime
    with contextlib.suppress(OSError):
        lock = (folder / ".lock").stat().st_ino
    best, steps = summary.get("best"), config.get("steps")
    ended: dict[str, State] = {"finished": "finished", "failed": "failed"}
    outcome = str(summary.get("outcome", "finished")) if summary else ""
    # A run that was killed has neither a lock nor a summary, and counts as stopped, unless its lock would not be seen.
    is_elsewhere = not summary and _holder(folder / ".lock") not in ("", socket.gethostname())
    state: State = "running" if lock in locked else "unknown" if is_elsewhere else ended.get(outcome, "stopped")
    scores = [value for row in rows if (value := as_float(row.get("held_out"))) is not None]
    return PastRun(
        folder=folder,
        model=str(config.get("model", "")),
        state=state,
        step=max((row["step"] for row in rows), default=0),
        steps=steps if type(steps) is int else None,
        changed_s=changed,
        reward=next((value for row in reversed(rows) if (value := as_float(row.get("reward/mean"))) is not None), None),
        score_before=as_float(summary.get("score_before")),
        score_after=as_float(summary.get("score_after")) if summary else (scores[-1] if scores else None),
        best_step=best.get("step") if isinstance(best, dict) and isinstance(best.get("step"), int) else None,
    )


def _holder(lock: Path) -> str:
    """Return the machine whose process last held a run's lock; "" if its file does not say."""
    with contextlib.suppress(OSError):
        if lock.is_file():  # opening a pipe would wait for its writer
            with lock.open("rb") as file:
                match = _HOLDER.match(file.read(300).decode(errors="replace"))
            return match[1] if match else ""
    return ""


def read_bounded(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is none, or it is not one."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_JSON_BYTES:
            return {}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def metrics_of(folder: Path, *, tail: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics in order, each with its int "step"; incomplete lines are left out.

    Args:
        tail: only read the last rows.
    """
    path = folder / "metrics.jsonl"
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            if tail:
                # This begins in the middle of a line, which then fails to parse and is left out.
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield row


def as_float(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        # `isfinite` raises for integers beyond the range of floats.
        return None


def settings_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Flatten settings to one value per flag."""
    settings: dict[str, object] = {}
    for name, value in config.items():
        # The prefix grows with the depth, so that this bounds the recursion.
        if isinstance(value, dict) and len(prefix) < 200:
            settings |= settings_of(value, f"{prefix}{name}.")
        else:
            settings[f"{prefix}{name}"] = value
    return settings


def flag_of(setting: str) -> str:
    """Return the flag that sets a setting: trainer.seq_len is --trainer.seq-len."""
    return "--reward" if setting == "rewards" else f"--{setting.replace('_', '-')}"


def setting_text(value: object) -> str:
    """Write a setting's value roughly as on the command line: a list as its items."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _locked() -> set[int]:
    """Return the inodes of files that processes of this machine have locked, as a live run locks its folder's."""
    inodes = set[int]()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            # The sixth field is MAJOR:MINOR:INODE.
            if " FLOCK " in line:
                inodes.add(int(line.split()[5].rpartition(":")[2]))
    return inodes
