"""Whole runs with an engine in vLLM's own server, which others started."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.ports import unused_port
from forge_rl.engines.remote import KEY_VARIABLE
from tests.commands import TASKS, Command, metrics, signal_all, tasks_by_step, tiny_run
from tests.test_run import run_here

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

SERVED = ("--engine.max-model-len", "256", "--engine.kv-cache-gib", "0.25")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-tests")
    return unused_port()


def serve(commands: list[Command], model: str, port: int) -> Command:
    """A server that has started."""
    command = Command("apps.serve_engine", "--model", model, "--port", str(port), *SERVED)
    commands.append(command)
    command.wait_for("Application startup complete")
    return command


def gaps(out: Path) -> list[float]:
    return [row["logprob_gap"] for row in metrics(out) if "logprob_gap" in row]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_server_that_is_killed_costs_nothing_and_joins_again(
    commands: list[Command], tiny_model: Path, tmp_path: Path, port: int
) -> None:
    server, out = serve(commands, str(tiny_model), port), tmp_path / "run"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *("--generator.urls", f"http://127.0.0.1:{port}", "--generator.replicas", "1", "--steps", "100000"),
        *("--groups-per-batch", "4", "--evaluation.every", "0", *TASKS),
    )
    command.wait_for("vLLM, 1 replica and 1 elsewhere")
    command.wait_for("step +3/")
    signal_all(server, signal.SIGKILL)
    command.wait_for("generator/0 failed")
    step = metrics(out)[-1]["step"]
    command.wait_for(f"step +{step + 2}/")
    assert "generator/0 has recovered" not in command.output
    serve(commands, str(tiny_model), port)
    command.wait_for("generator/0 has recovered")
    step = metrics(out)[-1]["step"]
    command.wait_for(f"step +{step + 3}/")
    command.process.send_signal(signal.SIGTERM)
    command.end(120)
    assert "Traceback" not in command.output
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["lag/max"] <= 1 for row in rows)
    assert gaps(out)
    assert max(gaps(out)) < 1e-4, "tokens are of the versions that they are said to be of"
    drawn: Counter[object] = Counter()
    tasks = tasks_by_step(out)
    for step in range(1, len(rows)):
        assert Counter(source for source, _ in tasks[step]) == {"chain_sum": 3, "basic_arithmetic": 1}
        drawn.update(tasks[step])
    assert max(drawn.values()) == 1, "no task is trained on twice"
    recorded = json.loads((out / "config.json").read_text())
    assert "a-key-of-tests" not in json.dumps(recorded)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", ["tests.tiny", pytest.param("recipes.grpo", marks=pytest.mark.nightly)])
def test_a_run_whose_only_engine_is_elsewhere_trains(
    recipe: str, commands: list[Command], tiny_model: Path, tmp_path: Path, port: int
) -> None:
    model = str(tiny_model) if recipe == "tests.tiny" else "smollm2-135m"
    serve(commands, model, port)
    command = tiny_run(
        commands,
        Path(model),
        tmp_path / "run",
        *("--generator.urls", f"http://127.0.0.1:{port}", "--generator.replicas", "0", "--steps", "3"),
        *("--groups-per-batch", "4", "--group-size", "4", "--evaluation.every", "0"),
        *("--tasks", "chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"),
        recipe=recipe,
    )
    assert command.end(900) == 0, command.output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(gaps(tmp_path / "run")) < 1e-2


def test_without_a_server_or_a_key_a_run_says_how_to_get_one(
    commands: list[Command],
    tiny_model: Path,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls = ("--generator.urls", f"http://127.0.0.1:{port}")
    command = tiny_run(commands, tiny_model, tmp_path / "run", *urls, "--generator.replicas", "0")
    assert command.end(240) == 1
    assert f"the engine at http://127.0.0.1:{port} does not answer" in command.output
    assert "forge-rl serve-engine --model MODEL" in command.output
    monkeypatch.delenv(KEY_VARIABLE)
    monkeypatch.setattr(os, "execve", pytest.fail)  # with a key, the server would take this process's place
    serving = ("--model", str(tiny_model), "--port", str(port))
    assert run_here("apps.serve_engine", *serving, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert f"{KEY_VARIABLE} is not set" in error
    assert sys.executable not in error
