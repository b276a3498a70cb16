"""Measure figures again, by the commands that their files state.

    python -m tools.figures --measure

The benchmarks run one after another, as times want a machine to themselves. Each writes into `.bench/figures` first:
a file changed in docs/figures would be an uncommitted change, which the next benchmark's report would state.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

IDLE_LOAD = 0.5
"""Load average of the last minute above which the machine is said to be busy."""


def measure(folder: Path, names: Sequence[str], root: Path) -> list[str]:
    """Measure figures in turn, and write those that succeed into their folder, also when interrupted.

    Args:
        folder: the figures' files, NAME.json.
        names: figures to measure.
        root: the checkout, in which the commands run.

    Returns:
        The names of the figures whose benchmark failed; their files stay as they are.
    """
    if (load := os.getloadavg()[0]) > IDLE_LOAD:
        print(f"the load average is {load:.1f}: other programs run, and figures of time will show it")
    results = root / ".bench" / "figures"
    shutil.rmtree(results, ignore_errors=True)  # files of an interrupted call, which was at another commit
    results.mkdir(parents=True)
    failures = []
    try:
        for number, name in enumerate(names, 1):
            command = json.loads((folder / f"{name}.json").read_text())["command"]
            print(f"[{number} of {len(names)}] {command}", flush=True)
            arguments = [sys.executable, *shlex.split(command)[1:], "--json", str(results / f"{name}.json")]
            start = time.monotonic()
            status = subprocess.run(arguments, cwd=root, check=False).returncode
            print(f"{name}: exit status {status} after {time.monotonic() - start:.0f} s", flush=True)
            if status:
                failures.append(name)
    finally:
        for path in results.glob("*.json"):
            shutil.move(path, folder / path.name)
    return failures
