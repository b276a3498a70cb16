"""Runs parts one after another, each in processes of its own with a time limit; one that fails costs only itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.gpu.machine import ROOT
from benchmarks.sigterm import exit_on_sigterm

_MARK = "FORGE_RL_BENCHMARK_PART"
"""Name of a variable in the environment of a part's processes, by which those that stay behind are found."""
_GRACE_S = 10.0
"""Seconds that a part gets to end by itself past its limit."""
_TAIL = 30
"""Lines of its output that are kept of a part that failed."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part to measure, as a command of its own."""

    name: str
    says: str
    """What it shows, in a few words."""
    command: Sequence[str]
    """{json} stands for the file that it writes an object of figures to, if it does."""
    needs: Sequence[str] = ("gpu", "torch")
    """What the machine must have, as `machine.has` names it."""
    limit_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a part."""

    part: str
    status: Literal["ok", "failed", "timed out", "skipped"]
    seconds: float = 0.0
    figures: dict[str, object]
    """What it measured; also of a part that failed later."""
    said: str = ""
    """Reason for a part that was skipped, and the end of the output of one that failed."""


def run_parts(
    parts: Sequence[Part], there: Collection[str], folder: Path, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run all parts whose needs are there, in order; a failure ends none but its own.

    On SIGTERM the running part's processes are killed and SystemExit(143) is raised.

    Args:
        there: what the machine has.
        folder: for their output and figures.
        tell: called with each outcome, as soon as it is known.
    """
    found = []
    for part in parts:
        lacking = [need for need in part.needs if need not in there]
        if lacking:
            outcome = Outcome(part=part.name, status="skipped", figures={}, said=f"needs {', '.join(lacking)}")
        else:
            with exit_on_sigterm():
                outcome = run_part(part, folder)
        found.append(outcome)
        tell(outcome)
    return found


def run_part(part: Part, folder: Path) -> Outcome:
    """Run a part; all its processes have ended when this returns."""
    log, figures = folder / f"{part.name}.log", folder / f"{part.name}.json"
    mark = uuid.uuid4().hex
    command = [word.replace("{json}", str(figures)) for word in part.command]
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {_MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: Literal["ok", "failed", "timed out"] = "timed out"
        try:
            status = "ok" if process.wait(part.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            _kill_marked(mark)
            process.wait()
    said = log.read_text(errors="replace").splitlines()
    return Outcome(
        part=part.name,
        status=status,
        seconds=round(time.monotonic() - began, 1),
        figures=_figures(figures, said),
        said="" if status == "ok" else "\n".join(said[-_TAIL:]),
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as lines for a person, the figures below each."""
    lines = [f"{'part':<18} {'status':<10} {'seconds':>8}"]
    for each in outcomes:
        lines.append(f"{each.part:<18} {each.status:<10} {each.seconds:>8.1f}")
        lines += [f"    {name} {_short(value)}" for name, value in each.figures.items()]
        if each.said:
            lines.append(f"    {each.said.splitlines()[-1][:100]}")
    return "\n".join(lines)


def _figures(path: Path, said: Sequence[str]) -> dict[str, object]:
    """Read what a part wrote; of pytest, which writes nothing, take the counts from its last line."""
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(path.read_text())
        found = read.get("results", read) if isinstance(read, dict) else {}
        return dict(found)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", said[-1] if said else "")
    return {name: int(count) for count, name in counts}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def _kill_marked(mark: str) -> None:
    """Kill all processes of this user that have the mark in their environment, until there are none."""
    wanted = f"{_MARK}={mark}".encode()
    for _ in range(50):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
