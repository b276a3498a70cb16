"""Whole runs over several hosts, which are processes of this machine: --job process:N."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil
import pytest

from forge_rl.errors import ForgeError
from forge_rl.run.live.attach import attach
from forge_rl.weights.volume import reclaim
from tests.commands import (
    TASKS,
    Command,
    forgotten,
    metrics,
    shared_memory,
    tasks_by_step,
    tiny_run,
    wait_for_engines,
    wait_for_step,
)
from tests.fake_actors import hosts_of
from tests.processes import below, log_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_left")]

STARTS_S = 600.0
"""Time for the start of an engine of two hosts, each of which imports vLLM twice, on a busy machine."""
FOUR = (
    *("--job", "process:4", "--trainer.ranks", "2", "--generator.replicas", "2"),
    *("--placement", "trainer=host0+host1;generator=host1+host2;environment=host3+host1;reward=host3+host1"),
)


def hosts_of_services(command: Command) -> dict[str, set[str]]:
    """The hosts on which the processes of each service run, by the log files that they print to."""
    hosts_by_service: dict[str, set[str]] = {}
    for host, pid in hosts_of(command.process.pid).items():
        for process in psutil.Process(pid).children(recursive=True):
            hosts_by_service.setdefault(log_of(process).partition("-")[0], set()).add(host)
    return hosts_by_service


def engine_on(command: Command, host: str) -> psutil.Process:
    """The process of an engine, or of its part, on a host."""
    processes = psutil.Process(hosts_of(command.process.pid)[host]).children(recursive=True)
    generators = [process for process in processes if log_of(process).startswith("generator-")]
    return min(generators, key=lambda process: process.create_time())


def addresses(processes: set[psutil.Process]) -> set[str]:
    """The addresses at which processes listen."""
    listeners = [
        connection
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    ]
    return {connection.laddr.ip for connection in listeners}


def volumes(process: psutil.Process) -> set[Path]:
    """Folders of the weights that a process maps."""
    paths = [Path(mapping.path) for mapping in process.memory_maps()]
    return {path.parent for path in paths if any(part.startswith("forge_rl-") for part in path.parts)}


def check_tasks(out: Path, steps: Iterable[int]) -> None:
    """Checks that each step has trained on the exact mixture, and no step on the task of another."""
    batches = tasks_by_step(out)
    assert {step: Counter(source for source, _ in tasks) for step, tasks in batches.items()} == {
        step: {"chain_sum": 3, "basic_arithmetic": 1} for step in steps
    }
    drawn = Counter(task for tasks in batches.values() for task in tasks)
    assert set(drawn.values()) == {1}


def kill(command: Command, host: str) -> None:
    """Kills a host, which the run must notice."""
    os.kill(hosts_of(command.process.pid)[host], signal.SIGKILL)
    command.wait_for(f"host {host} is gone")


def test_a_run_over_four_hosts_goes_on_when_one_of_each_kind_is_killed(
    commands: list[Command], tiny_model: Path, tmp_path: Path
):
    before, out = shared_memory(), tmp_path / "run"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *FOUR,
        *TASKS,
        *("--env", "tests.fake_envs:Elsewhere", "--steps", "100000"),
        *("--checkpoint-every", "2", "--groups-per-batch", "4"),
    )
    command.wait_for("host host3: reward, environment")
    command.wait_for(r"step +3/")
    expected = {
        "trainer": {"host0", "host1"},
        "generator": {"host1", "host2"},
        "weights": {"host0", "host1", "host2"},
        "environment": {"host3"},
        "reward": {"host3"},
    }
    hosts_of = hosts_of_services(command)
    assert {service: hosts_of.get(service) for service in expected} == expected
    kill(command, "host2")  # engine 1 moves
    command.wait_for("generator/1 has recovered")
    kill(command, "host3")  # so do environment and reward
    command.wait_for("environment/0 has recovered")
    kill(command, "host0")  # and the trainer's ranks
    line = command.wait_for("the run continues from step [0-9]+$")
    run = attach(out)
    wait_for_step(command, run, int(line.rpartition(" ")[2]) + 5)
    run.stop()
    assert command.end() == 0, command.output
    rows = [row for row in metrics(out) if "loss" in row]
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows), "engines have the weights of all ranks"
    check_tasks(out, steps)
    placed = json.loads((out / "hosts.json").read_text())
    assert placed["services"]["trainer"] == ["host0", "host1"]
    assert not command.strays()
    assert not forgotten(before)
    assert not list(out.glob(".probe*"))


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_run_goes_on_when_a_part_of_its_engine_of_two_hosts_is_killed(
    commands: list[Command], tiny_model: Path, tmp_path: Path
):
    before, out = shared_memory(), tmp_path / "run"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *("--job", "process:2", "--placement", "trainer=host0;generator=host0+host1", *TASKS),
        *("--generator.tensor-parallel-size", "2", "--generator.hosts-per-replica", "2"),
        *("--steps", "8", "--evaluation.every", "0"),
    )
    command.wait_for("step +2/", STARTS_S)
    first, second = engine_on(command, "host0"), engine_on(command, "host1")
    (leading,), (worker,) = (below(part, "Worker_TP") for part in (first, second))
    assert volumes(leading)
    assert volumes(worker)
    assert volumes(leading).isdisjoint(volumes(worker)), "each reads its host's copy"
    assert addresses({first, second, *first.children(recursive=True), worker}) == {"127.0.0.1"}
    second.kill()
    command.wait_for("generator/0 failed")
    command.wait_for("generator/0 has recovered", STARTS_S)
    assert not first.is_running()
    assert not worker.is_running()
    assert command.end(400) == 0, command.output
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows)
    (fault,) = json.loads((out / "summary.json").read_text())["faults"]
    assert (fault["service"], fault["replica"]) == ("generator", 0)
    assert command.strays() == []
    assert not forgotten(before)


def joining(commands: list[Command], out: Path, name: str, *arguments: str) -> Command:
    """A host that joins a live run."""
    command = Command("apps.join", str(out), "--name", name, *arguments)
    commands.append(command)
    command.wait_for(f"host {name} has joined")
    return command


@pytest.mark.nightly
def test_hosts_join_and_leave_a_live_run_and_nothing_is_lost(commands: list[Command], tiny_model: Path, tmp_path: Path):
    before, out = shared_memory(), tmp_path / "run"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *("--job", "process:2", "--placement", "trainer=host0;generator=host1;environment=host0", *TASKS),
        *("--generator.max-replicas", "2", "--environment.max-replicas", "2", "--env", "tests.fake_envs:Elsewhere"),
        *("--steps", "400", "--checkpoint-every", "50", "--groups-per-batch", "4", "--evaluation.every", "0"),
    )
    command.wait_for(r"step +3/400")
    run = attach(out)
    engines, step_beyond = partial(wait_for_engines, command, run), partial(wait_for_step, command, run)
    assert run.hosts == dict.fromkeys(("local", "host0", "host1"), "serves")
    first = joining(commands, out, "spot", "--services", "generator+environment")
    engines("2")
    logs = {log_of(process).partition("-")[0] for process in first.children()}
    assert logs >= {"generator", "environment", "weights"}, (first.output, command.output)
    step_beyond(run.step + 3)
    first.process.send_signal(signal.SIGTERM)  # it is told to leave
    assert first.end() == 143, first.output
    command.wait_for("host spot has left")
    engines("1")
    assert run.ask("status")["engines"] == "1/1", "no engine is missed"
    assert not first.strays()
    with pytest.raises(ForgeError, match="has, or had, a host 'spot'"):
        run.ask("join", name="spot", address=f"ipc://{tmp_path}/host", services=[])

    second = joining(commands, out, "other", "--services", "generator+environment")
    engines("2")
    step_beyond(run.step + 3)
    (worker,) = psutil.Process(second.process.pid).children()
    worker.kill()  # it is not told
    command.wait_for("host other is gone")
    engines("1")
    assert second.end() == 1, second.output
    step_beyond(run.step + 3)
    run.scale(engines=2, environments=2)  # on the host that is there
    engines("2")
    step_beyond(run.step + 2)
    run.stop()
    assert command.end() == 0, command.output
    rows = [row for row in metrics(out) if "loss" in row]
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows), "engines that join have the weights"
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    check_tasks(out, steps)
    outcomes = Counter(json.loads(line)["outcome"] for line in (out / "episodes.jsonl").read_text().splitlines())
    assert outcomes.keys() <= {"completed", "truncated"}, "no episode is lost"
    assert not command.strays()
    assert not forgotten(before)


@pytest.mark.nightly
def test_a_dead_host_is_replaced_by_one_that_ends_with_a_killed_run(
    commands: list[Command], tiny_model: Path, tmp_path: Path, shm: Path
):
    before, out = shared_memory(), tmp_path / "a run; touch injected"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *("--job", "process:2,most_replaced=3", "--placement", "trainer=host0;generator=host0+host1;environment=host0"),
        *("--generator.replicas", "2", "--generator.min-replicas", "1", *TASKS),
        *("--steps", "1000", "--checkpoint-every", "50", "--groups-per-batch", "4", "--evaluation.every", "0"),
        *("--weights.shm", str(shm)),
    )
    command.wait_for(r"step +2/1000")
    run = attach(out)
    kill(command, "host1")
    wait_for_engines(command, run, "1")
    command.wait_for(r"host host1\.\d has joined: generator")
    wait_for_engines(command, run, "2")
    wait_for_step(command, run, run.step + 3)
    assert "serves" in {run.hosts[host] for host in run.hosts if host.startswith("host1.")}
    steps = range(1, run.step)  # whose files are written
    command.seen |= set(command.children())
    command.process.kill()
    assert command.end() == -signal.SIGKILL
    assert not command.strays()
    assert reclaim(shm) > 0, "what the next start does"
    assert not forgotten(before)
    batches = tasks_by_step(out)
    assert {step: Counter(source for source, _ in batches[step]) for step in steps} == {
        step: {"chain_sum": 3, "basic_arithmetic": 1} for step in steps
    }, "the mixture is exact"
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in metrics(out) if "loss" in row)
