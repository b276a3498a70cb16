"""Benchmarks run in a small form, and their results are among those of the figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.figures import FOLDER, ROOT

FORMS = {
    "answers": "--tasks 10 --datasets chain_sum",
    "chaos": "--episodes 8 --kills 2",
    "data": "--gb 0.01 --tasks 1000",
    "expert_parallel": "--ranks 2 --skews 1 2 --repeats 5 --tokens 256 --bias-updates 5",
    "hosts": "--smoke",
    "intervals": "--draws 2",
    "long_run": "--steps 200 --past 300",
    "overhead": "--smoke",
    "recording": "--episodes 16 --tokens 600 --train-s 1 --page-episodes 500",
    "sandbox": "--sessions 8 --strict-sessions 4 --process-sessions 4 --starts 4 --cells 8 --forks 2 "
    "--workspace-files 20 --workspace-sessions 4 --peers 2",
    "schedules": "--engines 8 --batches 2 --warm-up 1",
    "tools": "--episodes 8 --work 100",
    "trees": "--turns 4 --prompt 20 --layers 1",
}
"""Flags of a run of seconds."""
NOT_IN_FIGURES = {"intervals": {"lowest_coverage_score", "lowest_coverage_difference"}}
"""Results of benchmarks whose page has no figures."""


def names(results: dict[str, float]) -> set[str]:
    """Return the results' names without the sizes in them."""
    return {re.sub(r"\d+", "N", name) for name in results}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMS)
def test_a_small_form_has_results_of_the_figures(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *FORMS[name].split(), "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    figures = FOLDER / f"{name}.json"
    expected = NOT_IN_FIGURES.get(name) or names(json.loads(figures.read_text())["results"])
    results = names(json.loads(path.read_text())["results"])
    assert results
    assert results <= expected, "the figures are older than the benchmark's results"
