"""Whole runs over several hosts, which are processes of this machine: --job process:N."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.commands import Command, forgotten, metrics, shared_memory, tiny_run
from tests.fake_actors import hosts_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

FOUR = (
    *("--job", "process:4", "--trainer.ranks", "2", "--generator.replicas", "2"),
    *("--placement", "trainer=host0+host1;generator=host1+host2;environment=host3;reward=host3"),
)


def hosts_of_services(command: Command) -> dict[str, set[str]]:
    """The hosts on which the processes of each service run, by the log files that they print to."""
    found: dict[str, set[str]] = {}
    for host, pid in hosts_of(command.process.pid).items():
        for process in psutil.Process(pid).children(recursive=True):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
            found.setdefault(log.partition("-")[0], set()).add(host)
    return found


def test_a_run_over_four_hosts_goes_on_when_two_of_them_are_killed(
    commands: list[Command], tiny_model: Path, tmp_path: Path
):
    before, out = shared_memory(), tmp_path / "run"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *FOUR,
        *("--env", "tests.fake_envs:Elsewhere", "--steps", "40", "--checkpoint-every", "2"),
    )
    command.wait_for("host host3: reward, environment")
    command.wait_for(r"step +3/40")
    expected = {
        "trainer": {"host0", "host1"},
        "generator": {"host1", "host2"},
        "weights": {"host0", "host1", "host2"},
        "environment": {"host3"},
        "reward": {"host3"},
    }
    found = hosts_of_services(command)
    assert {service: found.get(service) for service in expected} == expected
    pids = hosts_of(command.process.pid)
    os.kill(pids["host2"], signal.SIGKILL)  # engine 1 moves
    command.wait_for("host host2 is gone")
    command.wait_for("generator/1 has recovered")
    os.kill(pids["host0"], signal.SIGKILL)  # so do the trainer's ranks
    command.wait_for("the run continues from step [0-9]+$")
    command.wait_for(r"step +40/40")
    assert command.end() == 0, command.output
    rows = [row for row in metrics(out) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows), "engines have the weights of all ranks"
    placed = json.loads((out / "hosts.json").read_text())
    assert placed["services"]["trainer"] == ["host0", "host1"]
    assert not command.strays()
    assert not forgotten(before)
    assert not list(out.glob(".probe*"))


def test_ranks_on_two_hosts_take_the_same_steps_as_on_one(commands: list[Command], tiny_model: Path, tmp_path: Path):
    rows = [{"question": f"What is {n} + {m}?", "answer": str(n + m)} for n in range(1, 5) for m in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ("--tasks", str(tmp_path / "rows.jsonl"), "--trainer.ranks", "2", "--trainer.optimizer.lr", "1e-3")
    common += ("--evaluation.every", "0", "--steps", "4", "--checkpoint-every", "4")
    losses = []
    for name, job in (("one", ("local",)), ("two", ("process:2", "--placement", "trainer=host1+host0"))):
        out = tmp_path / name
        command = tiny_run(commands, tiny_model, out, *common, "--job", *job, recipe="recipes.sft")
        assert command.end(240) == 0, command.output
        losses.append([row["loss"] for row in metrics(out) if "loss" in row])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
