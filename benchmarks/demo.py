"""Held-out score before and after `make demo` with several seeds and after the tools recipe, and the time of each run.

python -m benchmarks.demo --json out.json
python -m benchmarks.demo --kinds full merged served --json out.json

Each run is the recipe's own process with its default engines and trainer; its time includes startup and both
evaluations. With several kinds of training, results are medians over the seeds of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.memory import sampled_peak, tree_sampler
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark

DEMO = (
    *("recipes.grpo", "--steps", "10", "--evaluation.every", "10"),
    *("--evaluation.tasks", "64", "--trainer.minibatches", "2", "--trainer.optimizer.lr", "3e-5"),
    *("--generator.max-tokens", "16", "--generator.max-model-len", "1024"),
)
"""Arguments of `make demo`."""
_ADAPTERS = ("--lora.rank", "16", "--trainer.optimizer.lr", "3e-4")
KINDS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "merged": _ADAPTERS,
    "served": (*_ADAPTERS, "--generator.adapters", "served"),
}
"""Flags by kind of training and engines; they follow the demo's, and the last value of a flag counts."""
_SMOKE = ("--steps", "1", "--evaluation.every", "1", "--evaluation.tasks", "2", "--groups-per-batch", "2")


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Train the bundled model with the demo's flags, and report its scores."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of `make demo`, one run each."""
    kinds: tuple[Literal["full", "merged", "served"], ...] = ("full",)
    """What each seed trains: all weights, or LoRA adapters of rank 16 that engines merge or serve."""
    smoke: bool = False
    """One step per run: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise BenchmarkError("--seeds is empty", hint="give at least one number")
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise BenchmarkError(f"--kinds is {' '.join(self.kinds)!r}", hint="give each kind once")


def measure(config: Config, report: Report) -> None:
    """Run the demo with each seed, then the tools recipe, or with each seed in several kinds of training."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    if len(config.kinds) > 1:
        _compare_kinds(config, report)
        return
    (kind,) = config.kinds
    runs: dict[str, tuple[str, ...]] = {
        f"seed_{seed}": (*DEMO, *KINDS[kind], "--seed", str(seed)) for seed in config.seeds
    }
    if kind == "full":
        runs["tools"] = ("recipes.tools",)
    for name, words in runs.items():
        row, costs = _run(config, name, words)
        report.rows.append({"run": name, "warm_up": False, **row, **costs})
        report.results |= {f"{key}_{name}": value for key, value in row.items()}


def _compare_kinds(config: Config, report: Report) -> None:
    values: dict[str, list[float]] = {}
    for seed in config.seeds:  # in turn, as the machine may become slower
        for kind in config.kinds:
            name = f"{kind}, seed {seed}"
            row, costs = _run(config, name, (*DEMO, *KINDS[kind], "--seed", str(seed)))
            row["gain"] = row["score_after"] - row["score_before"]
            report.rows.append({"run": name, "kind": kind, "seed": seed, "warm_up": False, **row, **costs})
            for key, value in (row | costs).items():
                values.setdefault(f"{key}_{kind}", []).append(value)
    for key, kind_values in values.items():
        report.measure(key, kind_values)


def _run(config: Config, name: str, words: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the scores of a run, and its seconds from start to exit; and its peak memory, the bytes that its last
    version wrote and their share of a whole one's, and the largest gap between engines and trainer.

    Raises:
        BenchmarkError: it failed; quotes the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="forge_rl-demo-") as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", *words, *(_SMOKE if config.smoke else ())]
        command += ["--out", str(folder), "--display", "plain"]
        began = time.monotonic()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with sampled_peak(tree_sampler(child.pid), 0.5) as peak:
            output, _ = child.communicate()
        seconds = time.monotonic() - began
        if child.returncode:
            raise BenchmarkError(f"{words[0]} exited with {child.returncode}: {output[-2000:]}")
        summary = json.loads((folder / "summary.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    costs = {"peak_gib": peak[0] / 2**30}
    for metric, cost, join in (
        ("weights/written_bytes", "published_bytes", lambda values: values[-1]),
        ("weights/written_share", "published_share", lambda values: values[-1]),
        ("logprob_gap", "logprob_gap", max),
    ):
        if values := [step[metric] for step in steps if metric in step]:
            costs[cost] = join(values)
    row = {"score_before": summary["score_before"], "score_after": summary["score_after"], "seconds": seconds}
    print(f"{name}: {row['score_before']:.2f} to {row['score_after']:.2f} in {seconds:.0f} s", flush=True)
    return row, costs


if __name__ == "__main__":
    run_benchmark("demo", Config, measure)
