"""Models by name: packed rows against transformers, engine against trainer, files, and whole runs.

python -m benchmarks.models --json out.json

For each published checkpoint, a small random model with the quirks of its folder (tests/zoo) is trained and saved:

    forward_deviation   of the logits of packed rows from logits of transformers, one episode at a time, in float64; the
                        larger of rows with and without shared prefixes
    gradient_deviation  of the gradients, relative to each weight's largest entry
    files_equal         whether a saved folder has the names, shapes, config and tokenizer of the one it was loaded from
    engine_gap          of an engine's logprobs from logprobs of the trainer's saved folder, after loading two published
                        and attested versions, in units of the expected rounding (--engines)
    whole_run           whether a GRPO run of two steps ends well (--whole-runs)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.factory import decode_environment
from forge_rl.engines.platform import init_distributed

_RUN = (
    "--groups-per-batch 2 --group-size 4 --steps 2 --evaluation.every 0 --checkpoint-every 2 --display plain "
    "--tasks chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1 --reward tests.tiny:share_of_vowels "
    "--generator.max-model-len 240 --generator.max-tokens 16 --generator.kv-cache-gib 0.1"
)


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare models with transformers and with engines, by name."""

    models: tuple[str, ...] = ()
    """Names of published checkpoints, as in tests/zoo; by default all without a native family."""
    engines: bool = True
    """Load published versions into an engine of each model."""
    whole_runs: int = 1000
    """Number of models that also do a whole run, from the first; 0 for none."""
    timeout_s: int = 900
    """Seconds that an engine or a run may take."""

    def __post_init__(self) -> None:
        from tests.zoo.checkpoints import CHECKPOINTS
        from tests.zoo.general import GENERAL

        if unknown := set(self.models) - (CHECKPOINTS | GENERAL).keys():
            raise BenchmarkError(f"there is no model {min(unknown)!r}", hint="see tests/zoo for the names")
        if self.whole_runs < 0 or self.timeout_s < 1:
            raise BenchmarkError(
                f"--whole-runs is {self.whole_runs} and --timeout-s {self.timeout_s}",
                hint="set --whole-runs to 0 or more, --timeout-s to 1 or more",
            )


def measure(config: Config, report: Report) -> None:
    """Try each model, and print a table."""
    from tests.zoo.general import GENERAL

    init_distributed(0, 1, "127.0.0.1", 0)
    try:
        for number, name in enumerate(config.models or tuple(GENERAL)):
            with tempfile.TemporaryDirectory() as scratch:
                report.rows.append(_try_model(config, name, Path(scratch), runs=number < config.whole_runs))
            print(json.dumps(report.rows[-1]), flush=True)
    finally:
        torch.distributed.destroy_process_group()
    deviations = [float(str(row[key])) for row in report.rows for key in ("forward_deviation", "gradient_deviation")]
    gaps = [float(str(row["engine_gap"])) for row in report.rows if row.get("engine_gap") is not None]
    report.results |= {
        "models": len(report.rows),
        "worst_deviation": max(deviations),
        "models_with_equal_files": sum(bool(row["files_equal"]) for row in report.rows),
        "models_with_engines": len(gaps),
        "models_with_whole_runs": sum(row.get("whole_run") is True for row in report.rows),
    }
    if gaps:
        report.results["worst_engine_gap"] = max(gaps)
    Console(highlight=False).print(_table(report))


def _try_model(config: Config, name: str, scratch: Path, *, runs: bool) -> dict[str, object]:
    """Measure one model; the row keeps the error of an engine or a run that fails."""
    from tests.zoo.checkpoints import CHECKPOINTS
    from tests.zoo.general import GENERAL
    from tests.zoo.packed import compare, engine_of, rows_of
    from tests.zoo.trained import prepare

    family = (CHECKPOINTS | GENERAL)[name].family
    prepare(name, scratch / "zoo")
    model = scratch / "zoo" / "model"
    engine = engine_of(model, "transformers" if name in GENERAL else "auto")
    deviations = [compare(engine, model, rows_of(share_prefixes=shared)) for shared in (True, False)]
    row: dict[str, object] = {
        "model": name,
        "family": family,
        "modelling": "transformers" if engine.architecture.family.general else "native",
        "forward_deviation": max(deviation.forward for deviation in deviations),
        "gradient_deviation": max(deviation.gradient for deviation in deviations),
        "files_equal": True,  # else prepare fails
    }
    if config.engines:
        row |= _engine_gap(scratch / "zoo", config.timeout_s)
    if runs:
        row |= _whole_run(model, str(row["modelling"]), scratch / "run", config.timeout_s)
    return row


def _engine_gap(folder: Path, timeout_s: int) -> dict[str, object]:
    """Serve the model, load two versions and serve the saved folder, see tests/zoo/engine.py."""
    command = [sys.executable, "-m", "tests.zoo.engine", str(folder)]
    process = _finished(command, timeout_s, decode_environment(0, replicas=1))
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"started"')]
    if process.returncode or not lines:
        return {"engine_gap": None, "engine_failed": _last_line(process)}
    gaps = json.loads(lines[-1])
    return {"engine_gap": max(gaps[name] for name in ("started", "loaded", "restarted"))}


def _whole_run(model: Path, modelling: str, out: Path, timeout_s: int) -> dict[str, object]:
    command = [sys.executable, "-m", "recipes.grpo", "--model", str(model.resolve()), "--out", str(out), *_RUN.split()]
    command += ["--trainer.modelling", modelling]
    process = _finished(command, timeout_s, {})
    if process.returncode == 0:
        return {"whole_run": True}
    return {"whole_run": False, "run_failed": _last_line(process)}


def _finished(command: list[str], timeout_s: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it took more than {timeout_s} s")


def _last_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (process.stdout + process.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line] or lines
    return errors[-1][:300] if errors else f"exit status {process.returncode}"


def _table(report: Report) -> Table:
    table = Table("model", "modelling", "forward", "gradient", "files equal", "engine gap", "whole run")
    for row in report.rows:
        forward, gradient = (f"{float(str(row[key])):.0e}" for key in ("forward_deviation", "gradient_deviation"))
        gap = row.get("engine_gap")
        table.add_row(
            *(str(row["model"]), str(row["modelling"]), forward, gradient, "yes" if row["files_equal"] else "no"),
            "-" if gap is None else f"{float(str(gap)):.2f}",
            {True: "yes", False: "no", None: "-"}[row.get("whole_run")],  # type: ignore[index]
        )
    return table


if __name__ == "__main__":
    run_benchmark("models", Config, measure)
