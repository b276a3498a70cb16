"""Whole runs that train adapters over one base, through the deaths of an engine, the trainer and the controller."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from tests.commands import Command, actor_of, metrics, processes_of, tiny_run

pytestmark = pytest.mark.long

TASKS = (
    "sums=chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1",
    "letters=letter_counting:max_words=6",
    "legs=leg_counting:max_animals=3",
)
NAMES = ("sums", "letters", "legs")
STEPS = 8
LORA = ("--reward", "tests.tiny:share_of_vowels", "--lora.rank", "4", "--evaluation.every", "0")


def read_sources(out: Path, step: int) -> list[str]:
    """The source of each episode that a step trained on."""
    table = pyarrow.parquet.read_table(out / "episodes" / f"{step:06d}-trained.parquet", columns=["source"])
    return [str(source) for source in table["source"].to_pylist()]


@pytest.mark.timeout(1800)
def test_three_adapters_train_on_through_the_deaths_of_an_engine_the_trainer_and_the_controller(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ["--tasks", *TASKS, *LORA, "--trainer.optimizer.lr", "0.03"]
    flags += ["--groups-per-batch", "6", "--group-size", "4", "--steps", str(STEPS), "--checkpoint-every", "2"]
    command = tiny_run(commands, tiny_model, out, *flags, recipe="recipes.adapters")
    command.wait_for("step +3/")
    processes_of(command, "generator", 0)[-1].kill()
    actor_of(command, "trainer").kill()
    command.wait_for("the trainer was restarted; the run continues from step")
    command.wait_for("step +5/")
    command.clean_up()  # with SIGKILL, first of all the controller
    resumed_run = tiny_run(commands, tiny_model, out, *flags, recipe="recipes.adapters")
    assert resumed_run.end(900) == 0, resumed_run.output
    assert "continued from" in resumed_run.output
    rows = {row["step"]: row for row in metrics(out) if "sums/updates" in row}
    assert rows.keys() == set(range(1, STEPS + 1))
    for step, row in rows.items():
        for name in NAMES:
            assert row[f"{name}/updates"] == step, "no update is lost, and none is taken twice"
            assert row[f"{name}/logprob_drift"] < 1e-5, "episodes are of the adapter's own latest version"
            assert row.get(f"weights/probe_gap/{name}", 0.0) < 1e-3, "and so is what engines answer to probes"
    assert all(f"weights/probe_gap/{name}" in rows[STEPS] for name in NAMES)
    last = out / "checkpoints" / f"step-{STEPS:06d}" / "adapters"
    factors = [load_file(last / name / "adapter_model.safetensors") for name in NAMES]
    assert all(json.loads((last / name / "training.json").read_text())["updates"] == STEPS for name in NAMES)
    for first, second in itertools.combinations(factors, 2):
        assert any(not first[key].equal(second[key]) for key in first), "each learns from its own source"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_failed_adapters_source_gets_no_more_episodes(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    out, bad_tasks = tmp_path / "run", TASKS[1].replace("letters", "bad", 1)
    flags = ["--tasks", TASKS[0].replace("sums", "good", 1), bad_tasks, *LORA, "--trainer.max-skipped-updates", "2"]
    flags += ["--groups-per-batch", "4", "--group-size", "4", "--steps", "4", "--checkpoint-every", "0"]
    command = tiny_run(commands, tiny_model, out, *flags, recipe="tests.failing_adapter")
    assert command.end(600) == 0, command.output
    assert "adapter bad is trained no more, after 2 skipped updates" in command.output
    rows = [row for row in metrics(out) if "good/updates" in row]
    assert [row["good/updates"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("bad/tokens/trained", 0) for row in rows] == [0, 0, 0, 0]
    episodes = [Counter(read_sources(out, row["step"])) for row in rows]
    assert episodes == [{"good": 8, "bad": 8}] * 2 + [{"good": 16}] * 2
