"""Whole runs whose versions are served as vLLM's adapters."""

from pathlib import Path

import pytest

from tests.commands import Command, metrics, processes_of, tiny_run
from tests.test_run import run_here

pytestmark = pytest.mark.long
SERVED = ("--lora.rank", "4", "--generator.adapters", "served")


@pytest.mark.timeout(1800)
def test_a_run_serves_its_versions_as_adapters_and_survives_the_death_of_an_engine(
    commands: list[Command], tiny_model: Path, tmp_path: Path
):
    out = tmp_path / "run"
    flags = (*SERVED, "--steps", "8", "--schedule.max-lag", "2", "--evaluation.every", "4", "--checkpoint-every", "8")
    command = tiny_run(commands, tiny_model, out, *flags, "--trainer.optimizer.lr", "0.003")
    command.wait_for("engines serve 3 versions at a time, as adapters of at most rank 16")
    command.wait_for("step +3/")
    processes_of(command, "generator", 0)[-1].kill()
    command.wait_for("generator/0 has recovered")
    assert command.end(900) == 0, command.output
    rows = [row for row in metrics(out) if "generator/served_versions" in row]
    assert {row["generator/served_versions"] for row in rows} >= {2.0, 3.0}
    gaps = [row["logprob_gap"] for row in rows if "logprob_gap" in row]  # of tokens of the trainer's own version
    assert gaps
    assert max(gaps) < 1e-3, "each token is of the version that it says"
    assert max(row["weights/probe_gap"] for row in rows if "weights/probe_gap" in row) < 1e-3
    assert max(row["lag/max"] for row in rows) <= 2
    assert min(row["weights/written_share"] for row in rows) < 0.02, "versions after the first are adapters alone"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (SERVED, "2 adapters of rank 16"),
        ((*SERVED, "--lora.rank", "600"), "largest rank is 512"),
        ((*SERVED, "--lora.publish", "merged"), "versions with --lora.publish merged have none"),
        (("--generator.adapters", "served"), "--lora.rank 0 trains all weights"),
    ],
)
def test_what_engines_cannot_serve_is_refused_by_the_plan(
    flags: tuple[str, ...],
    words: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    engine = ("--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25")
    shared = ("--model", str(tiny_model), "--out", str(tmp_path / "run"), "--display", "plain", "--plan")
    run_here("recipes.grpo", *shared, *engine, *flags, monkeypatch=monkeypatch)
    printed = capsys.readouterr()
    assert words in " ".join((printed.out + printed.err).split())
