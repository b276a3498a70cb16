"""Benchmarks run in a small form, and their results are among those of the figures."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.errors import ForgeError
from tools.figures import FOLDER, ROOT, unmeasured

FORMS = {
    "adapters": "--groups 1 --answer-tokens 8 --repeats 1 --families llama --no-engine",
    "answers": "--tasks 10 --datasets chain_sum",
    "chaos": "--episodes 8 --kills 2",
    "conformance": "--smoke",
    "containers": "--images musl --variants 2 --sessions 8 --starts 8 --changed-files 10 --podman-sessions 2",
    "data": "--gb 0.01 --tasks 1000",
    "demo": "--smoke --seeds 0",
    "demo_adapters": "--smoke --seeds 0 --kinds full merged served",
    "engine_start": "--smoke",
    "evaluation": "--smoke --on.most-tokens 24 --tasks-per-slot 1",
    "expert_parallel": "--ranks 2 --skews 1 2 --repeats 5 --tokens 256 --bias-updates 5",
    "forecast": "--shapes 2x2x4 --steps 2",
    "front_end": "--smoke --requests 8 --steps 34",
    "gateway": "--smoke --streams 100 --requests 4 --new-tokens 8",
    "grpo_step": "--smoke",
    "host_deaths": "--smoke",
    "hosts": "--smoke",
    "intervals": "--draws 2",
    "layouts": "--families llama --updates 1 --most-ranks 2",
    "long_rows": "--layers 1 --gib 3 --small 128 --longest-before 256 --longest 256 --repeats 1",
    "long_run": "--steps 200 --past 300",
    "methods": "--only grpo --seeds 0 --steps 1 --warmup-updates 0 --groups 1 --group-size 2 --minibatches 1 "
    "--max-tokens 4 --tasks 2",
    "modelling_memory": "--families qwen3_moe --width 128 --layers 1 --tokens 64",
    "models": "--models allenai/OLMo-2-0425-1B-Instruct --no-engines --no-whole-runs",
    "numerics": "--formats float32 --completions 2 --tokens 8",
    "overhead": "--smoke",
    "parsers": "--models Qwen/Qwen3-0.6B LiquidAI/LFM2-1.2B",
    "prefix_states": "--shapes 16x8x2 tree",
    "recording": "--episodes 16 --tokens 600 --train-s 1 --page-episodes 500",
    "recovery": "--smoke",
    "router_replay": "--completions 2 --tokens 8 --layers 1",
    "sandbox": "--sessions 8 --strict-sessions 4 --process-sessions 4 --starts 4 --cells 8 --forks 2 "
    "--workspace-files 20 --workspace-sessions 4 --peers 2",
    "schedules": "--engines 8 --batches 2 --warm-up 1",
    "schedules_real": "--real --on.most-tokens 12",
    "tools": "--episodes 8 --work 100",
    "trees": "--turns 4 --prompt 20 --layers 1",
    "update_cost": "--tokens 512 --layers 2",
    "weights": "--smoke",
    "weights_model": "--smoke",
}
"""Flags of a run of seconds, by figures: most benchmarks have one page, some a second with other flags."""
MODULES = {"demo_adapters": "demo", "schedules_real": "schedules"}
"""Benchmarks of figures with another name."""
PACKAGES = {"conformance", "methods"}
"""Benchmarks of several files."""
WITHOUT_FORM = {"gpu": "test_benchmark_gpu", "speculation": "test_speculation"}
"""Benchmarks with tests of their own: one that needs a device, and one whose small form is held to more than names."""
SAME = {"chaos_process", "chaos_strict"}
"""Figures of a benchmark with another value of one flag, and the same results."""
OTHER_RESULTS = {"chaos_images", "models_native"}
"""Figures of a benchmark with a flag by which it measures something else."""
COPIED = {"evaluation"}
"""Figures that were copied from a page, which had some of the results."""
NOT_IN_FIGURES = {
    "intervals": {"lowest_coverage_score", "lowest_coverage_difference"},
}
"""Results of benchmarks whose page has no figures."""


def benchmarks() -> set[str]:
    """Return the names of all benchmarks: what `python -m benchmarks.NAME` runs and reports."""
    folder = ROOT / "benchmarks"
    programs = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    names = {path.parent.name if path.name == "__main__.py" else path.stem for path in programs if _reports(path)}
    return names - {"report"}


def _reports(path: Path) -> bool:
    return path.name == "__main__.py" or "run_benchmark(" in path.read_text()


def names(results: dict[str, float]) -> set[str]:
    """Return the results' names without the sizes in them."""
    return {re.sub(r"\d+", "N", name) for name in results}


def test_every_benchmark_has_a_small_form() -> None:
    formed = {MODULES.get(name, name) for name in FORMS}
    assert benchmarks() - WITHOUT_FORM.keys() == formed
    assert all((ROOT / "tests" / f"{tests}.py").is_file() for tests in WITHOUT_FORM.values())


def test_all_figures_come_from_a_small_form() -> None:
    figures = {path.stem for path in FOLDER.glob("*.json")} | unmeasured()
    assert figures == (FORMS.keys() - NOT_IN_FIGURES.keys()) | WITHOUT_FORM.keys() | SAME | OTHER_RESULTS


@pytest.mark.parametrize("name", sorted(benchmarks() - WITHOUT_FORM.keys()))
def test_a_count_below_zero_is_refused_by_name(name: str) -> None:
    config = importlib.import_module(f"benchmarks.{name}{'.__main__' if name in PACKAGES else ''}").Config
    for field in dataclasses.fields(config):
        if type(field.default) is int and field.name != "seed":
            with pytest.raises(ForgeError, match=field.name.replace("_", "[-_ ]")):
                config(**{field.name: -1})


@pytest.mark.parametrize(
    "flags",
    [{"tokens": 50}, {"tokens": 601}, {"episodes": 4}, {"episodes": 20}, {"page_episodes": 50}],
    ids=lambda flags: " ".join(flags),
)
def test_a_step_of_recording_that_cannot_be_made_is_refused(flags: dict[str, int]) -> None:
    with pytest.raises(ForgeError, match=f"--{next(iter(flags)).replace('_', '-')} is"):
        importlib.import_module("benchmarks.recording").Config(**flags)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMS)
def test_a_small_form_has_results_of_the_figures(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{MODULES.get(name, name)}", *FORMS[name].split(), "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    results = names(json.loads(path.read_text())["results"])
    assert results
    if name in NOT_IN_FIGURES:
        assert results <= NOT_IN_FIGURES[name]
        return
    if name in unmeasured():
        return
    figures = json.loads((FOLDER / f"{name}.json").read_text())
    if name in COPIED:
        assert names(figures["results"]) <= results, "the benchmark has no such results any more"
    else:
        assert results <= names(figures["results"]), "the figures are older than the benchmark's results"
