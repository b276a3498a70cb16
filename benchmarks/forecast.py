"""Compares the step that `--plan --on local` predicts with real steps of the run that it plans.

python -m benchmarks.forecast --json out.json

Runs of SmolLM2-135M on CPU with the synchronous schedule, which has no step without its rollout, and a reward that no
group agrees on, so that all groups are trained. Mean lengths are the run's own, as a plan cannot know them; this
machine is measured before and after each run.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl import Task
from forge_rl.engines.platform import resolve_dtype
from forge_rl.forecast.search import Forecast, Machines, measured_forecast, read_policy
from forge_rl.forecast.show import this_machine
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.run_config import RunConfig
from forge_rl.run.target import LOCAL, TargetConfig
from forge_rl.services.generator_config import GeneratorConfig

MODEL = "smollm2-135m"
_DEADLINE_S = 3600.0
_PHASES = ("rollout", "train", "publish")


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare predicted with measured steps."""

    shapes: tuple[str, ...] = ("4x4x32", "8x8x16", "4x8x64")
    """Steps to measure, each as tasks x episodes per task x maximum tokens of an answer."""
    steps: int = 6
    """Steps of each run; the first is not counted."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise BenchmarkError(f"--steps is {self.steps}", hint="set it to 2 or more; the first is not counted")
        for shape in self.shapes:
            numbers = shape.split("x")
            if len(numbers) != 3 or not all(number.isdecimal() and 0 < int(number) < 10_000 for number in numbers):
                raise BenchmarkError(f"--shapes has {shape!r:.40}", hint="write shapes such as 4x4x32")


def letters(task: Task, text: str) -> float:
    """Reward that differs between texts: the share of vowels, and the length to break ties."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text)) + len(text) * 1e-6


def measure(config: Config, report: Report) -> None:
    """Run and predict each shape."""
    log_ratios = []
    for shape in config.shapes:
        groups, size, tokens = map(int, shape.split("x"))
        before = _machine()
        rows = _run(groups, size, tokens, config.steps)
        after = _machine()
        forecast = _predict(groups, size, tokens, rows, before, after)
        measured = {name: statistics.median(row[f"seconds/{name}"] for row in rows) for name in (*_PHASES, "step")}
        predicted = {name: getattr(forecast, name).seconds for name in _PHASES} | {"step": forecast.step_s}
        for name, seconds in measured.items():
            report.results[f"{name}_s_{shape}"] = seconds
            report.results[f"{name}_predicted_s_{shape}"] = predicted[name]
        report.results[f"predicted_over_measured_{shape}"] = ratio = predicted["step"] / measured["step"]
        # Twice too long and half as long are equally wrong.
        log_ratios.append(abs(math.log(ratio)))
        report.rows.append({"shape": shape, "measured": measured, "predicted": predicted, "flops": before.device.flops})
    report.results["worst_ratio"] = math.exp(max(log_ratios))


def _machine() -> Machines:
    policy = read_policy(resolve_model(MODEL, default_cache()).resolve(), reference=False, values=False)
    return this_machine(policy, resolve_dtype("auto"))


def _predict(
    groups: int, size: int, tokens: int, rows: list[dict[str, float]], before: Machines, after: Machines
) -> Forecast:
    """Predict a step with the run's mean lengths, at the mean of both measurements of the machine."""
    answer = statistics.fmean(row["tokens/completion_mean"] for row in rows)
    packed = statistics.fmean(row["tokens/packed"] for row in rows)
    # Times add up, not rates: the harmonic mean of rates is the mean of the times.
    flops = statistics.harmonic_mean([before.device.flops, after.device.flops])
    bandwidth = statistics.harmonic_mean([before.device.bandwidth, after.device.bandwidth])
    machines = replace(before, device=replace(before.device, flops=flops, bandwidth=bandwidth, host_link=bandwidth))
    target = TargetConfig(
        on=LOCAL, answer_tokens=round(answer), prompt_tokens=max(1, round((packed - groups * size * answer) / groups))
    )
    config = RunConfig(
        groups_per_batch=groups,
        group_size=size,
        plan=True,
        target=target,
        schedule=ScheduleConfig(kind="synchronous"),
        generator=GeneratorConfig(max_tokens=tokens),
    )
    policy = read_policy(resolve_model(MODEL, default_cache()).resolve(), reference=False, values=False)
    return measured_forecast(config, policy, machines)


def _run(groups: int, size: int, tokens: int, steps: int) -> list[dict[str, float]]:
    """Train for some steps; return the metrics of all but the first."""
    with tempfile.TemporaryDirectory(prefix="forecast-") as scratch:
        out = Path(scratch) / "run"
        command = [
            *(sys.executable, "-m", "recipes.grpo", "--model", MODEL, "--steps", str(steps), "--out", str(out)),
            *("--groups-per-batch", str(groups), "--group-size", str(size), "--generator.max-tokens", str(tokens)),
            *("--schedule.kind", "synchronous", "--evaluation.every", "0"),
            *("--checkpoint-every", "0", "--display", "none", "--recording.share", "0"),
            *("--reward", "benchmarks.forecast:letters"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        if done.returncode:
            raise BenchmarkError(f"the run ended with {done.returncode}: {done.stderr[-400:]}")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines][1:]


if __name__ == "__main__":
    run_benchmark("forecast", Config, measure)
