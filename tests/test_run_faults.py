"""Whole runs whose processes are killed or stopped, the controller last: what goes on, and what ends with a word."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from forge_rl.system.allocator import allocator_environment
from forge_rl.weights.volume import reclaim
from tests.commands import (
    TASKS,
    Command,
    actor_of,
    forgotten,
    metrics,
    shared_memory,
    signal_all,
    tasks_by_step,
    tiny_run,
    wait_until,
)
from tests.processes import below

FOR_EVER = ("--steps", "100000", "--evaluation.every", "0")


def engine_of(command: Command, replica: int) -> psutil.Process:
    """vLLM's own process."""
    return below(actor_of(command, "generator", replica), "EngineCore")[0]


COLOCATED = ("--evaluation.every", "0", *TASKS, "--groups-per-batch", "4", "--placement", "colocated")


def kill_the_trainer_past_a_checkpoint(command: Command, out: Path, *, every: int) -> None:
    """Waits until steps would be lost, kills a rank, and sees them done again on the same tasks."""
    saved = every * (metrics(out)[-1]["step"] // every + 1)
    command.wait_for(f"step +{saved + 2}/")
    while not (out / "checkpoints" / f"step-{saved:06d}").exists():  # it is written while steps go on
        time.sleep(0.1)
    lost_tasks = tasks_by_step(out)
    actor_of(command, "trainer").kill()
    command.wait_for("trainer/0 failed.*SIGKILL")
    command.wait_for("trainer/0 has recovered")
    line = command.wait_for("the run continues from step [0-9]+$")
    back = int(line.rpartition(" ")[2])
    assert back in (saved, saved + every)
    command.wait_for(f"the run continues from step(.|\n)*step +{back + 3}/", whole=True)
    redone = tasks_by_step(out)
    for step in range(1, saved + 2):
        assert redone[step] == lost_tasks[step], "steps that were lost are done again on the same tasks"


def check_what_it_trained_on(out: Path) -> int:
    """Checks the folder of a run whose controller was killed; the number of its steps."""
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["lag/max"] <= 1 for row in rows)
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows), "of tokens that the trainer's weights produced"
    for name in ("sleep", "onload", "offload", "wake"):
        assert all(row[f"transition/{name}_s"] > 0 for row in rows[2:]), name
    tasks = tasks_by_step(out)
    drawn: Counter[object] = Counter()
    for step in range(1, len(rows)):  # of the last not all may be written
        assert Counter(source for source, _ in tasks[step]) == {"chain_sum": 3, "basic_arithmetic": 1}
        drawn.update(tasks[step])
    assert max(drawn.values()) == 1, "no task is trained on twice"
    return len(rows)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_survives_the_death_of_each_of_its_processes_in_any_order(
    commands: list[Command], run_model: Path, tmp_path: Path, shm: Path
) -> None:
    before = shared_memory()
    out = tmp_path / "run"
    arguments = (*COLOCATED, "--generator.replicas", "2", "--reward.replicas", "2", "--trainer.ranks", "2")
    arguments += ("--trainer.minibatches", "2", "--loss", "clipped:kl_coef=0.1", "--checkpoint-every", "10")
    arguments += ("--weights.shm", str(shm))
    command = tiny_run(commands, run_model, out, "--steps", "100000", *arguments)
    command.wait_for("step +3/")
    # Others may tell all processes to stop; these wait for the controller, vLLM's own too.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal_all(command, number, children=True)
    command.wait_for(f"step +{metrics(out)[-1]['step'] + 2}/")
    assert "failed" not in command.output
    libraries = {Path(part.path).name for part in actor_of(command, "trainer").memory_maps()}
    assert any(name.startswith("libtcmalloc") for name in libraries) == bool(allocator_environment())
    # One at a time, so that the machine has room; both engines at once in the end.
    faults = [
        ("reward", 0, signal.SIGKILL, "SIGKILL"),
        ("reward", 1, signal.SIGSTOP, "hung: its process was stopped"),
        ("generator", 0, signal.SIGSTOP, "hung: its process was stopped"),
        ("weights", 0, signal.SIGKILL, "SIGKILL"),
        ("trainer", 0, signal.SIGKILL, ""),
    ]
    random.Random(0).shuffle(faults)
    for service, replica, number, cause in faults:
        if service == "trainer":
            kill_the_trainer_past_a_checkpoint(command, out, every=10)
            continue
        actor_of(command, service, replica).send_signal(number)
        command.wait_for(f"{service}/{replica} failed.*{cause}")
        command.wait_for(f"{service}/{replica} has recovered")
    for replica in (0, 1):
        engine_of(command, replica).kill()
    for replica in (0, 1):
        command.wait_for(f"generator/{replica} failed.*vLLM engine process died")
    command.wait_for("generator/0 has recovered(.|\n)*generator/0 has recovered", whole=True)
    command.wait_for("generator/1 has recovered")
    step = metrics(out)[-1]["step"]
    command.wait_for(f"step +{step + 2}/")
    command.process.kill()
    command.end()
    assert "Traceback" not in command.output
    assert command.strays() == []
    assert reclaim(shm) > 0, "what the next start does"
    assert not forgotten(before)

    steps = check_what_it_trained_on(out)
    resumed_command = tiny_run(commands, run_model, out, "--steps", str(steps + 1), *arguments)
    resumed_command.wait_for("continued from")
    assert resumed_command.end(240) == 0, resumed_command.output
    counts = [(row["step"], row["updates"]) for row in metrics(out)]
    assert counts == [(step, 2 * step) for step in range(1, steps + 2)], "both go on from the checkpoint"
    assert json.loads((out / "summary.json").read_text())["faults"] == []
    assert resumed_command.strays() == []
    assert not forgotten(before)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_lends_devices_to_a_guest_and_survives_either_death(
    commands: list[Command], run_model: Path, tmp_path: Path, shm: Path
) -> None:
    before, out = shared_memory(), tmp_path / "run"
    arguments = ("--schedule.kind", "one_step", "--generator.guests", "1", "--checkpoint-every", "2", *TASKS)
    command = tiny_run(commands, run_model, out, *FOR_EVER, *arguments, "--weights.shm", str(shm))

    def wait_until_it_lends() -> None:
        row_count = len(metrics(out))

        def lends() -> bool:
            return any(row.get("transition/wake_s") and row["busy/generator/0"] for row in metrics(out)[row_count:])

        wait_until(lends, command)

    command.wait_for("vLLM, 1 replica and 1 on the trainer's devices")
    command.wait_for("step +3/")
    wait_until_it_lends()
    actor_of(command, "generator", 0).kill()
    command.wait_for("generator/0 failed.*SIGKILL")
    command.wait_for("generator/0 has recovered")
    wait_until_it_lends()
    actor_of(command, "trainer").kill()
    command.wait_for("trainer/0 has recovered")
    step = int(command.wait_for("the run continues from step [0-9]+$").rpartition(" ")[2])
    command.wait_for(f"the run continues from step(.|\n)*step +{step + 3}/", whole=True)
    wait_until_it_lends()
    command.process.send_signal(signal.SIGTERM)
    assert command.end(240) == 128 + signal.SIGTERM, command.output
    assert "Traceback" not in command.output
    assert command.strays() == []
    assert not forgotten(before)

    rows = metrics(out)
    assert all(row["lag/max"] <= 1 and row.get("logprob_gap", 0) < 1e-4 for row in rows)
    drawn = Counter(task for tasks in tasks_by_step(out).values() for task in tasks)
    assert max(drawn.values()) == 1, "no task is trained on twice"
