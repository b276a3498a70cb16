"""Models by name: packed rows against transformers, engine against trainer, files, and whole runs.

python -m benchmarks.models --json out.json

For each published checkpoint, a small random model with the quirks of its folder (tests/zoo) is trained and saved:

    forward_deviation   of the logits of packed rows from logits of transformers, one episode at a time, in float64; the
                        larger of rows with and without shared prefixes
    gradient_deviation  of the gradients, relative to each weight's largest entry
    files_equal         whether a saved folder has the names, shapes, config and tokenizer of the one it was loaded from
    round_trips         whether the tokenizer's stops are the folder's, and a rendered chat decodes to its text
    layouts             the layouts in which two ranks train a model on transformers' code, and
    layout_deviation    the largest deviation of their loss, gradient norms and weights from one process, in float64, as
                        in benchmarks.layouts, which measures native families
    refusal             why vLLM does not serve it, which leaves out the following
    engine_gap          of an engine's logprobs from transformers': at its start, after loading two versions, and
                        of an engine on the saved folder, in units of the expected rounding
    completions_gap     the same of 64 greedy and 64 sampled completions with the second version
    whole_run           whether a GRPO run of two steps trains in both, with attested weights, and saves equal files
    run_gap             largest difference of a logprob between engine and trainer in that run, for tokens of the newest
                        version
    run_rounding        for an engine in bfloat16, the same difference of transformers in bfloat16 from itself in
                        float32, on the saved folder
    seconds             how long all of this took

`--rows` writes each model's results to a folder, so that several processes can share the work and an interrupted one
resumes:

    python -m benchmarks.models --rows rows --models google/gemma-3-1b-it
    python -m benchmarks.models --rows rows --json out.json

`--native` measures the same models in native code and in transformers', in alternation, and nothing else: updates of
whole rows in float32, and for each family the median over pairs of neighbouring updates of transformers' seconds over
native ones, `factor_FAMILY`, and of seconds of CPU time, `cpu_factor_FAMILY`, on which other work of the machine has
less effect.

    python -m benchmarks.models --native --json out.json
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import layouts
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import general_layouts
from forge_rl.engines.platform import init_distributed

NATIVE = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "unsloth/gpt-oss-20b-BF16",
    "moonshotai/Moonlight-16B-A3B-Instruct",
    "moonshotai/Kimi-K2-Instruct, with a tokenizer.json",
    "ByteDance-Seed/Seed-OSS-36B-Base",
)
"""One checkpoint of each native model_type."""
_LAYOUT_UPDATES = 3
_RUN = (
    "--groups-per-batch 2 --group-size 4 --steps 2 --evaluation.every 0 --checkpoint-every 2 --display plain "
    "--tasks chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1 --reward tests.zoo.trained:mean_code "
    "--generator.max-model-len 240 --generator.max-tokens 16 --generator.kv-cache-gib 0.1"
)


def default_models() -> tuple[str, ...]:
    """Return the checkpoints that are measured by default."""
    from tests.zoo.general import GENERAL

    return (*NATIVE, *GENERAL)


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare models with transformers and with engines, by name."""

    models: tuple[str, ...] = ()
    """Names of published checkpoints, as in tests/zoo; by default all without a native family, and one of each of
    these."""
    rows: Path | None = None
    """Folder of the rows of models measured before, which are not measured again: a row of another commit names it."""
    engines: bool = True
    """Load published versions into an engine of each model."""
    whole_runs: bool = True
    """Do a whole run of each model."""
    layouts: bool = True
    """Train each model on transformers' code in its layouts of two ranks."""
    timeout_s: int = 900
    """Seconds that an engine or a run may take."""
    native: bool = False
    """Measure native families against transformers' code of them instead."""
    repeats: int = LEAST_REPEATS
    """Updates of each, after one that is not measured."""

    def __post_init__(self) -> None:
        from tests.zoo.checkpoints import CHECKPOINTS
        from tests.zoo.general import GENERAL

        if unknown := set(self.models) - (CHECKPOINTS | GENERAL).keys():
            raise BenchmarkError(f"there is no model {min(unknown)!r}", hint="see tests/zoo for the names")
        check_repeats(self.repeats)
        if self.timeout_s < 1:
            raise BenchmarkError(f"--timeout-s is {self.timeout_s}", hint="set it to 1 or more")


def measure(config: Config, report: Report) -> None:
    """Try each model, and print a table."""
    if config.native:
        compare_with_native(config.repeats, report)
        return
    names = config.models or default_models()
    paths = {name: config.rows and config.rows / (re.sub(r"\W+", "-", name) + ".json") for name in names}
    rows = {name: row for name in names if (row := _measured(paths[name], report.commit))}
    init_distributed(0, 1, "127.0.0.1", 0)
    try:
        for name in names:
            if name in rows:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                row = rows[name] = _measure_model(name, Path(scratch), config)
            print(json.dumps(row), flush=True)
            if (path := paths[name]) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"commit": report.commit, "row": row}))
    finally:
        torch.distributed.destroy_process_group()
    report.rows += [rows[name] for name in names]
    deviations = [float(str(row[key])) for row in report.rows for key in ("forward_deviation", "gradient_deviation")]
    gaps = [float(str(row["engine_gap"])) for row in report.rows if row.get("engine_gap") is not None]
    report.results |= {
        "models": len(report.rows),
        "worst_deviation": max(deviations),
        "models_with_equal_files": sum(bool(row["files_equal"]) for row in report.rows),
        "models_with_round_trips": sum(bool(row["round_trips"]) for row in report.rows),
        "models_with_engines": len(gaps),
        "models_with_whole_runs": sum(row.get("whole_run") is True for row in report.rows),
    }
    if gaps:
        report.results["worst_engine_gap"] = max(gaps)
    Console(highlight=False).print(_table(report))


def compare_with_native(repeats: int, report: Report) -> None:
    """Train models of three families in native code and in transformers', by turns, in float32."""
    from forge_rl.engines.optimizer import OptimizerConfig
    from forge_rl.engines.protocol import Modelling, TrainSettings
    from forge_rl.engines.titan.train import TitanEngine
    from tests.fakes import make_model, packed, random_batch, train_batch

    codes: tuple[Modelling, ...] = ("native", "transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 2048}
    batch = packed(random_batch(1, vocab=43, groups=4, group_size=4, turns=6), seq_len=512)
    init_distributed(0, 1, "127.0.0.1", 0)
    try:
        for family in ("llama", "qwen3", "qwen3_moe"):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                make_model(folder, family, num_attention_heads=4, num_key_value_heads=2, **sizes)
                optimizer = OptimizerConfig(lr=1e-4)
                engines = {
                    code: TitanEngine(
                        folder, TrainSettings(dtype="float32", seq_len=512, modelling=code, optimizer=optimizer)
                    )
                    for code in codes
                }
                seconds: dict[str, list[float]] = {code: [] for code in codes}
                cpu_seconds: dict[str, list[float]] = {code: [] for code in codes}
                for repeat in range(repeats + 1):
                    # The order alternates, so that a machine that slows down favours neither.
                    for code in codes if repeat % 2 else codes[::-1]:
                        start, cpu_start = time.perf_counter(), time.process_time()
                        train_batch(engines[code], batch)
                        seconds[code].append(time.perf_counter() - start)
                        cpu_seconds[code].append(time.process_time() - cpu_start)
                        is_warmup = repeat == 0
                        row: dict[str, object] = {"family": family, "modelling": code, "warmup": is_warmup}
                        row |= {"seconds": seconds[code][-1], "cpu_seconds": cpu_seconds[code][-1]}
                        report.rows.append(row)
            for code in codes:
                report.measure(f"seconds_{code}_{family}", seconds[code][1:])
                report.measure(f"cpu_seconds_{code}_{family}", cpu_seconds[code][1:])
            for prefix, values in (("", seconds), ("cpu_", cpu_seconds)):
                pairs = zip(values["transformers"][1:], values["native"][1:], strict=True)
                report.results[f"{prefix}factor_{family}"] = statistics.median(
                    first / second for first, second in pairs
                )
    finally:
        torch.distributed.destroy_process_group()


def _measured(path: Path | None, commit: str) -> dict[str, object] | None:
    """Return a model's earlier row, with its commit if that was another one; None if there is none."""
    if path is None or not path.exists():
        return None
    measured = json.loads(path.read_text())
    row: dict[str, object] = measured["row"]
    return row if measured["commit"] == commit else row | {"commit": measured["commit"][:8]}


def _measure_model(name: str, scratch: Path, config: Config) -> dict[str, object]:
    """Return a model's row; one that vLLM refuses has no whole run."""
    start = time.perf_counter()
    row = _compare(name, scratch / "packed")
    if config.layouts and row["modelling"] == "transformers":
        row |= _compare_layouts(name, scratch / "laid-out")
    if config.engines:
        row |= _engine_gaps(name, scratch / "served", config.timeout_s)
    if config.whole_runs and "refusal" not in row:
        row |= whole_run(name, scratch / "packed", config.timeout_s)
    return row | {"seconds": time.perf_counter() - start}


def _compare(name: str, folder: Path) -> dict[str, object]:
    """Train a model and compare its packed rows and its files; the row has what was measured."""
    from tests.zoo.general import LONG_TURNS
    from tests.zoo.packed import compare, engine_of, rows_of
    from tests.zoo.trained import ALL, modelling_of, prepare, round_trips

    prepare(name, folder)
    modelling = modelling_of(name)
    engine = engine_of(folder / "model", modelling)
    turns = LONG_TURNS.get(name, 3)
    deviations = [
        compare(engine, folder / "model", rows_of(share_prefixes=shared, turns=turns)) for shared in (True, False)
    ]
    return {
        "model": name,
        "family": ALL[name].family,
        "modelling": modelling,
        "forward_deviation": max(deviation.forward for deviation in deviations),
        "gradient_deviation": max(deviation.gradient for deviation in deviations),
        "files_equal": True,  # else prepare fails
        "round_trips": round_trips(name, folder / "model"),
    }


def _compare_layouts(name: str, folder: Path) -> dict[str, object]:
    """Train a model on transformers' code in each of its layouts of two ranks, and in one process."""
    from tests.zoo.folders import write_for_ranks

    model = write_for_ranks(name, folder / "model")
    names = general_layouts(read_architecture(model, "transformers"))
    degrees = {layout: settings for layout, ranks, settings in layouts.LAYOUTS if ranks == 2 and layout in names}
    modelling = ("modelling", "transformers")
    cases = [
        layouts.Case(family=model.name, name=layout, ranks=2, degrees=(modelling, *settings.items()))
        for layout, settings in degrees.items()
    ]
    alone = layouts.Case(family=model.name, name="one process", ranks=1, degrees=(modelling,))
    (expected,) = layouts.train(folder, [alone], _LAYOUT_UPDATES)
    deviations = [layouts.compare(result, expected).worst for result in layouts.train(folder, cases, _LAYOUT_UPDATES)]
    return {"layouts": ", ".join(degrees), "layout_deviation": max(deviations)}


def _engine_gaps(name: str, scratch: Path, timeout_s: int) -> dict[str, object]:
    """Take a model through a run's services, see tests/zoo/services.py."""
    from tests.zoo.services import whole_ways

    result = asyncio.run(whole_ways([name], scratch, timeout_s))[name]
    if isinstance(result, str):
        return {"refusal": result.partition(": ")[2]}
    if isinstance(result, Exception):
        raise result
    gaps = result.started, result.loaded, result.restarted
    return {"engine_gap": max(gaps), "completions_gap": result.completions}


def whole_run(name: str, zoo: Path, timeout_s: int, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run GRPO for two steps on what `tests.zoo.trained.prepare` wrote, and compare the saved folder with that one.

    Args:
        flags: further flags of the recipe.
    """
    from tests.zoo.trained import check_files, dtype_of

    lines, failure = run_steps(name, zoo, timeout_s, flags)
    if failure:
        return {"whole_run": False, "run_failed": failure}
    saved = zoo / "run" / "checkpoints" / "step-000002" / "model"
    check_files(name, (zoo / "model").resolve(), saved)
    row = {"whole_run": True, "run_gap": max(line.get("logprob_gap/max", 0.0) for line in lines)}
    if (dtype := dtype_of(saved)) != "float32":
        from tests.zoo.services import expected_logprobs

        logprobs = expected_logprobs(saved, dtype)
        row["run_rounding"] = float((logprobs[dtype] - logprobs["float32"]).abs().max())
    return row


def run_steps(name: str, zoo: Path, timeout_s: int, flags: tuple[str, ...] = ()) -> tuple[list[dict[str, Any]], str]:
    """Run GRPO for two steps on a folder of the zoo; return the metrics, and what failed, empty if nothing did."""
    from tests.zoo.trained import dtype_of, modelling_of

    model, out = (zoo / "model").resolve(), zoo / "run"
    command = [sys.executable, "-m", "recipes.grpo", "--model", str(model), "--out", str(out), *_RUN.split()]
    command += ["--trainer.modelling", modelling_of(name), "--generator.dtype", dtype_of(model), *flags]
    process = _finished(command, timeout_s)
    if process.returncode:
        return [], _last_line(process)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = sum(line.get("grad_norm", 0.0) > 0 for line in lines)
    return lines, "" if trained == 2 else f"it trained in {trained} of 2 steps"


def _finished(command: list[str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it took more than {timeout_s} s")


def _last_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (process.stdout + process.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line and "errors.pydantic" not in line] or lines
    return errors[-1][:300] if errors else f"exit status {process.returncode}"


def _table(report: Report) -> Table:
    table = Table("model", "modelling", "forward", "gradient", "files equal", "engine gap", "whole run", "run gap")
    for row in report.rows:
        forward, gradient = (f"{float(str(row[key])):.0e}" for key in ("forward_deviation", "gradient_deviation"))
        gaps = [row.get(key) for key in ("engine_gap", "run_gap")]
        texts = ["-" if gap is None else f"{float(str(gap)):.2g}" for gap in gaps]
        table.add_row(
            *(str(row["model"]), str(row["modelling"]), forward, gradient, "yes" if row["files_equal"] else "no"),
            *(texts[0], {True: "yes", False: "no", None: "-"}[row.get("whole_run")], texts[1]),  # type: ignore[index]
        )
    return table


if __name__ == "__main__":
    run_benchmark("models", Config, measure)
