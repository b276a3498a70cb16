"""Whole runs on real services: the recipe from the command line, stopped, continued, and with workers killed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from forge_rl import launch
from tests.commands import Command, forgotten, metrics, shared_memory, tiny_run

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_ctrl_c_saves_and_the_same_command_continues(commands: list[Command], run_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--steps", "16", "--checkpoint-every", "3", "--seed", "3", "--schedule.max-lag", "0")
    arguments += ("--evaluation.every", "2", "--evaluation.episodes", "2", "--evaluation.temperature", "1")
    stopped = tiny_run(commands, run_model, out, *arguments)
    stopped.wait_for("step +5/16")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.end() == 130, stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.strays() == []
    before = metrics(out)
    done = int(before[-1]["step"])
    assert 5 <= done < 16
    saved = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{done:06d}"
    assert "saved step" in stopped.output or done % 3 == 0
    assert json.loads((out / "summary.json").read_text())["outcome"] == "stopped"

    # From an earlier checkpoint it trains the same steps again.
    for name in saved:
        if name > "step-000003":
            shutil.rmtree(out / "checkpoints" / name)
    memory = shared_memory()
    continued = tiny_run(commands, run_model, out, *arguments)
    continued.wait_for("continued from .*step-000003")
    continued.wait_for("step +10/16")  # now all its processes are seen
    assert continued.end(300) == 0, continued.output
    after = metrics(out)
    assert [row["step"] for row in after] == list(range(17))
    for ours, theirs in zip(after[4 : done + 1], before[4:], strict=True):
        assert ours["seconds/train"] != theirs["seconds/train"], "it was trained again"
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours.get("held_out") == pytest.approx(theirs.get("held_out", ours.get("held_out")), abs=1e-6)
    check_folder(out, steps=16, redone=done - 3)
    assert continued.strays() == []
    assert not forgotten(memory)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = out / "checkpoints" / "step-000016" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = AutoTokenizer.from_pretrained(folder)("2 + 2 =", return_tensors="pt")
    assert model(**prompt).logits.isfinite().all()


def check_folder(out: Path, *, steps: int, redone: int) -> None:
    """Checks what a run left that has ended, some of whose steps were done twice."""
    rows = metrics(out)
    for row in rows[::2] + rows[-1:]:
        assert row["held_out"] == row["eval/held_out/avg@2"] > 0
        assert row["eval/held_out/other_versions"] == 0, "without a lag none goes on under other weights"
        assert row["eval/held_out/avg@2_stderr"] >= 0
    for row in rows[1:]:
        assert ("held_out" in row) == (row["step"] % 2 == 0 or row["step"] == steps)
        assert row["logprob_gap"] <= 1e-4
        assert row["lag/max"] == 0
        assert row["lag/hist"].keys() == {"0"}
        assert 0 < row["busy_rollout/generator/0"] <= 1
    for name in ("loss", "entropy", "grad_norm", "logprob_gap/max", "seconds/rollout", "seconds/train", "busy/trainer"):
        assert name in rows[1], name
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["faults"] == []
    assert summary["score_before"] == rows[0]["held_out"]
    assert summary["score_after"] == rows[-1]["held_out"]
    assert set(summary) == {"outcome", "score_before", "score_after", "best", "steps", "seconds", "faults"}
    scores = {row["step"]: row["held_out"] for row in rows if "held_out" in row}
    best = summary["best"]
    assert scores[best["step"]] == best["score"]
    link = out / "checkpoints" / "best"
    assert link.readlink().name == f"step-{best['step']:06d}" == Path(best["checkpoint"]).name
    assert (link / "model" / "config.json").is_file()
    assert json.loads((out / "config.json").read_text())["steps"] == steps
    assert "torch" in json.loads((out / "versions.json").read_text())
    assert (out / "episodes.jsonl").read_text().count("\n") > 0
    assert list((out / "tensorboard").iterdir())
    drawn = json.loads((out / "trace.json").read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in drawn if event["name"] == "thread_name"}
    assert {"controller", "trainer/0", "generator/0", "reward/0"} <= set(lanes.values())
    assert "environment/0" not in lanes.values(), "a world that only shows its task has no process"
    controller = [event["name"] for event in drawn if lanes.get(event.get("tid")) == "controller"]
    for phase in ("train", "publish"):
        assert 0 <= controller.count(phase) - steps - redone <= 1, "Ctrl-C may have cut one short"


class Ended(Exception):
    """The exit status of a process that would have ended."""


def run_here(module_name: str, *args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a module's command in this process; returns its exit status."""

    def end(status: int) -> NoReturn:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    module = importlib.import_module(module_name)
    try:
        launch(module.Config, module.main, args=args)
    except Ended as ended:
        return int(ended.args[0])
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "smollm3"), "smollm2-135m"),
        (("--tasks", "chain_summ"), "chain_sum"),
        (("--group-size", "1"), "--group-size"),
        (("--trainer.optimizer.lr", "-1"), "--trainer.optimizer.lr"),
        (("--out", "/proc/forge_rl"), "--out"),
        (("--loss", "clipped:kl_kind=k3"), "kl_kind"),
        (("--plan", "--trainer.ranks", "4096"), "for each trainer rank, but this machine has"),
        (("--generator.kv-cache-gib", "1e6"), "--generator.kv-cache-gib"),
        (("--trainer.enable-cpu-offload",), "--trainer.enable-cpu-offload"),
    ],
)
def test_a_wrong_value_is_one_clear_message(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "run"))
    status = run_here("recipes.grpo", "--display", "plain", *arguments, *out, monkeypatch=monkeypatch)
    printed = capsys.readouterr()
    assert status == 1, printed.out + printed.err
    assert message in printed.err
    assert "hint:" in printed.err
    assert "Traceback" not in printed.err


def test_an_unknown_flag_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here("recipes.grpo", "--grup-size", "8", monkeypatch=monkeypatch) == 2
    printed = capfd.readouterr()
    assert "--group-size" in printed.out + printed.err, "the nearest flag is named"
