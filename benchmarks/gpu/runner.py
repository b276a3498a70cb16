"""Runs parts one after another, each in its own processes with a time limit; a failure affects only its own part."""

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
"""Environment variable that marks a part's processes, to find leftovers."""
_GRACE_S = 10.0
"""Grace period for a part to exit after its limit, in seconds."""
_TAIL = 30
"""Number of output lines to keep of a failed part."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part to measure, as its own command."""

    name: str
    says: str
    """Short description."""
    command: Sequence[str]
    """Command line; {json} stands for the file to which it may write an object of figures."""
    needs: Sequence[str] = ("gpu", "torch")
    """Requirements on the machine, as named by `machine.has`."""
    limit_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a part."""

    part: str
    status: Literal["ok", "failed", "timed out", "skipped"]
    seconds: float = 0.0
    figures: dict[str, object]
    """Measured figures, also of a part that failed afterwards."""
    said: str = ""
    """Reason why the part was skipped, or the end of its output if it failed."""


def run_parts(
    parts: Sequence[Part], needs: Collection[str], folder: Path, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run all parts whose needs are met, in order; a failure affects only its own part.

    On SIGTERM, kills the running part's processes and raises SystemExit(143).

    Args:
        needs: needs that the machine meets.
        folder: folder for output and figures.
        tell: called with each outcome when its part has ended.
    """
    outcomes = []
    for part in parts:
        lacking = [need for need in part.needs if need not in needs]
        if lacking:
            outcome = Outcome(part=part.name, status="skipped", figures={}, said=f"needs {', '.join(lacking)}")
        else:
            with exit_on_sigterm():
                outcome = run_part(part, folder)
        outcomes.append(outcome)
        tell(outcome)
    return outcomes


def run_part(part: Part, folder: Path) -> Outcome:
    """Run a part; all its processes have exited when this returns."""
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
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(
        part=part.name,
        status=status,
        seconds=round(time.monotonic() - began, 1),
        figures=_figures(figures, lines),
        said="" if status == "ok" else "\n".join(lines[-_TAIL:]),
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Format outcomes as readable lines, with the figures below each."""
    lines = [f"{'part':<18} {'status':<10} {'seconds':>8}"]
    for outcome in outcomes:
        lines.append(f"{outcome.part:<18} {outcome.status:<10} {outcome.seconds:>8.1f}")
        lines += [f"    {name} {_short(value)}" for name, value in outcome.figures.items()]
        if outcome.said:
            lines.append(f"    {outcome.said.splitlines()[-1][:100]}")
    return "\n".join(lines)


def _figures(path: Path, lines: Sequence[str]) -> dict[str, object]:
    """Read a part's figures; for pytest, which writes none, take the counts from its last line."""
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(path.read_text())
        # A benchmark's report has its figures under "results"; a function part writes them alone.
        figures = read.get("results", read) if isinstance(read, dict) else {}
        return dict(figures)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else "")
    return {name: int(count) for count, name in counts}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def _kill_marked(mark: str) -> None:
    """Kill all processes of this user with the mark in their environment, until there are none."""
    variable = f"{_MARK}={mark}".encode()
    # Again and again, as a dying process may still start another; the mark is inherited by all of them.
    for _ in range(50):
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if variable in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
