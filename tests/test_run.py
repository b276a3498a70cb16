"""Whole runs on real services: the recipe from the command line, stopped, continued, and with workers killed."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from forge_rl import launch
from tests.commands import ROOT, Command, actor_of, forgotten, metrics, shared_memory, tiny_run

pytestmark = pytest.mark.processes


def test_a_step_of_grpo_on_the_bundled_model_leaves_a_whole_run_folder(commands: list[Command], tmp_path: Path) -> None:
    before = shared_memory()
    out = tmp_path / "run"
    command = Command(
        "recipes.grpo",
        *("--steps", "1", "--groups-per-batch", "4", "--group-size", "4", "--held-out-tasks", "4"),
        *("--eval-every", "1", "--checkpoint-every", "1", "--out", str(out), "--display", "plain"),
    )
    commands.append(command)
    command.wait_for("step +0/1")
    assert command.end(300) == 0, command.output

    rows = metrics(out)
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["logprob_gap"] <= 1e-4
    assert rows[1]["lag/max"] == 0
    for name in ("loss", "entropy", "grad_norm", "logprob_gap/max", "seconds/rollout", "seconds/train", "busy/trainer"):
        assert name in rows[1], name
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["faults"] == []
    assert 0 <= summary["score_before"] <= 1
    assert set(summary) == {"score_before", "score_after", "steps", "seconds", "faults"}
    assert json.loads((out / "config.json").read_text())["steps"] == 1
    assert "torch" in json.loads((out / "versions.json").read_text())
    assert (out / "episodes.jsonl").read_text().count("\n") > 0
    assert list((out / "tensorboard").iterdir())
    assert rows[1]["lag/hist"].keys() == {"0"}
    assert 0 < rows[1]["busy_rollout/generator/0"] <= 1
    drawn = json.loads((out / "trace.json").read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in drawn if event["name"] == "thread_name"}
    assert {"controller", "trainer/0", "generator/0", "reward/0"} <= set(lanes.values())
    assert "environment/0" not in lanes.values(), "a world that only shows its task has no process"
    controller = [event["name"] for event in drawn if lanes.get(event.get("tid")) == "controller"]
    assert controller.count("train") == controller.count("publish") == 1
    assert command.strays() == []
    assert not forgotten(before)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = out / "checkpoints" / "step-000001" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = AutoTokenizer.from_pretrained(folder)("2 + 2 =", return_tensors="pt")
    assert model(**prompt).logits.isfinite().all()


def test_ctrl_c_saves_the_same_command_continues_and_a_death_that_may_not_be_mended_ends_it(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ("--steps", "400", "--checkpoint-every", "3", "--eval-every", "0", "--seed", "3")
    arguments += ("--schedule.max-lag", "0", "--generator.restart.max-restarts", "0")
    stopped = tiny_run(commands, tiny_model, out, *arguments)
    stopped.wait_for("step +5/400")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.end() == 130, stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.strays() == []
    before = metrics(out)
    done = int(before[-1]["step"])
    assert 5 <= done < 400
    saved = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{done:06d}"
    assert "saved step" in stopped.output or done % 3 == 0

    # From an earlier checkpoint it trains the same steps again.
    for name in saved:
        if name > "step-000003":
            shutil.rmtree(out / "checkpoints" / name)
    continued = tiny_run(commands, tiny_model, out, *arguments)
    continued.wait_for("continued from .*step-000003")
    continued.wait_for(f"step +{done + 1}/400")
    after = metrics(out)
    assert [row["step"] for row in after[: done + 1]] == list(range(1, done + 2))
    for ours, theirs in zip(after[3:done], before[3:], strict=True):
        assert ours["seconds/train"] != theirs["seconds/train"], "it was trained again"
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)

    actor_of(continued, "generator").kill()
    assert continued.end(60) == 1, continued.output
    error = continued.output[continued.output.rindex("error:") :]
    for said in ("generator", "SIGKILL", "phase"):
        assert said in error
    assert "Traceback" not in continued.output
    assert continued.strays() == []


class Ended(Exception):
    """The exit status of a process that would have ended."""


def run_here(recipe: str, *args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a recipe's command in this process; returns its exit status."""

    def end(status: int) -> NoReturn:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    module = importlib.import_module(f"recipes.{recipe}")
    try:
        launch(module.Config, module.main, args=args)
    except Ended as ended:
        return int(ended.args[0])
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "smollm3"), "smollm2-135m"),
        (("--tasks", "chain_summ"), "chain_sum"),
        (("--group-size", "1"), "--group-size"),
        (("--trainer.optimizer.lr", "-1"), "--trainer.optimizer.lr"),
        (("--out", "/proc/forge_rl"), "--out"),
        (("--loss.kl-kind", "k3"), "--loss.kl-kind"),
    ],
)
def test_a_wrong_value_is_one_clear_message(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "run"))
    status = run_here("grpo", "--display", "plain", *arguments, *out, monkeypatch=monkeypatch)
    printed = capsys.readouterr()
    assert status == 1, printed.out + printed.err
    assert said in printed.err
    assert "hint:" in printed.err
    assert "Traceback" not in printed.err


def test_an_unknown_flag_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo", "--grup-size", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "--group-size" in done.stdout + done.stderr, "the nearest flag is named"


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py")))
def test_help_of_every_recipe_has_a_sentence_for_every_flag(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_here(recipe, "--help", monkeypatch=monkeypatch) == 0
    flags = re.findall(r"^│ (--[\w.-]+)[^\n]*\n│ +(.*?)│$", capfd.readouterr().out, flags=re.MULTILINE)
    assert len(flags) > 40
    for flag, sentence in flags:
        words = re.sub(r"\(default:.*", "", sentence).split()
        assert len(words) >= 2, f"{flag} has no help: {sentence!r}"
