"""A real run that is changed from another process, killed, and continued: the changes hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import forge_rl
from forge_rl.errors import ForgeError
from tests.commands import ROOT, Command, metrics, tiny_run
from tests.fake_engine import FOLDER

REWARD = """
def score(task, text):
    return 1.0 + len(text) % 7 / 7
"""


def wait_for_step(out: Path, step: int, timeout_s: float = 240.0) -> None:
    end = time.monotonic() + timeout_s
    while metrics(out)[-1]["step"] < step:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_attaching_loads_nothing_heavy():
    script = """
import sys
import forge_rl
forge_rl.attach
print(sorted({"torch", "monarch", "numpy", "transformers", "rich", "tyro"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.long
def test_changes_from_another_process_hold_after_a_kill(
    commands: list[Command], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "run"
    tasks = ("--tasks", "chain_sum:min_terms=2,max_terms=2", "leg_counting")
    flags = (*tasks, "--steps", "100000", "--evaluation.every", "5000", "--checkpoint-every", "100000")
    flags += ("--mixture.adapt", "success", "--mixture.most", "0.8")
    first = tiny_run(commands, tiny_model, out, *flags)
    first.wait_for("step +2/")
    assert (out / "control.sock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    run = forge_rl.attach("run")
    assert repr(run).startswith("Run  step ")
    assert "chain_sum" in repr(run)
    assert run.chat("What is 2 + 3?", max_tokens=4)
    served = run.open_gateway()
    with OpenAI(base_url=served["url"], api_key=served["key"]) as client:
        parameters: Any = {
            "model": served["model"],
            "prompt": [29114, 29115],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
        }
        assert client.completions.create(**parameters).usage.prompt_tokens == 2
    batch = run.last_batch
    assert batch is not None
    assert batch.groups[0].task.source in run.mixture
    assert batch.episodes[0].turns[0].messages == batch.groups[0].task.messages
    assert list(out.glob(".last-batch*")) == []

    assert sum(run.mixture.values()) == pytest.approx(1)
    run.mixture["leg_counting"] = 0.25
    run.reward = "mine.py:score"
    run.schedule.max_lag = 2
    assert (run.mixture["leg_counting"], run.schedule.max_lag, run.schedule.kind) == (0.25, 2, "pipelined")
    with pytest.raises(ForgeError, match=r"mine\.py has no nothing"):
        run.reward = "mine.py:nothing"
    with pytest.raises(ForgeError, match="no source named 'maths'"):
        run.mixture["maths"] = 1
    with pytest.raises(ForgeError, match="cannot change in a live run"):
        run.schedule.kind = "asynchronous"
    changed = run.step
    assert run.evaluate() > 1, "of the new reward"
    wait_for_step(out, changed + 6)
    events = [event["text"] for event in run.events(100)]
    for line in ("mixture leg_counting", f"-> {tmp_path}/mine.py:score (attached)", "schedule max_lag 1 -> 2"):
        assert any(line in event and "(attached)" in event for event in events), events
        first.wait_for(line.replace("(", r"\(").replace(")", r"\)").replace(".", r"\."))
    last = metrics(out)[-1]
    assert last["mixture/leg_counting"] == pytest.approx(0.25)
    assert last["reward/min"] >= 1
    assert "by position" in run.explain_gap(4)
    saved = run.checkpoint()
    assert saved.is_dir()
    run.schedule.max_episodes = 512  # is in no checkpoint
    first.seen |= set(first.children())
    os.killpg(first.process.pid, signal.SIGKILL)
    first.end()
    assert (out / "control.sock").exists(), "what a killed run leaves"
    with pytest.raises(ForgeError, match=r"is not running.*max_episodes 16384 -> 512"):
        forge_rl.attach(out)

    step = int(saved.name.removeprefix("step-"))
    second = tiny_run(commands, tiny_model, out, *flags)
    second.wait_for(f"step +{step + 4}/")
    for line in ("schedule max_lag 1 -> 2, schedule max_episodes 16384 -> 512", r"reward \S+ -> .*mine\.py"):
        second.wait_for(rf"{line}.*\(as it was changed live\)")
    after = [row for row in metrics(out) if row["step"] > step]
    assert {round(row["mixture/leg_counting"], 9) for row in after} == {0.25}
    assert min(row["reward/min"] for row in after) >= 1
    assert max(row["lag/max"] for row in after) <= 2
    assert "set by hand" in repr(run.mixture), "the same handle serves the continued run"
    assert (run.schedule.max_lag, run.schedule.max_episodes) == (2, 512)
    run.mixture.adapt("success", most=0.9)
    assert "set by hand" not in repr(run.mixture)
    run.stop(now=True)
    assert second.end() == 143, second.output
    assert "Traceback" not in second.output
    assert not (out / "control.sock").exists()
    assert second.strays() == []


@pytest.mark.nightly
def test_an_attached_client_pauses_resumes_and_stops_a_run(
    commands: list[Command], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    out = tmp_path / "run"
    notices, notify = tmp_path / "told", tmp_path / "notify.sh"
    notify.write_text(f"#!/bin/sh\ncat >> {notices}\n")
    notify.chmod(0o700)
    flags = ("--steps", "100000", "--evaluation.every", "0", "--checkpoint-every", "100000", "--prometheus", "0")
    flags += ("--alerts.command", str(notify))
    first = tiny_run(commands, tiny_model, out, *flags, recipe="tests.tiny_fake")
    first.wait_for("step +2/")
    run = forge_rl.attach(out)
    with pytest.raises(ForgeError, match=r"(?s)set to -1.*at most 0\.1"):
        run.lr = -1
    with pytest.raises(ForgeError, match="temperature is nan"):
        run.chat("?", temperature=float("nan"))
    run.pause()
    run.pause()
    first.wait_for(r"paused: engines hold their requests.*\(attached\)")
    assert run.paused
    assert "paused: resume()" in repr(run)
    time.sleep(2)
    step = run.step
    run.lr = 7e-5
    if run.ask("status")["phase"] == "rollout":
        with pytest.raises(ForgeError, match="in the middle of a rollout"):
            run.checkpoint()
    else:
        assert run.checkpoint().name == f"step-{step:06d}", "what is asked for is done meanwhile"
    with pytest.raises(ForgeError, match="resume it first"):
        run.evaluate()
    time.sleep(2)
    assert run.step == step, "nothing is trained"
    run.resume()
    wait_for_step(out, step + 3)
    assert not run.paused
    row = next(row for row in metrics(out) if row["step"] == step + 1)
    assert row["lr"] == pytest.approx(7e-5)
    run.stop()
    assert first.end() == 0, first.output
    stopped = int(metrics(out)[-1]["step"])
    assert "wall time" in first.output, "the end table"
    assert [path.name for path in (out / "checkpoints").glob("step-*")][-1:] or stopped == step
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("stopped", stopped)
    assert '"event": "run_stopped"' in notices.read_text()
    assert first.strays() == []

    second = tiny_run(commands, tiny_model, out, *flags, recipe="tests.tiny_fake")
    second.wait_for(f"step +{stopped + 1}/")
    assert run.lr == 7e-5
    run.stop()
    assert second.end() == 0, second.output
    assert metrics(out)[-1]["lr"] == pytest.approx(7e-5)
