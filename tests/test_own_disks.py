"""Whole runs over hosts that see neither the run's folder nor the model's: each has mounts of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.commands import Command, forgotten, metrics, shared_memory, tiny_run

HIDES = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(not HIDES, reason="this user may not create mount namespaces"),
]


def two_hosts(tmp_path: Path, *hidden: Path) -> str:
    """A job of two hosts, on each of which the folders are empty and its own."""
    script = tmp_path / "host.sh"
    mounts = " && ".join(f"mount -t tmpfs none {folder}" for folder in hidden)
    script.write_text(f'shift\n{mounts} && exec "$@"\n')
    return f"allocation:hosts=127.0.0.1+127.0.0.2,launcher=unshare --mount sh {script} {{host}}"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    task_rows = [{"question": f"What is {n} + {m}?", "answer": str(n + m)} for n in range(1, 5) for m in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, task_rows)))
    return str(tmp_path / "rows.jsonl")


@pytest.mark.nightly
def test_ranks_on_two_hosts_save_and_resume_through_the_controller(
    commands: list[Command], tiny_model: Path, tmp_path: Path, rows: str
):
    before, out = shared_memory(), tmp_path / "own"
    common = ("--tasks", rows, "--trainer.optimizer.lr", "1e-3", "--evaluation.every", "0", "--checkpoint-every", "4")
    common += ("--cache", str(tmp_path / "cache"), "--trainer.ranks", "2")
    job = ("--job", two_hosts(tmp_path, out, tiny_model), "--placement", "trainer=127.0.0.1+127.0.0.2")
    arguments = (*common, *job, "--steps", "30")
    command = tiny_run(commands, tiny_model, out, *arguments, recipe="recipes.sft")
    command.wait_for("127.0.0.1, 127.0.0.2 do not see the run's folder")
    command.wait_for(r"step +9/30")  # before which it waits until the checkpoint of step 4 is whole
    os.kill(command.process.pid, signal.SIGKILL)
    command.end()
    assert not command.strays()
    copies = [path for path in (tmp_path / "cache" / "copies").iterdir() if path.is_dir()]
    assert len(copies) == 1, "the model was copied once"

    command = tiny_run(commands, tiny_model, out, *arguments, recipe="recipes.sft")
    command.wait_for("resumed after step [0-9]+")
    assert command.end(240) == 0, command.output
    assert not command.strays()
    resumed = {row["step"]: row["loss"] for row in metrics(out) if "loss" in row}

    whole_run = tiny_run(commands, tiny_model, tmp_path / "whole", *common, "--steps", "30", recipe="recipes.sft")
    assert whole_run.end(240) == 0, whole_run.output
    assert resumed == {row["step"]: row["loss"] for row in metrics(tmp_path / "whole") if "loss" in row}
    last = "checkpoints/step-000030/model/model.safetensors"
    assert (out / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()

    # One rank of this machine continues what the two have written.
    changed = ("--trainer.ranks", "1", "--job", "local", "--placement", "auto", "--steps", "31", "--force-continue")
    command = tiny_run(commands, tiny_model, out, *arguments, *changed, recipe="recipes.sft")
    command.wait_for("resumed after step 30")
    assert command.end(240) == 0, command.output
    assert not forgotten(before)


def test_engines_read_a_copied_model_and_send_their_logs(commands: list[Command], tiny_model: Path, tmp_path: Path):
    out, mine = tmp_path / "run", tmp_path / "mine"
    mine.mkdir()
    (mine / "its_helper.py").write_text("def vowels(text): return sum(letter in 'aeiou' for letter in text)\n")
    source = "import its_helper\n\ndef score(task, text):\n"
    source += "    print('scored there', flush=True)\n    return its_helper.vowels(text) / max(1, len(text))\n"
    (mine / "score.py").write_text(source)
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *("--job", two_hosts(tmp_path, out, tiny_model, mine), "--cache", str(tmp_path / "cache")),
        *("--placement", "trainer=127.0.0.1;generator=127.0.0.2;reward=127.0.0.2", "--steps", "2"),
        *("--reward", f"{mine}/score.py:score", "--evaluation.every", "0"),
    )
    assert command.end(400) == 0, command.output
    assert not command.strays()
    step_rows = [row for row in metrics(out) if "loss" in row]
    assert [row["step"] for row in step_rows] == [1, 2]
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in step_rows)
    logs = {path.name: path.read_text() for path in (out / "logs").glob("*.log")}
    assert logs.keys() >= {"trainer-0.log", "generator-0.log", "reward-0.log"}
    assert "scored there" in logs["reward-0.log"]
    assert (out / "checkpoints" / "step-000002" / "model" / "model.safetensors").is_file()
