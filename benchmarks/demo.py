"""Held-out score before and after `make demo` with several seeds and after the tools recipe, and the time of each run.

python -m benchmarks.demo --json out.json

Each run is the recipe's own process with its default engines and trainer; its time includes startup and both
evaluations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark

DEMO = (
    *("recipes.grpo", "--steps", "10", "--evaluation.every", "10"),
    *("--evaluation.tasks", "64", "--trainer.minibatches", "2", "--trainer.optimizer.lr", "3e-5"),
    *("--generator.max-tokens", "16", "--generator.max-model-len", "1024"),
)
"""Arguments of `make demo`."""
_SMOKE = ("--steps", "1", "--evaluation.every", "1", "--evaluation.tasks", "2", "--groups-per-batch", "2")


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Train the bundled model with the demo's flags, and report its scores."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of `make demo`, one run each."""
    smoke: bool = False
    """One step per run: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise BenchmarkError("--seeds is empty", hint="give at least one number")


def measure(config: Config, report: Report) -> None:
    """Run the demo with each seed, then the tools recipe."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    runs = {f"seed_{seed}": (*DEMO, "--seed", str(seed)) for seed in config.seeds} | {"tools": ("recipes.tools",)}
    for name, words in runs.items():
        with tempfile.TemporaryDirectory(prefix="forge_rl-demo-") as scratch:
            row = _run((*words, *(_SMOKE if config.smoke else ())), Path(scratch) / "run")
        print(f"{name}: {row['score_before']:.2f} to {row['score_after']:.2f} in {row['seconds']:.0f} s", flush=True)
        report.rows.append({"run": name, "warm_up": False, **row})
        report.results |= {f"{key}_{name}": value for key, value in row.items()}


def _run(words: Sequence[str], folder: Path) -> dict[str, float]:
    """Return the scores of a run, and its seconds from start to exit.

    Raises:
        BenchmarkError: it failed; quotes the end of its output.
    """
    command = [sys.executable, "-m", *words, "--out", str(folder), "--display", "plain"]
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise BenchmarkError(f"{words[0]} exited with {done.returncode}: {done.stdout[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    return {"score_before": summary["score_before"], "score_after": summary["score_after"], "seconds": seconds}


if __name__ == "__main__":
    run_benchmark("demo", Config, measure)
