"""Whole runs whose processes are killed or stopped, the controller last: what goes on, and what ends with a word."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from forge_rl.weights.volume import reclaim
from tests.commands import TASKS, Command, actor_of, forgotten, metrics, shared_memory, tasks_by_step, tiny_run
from tests.processes import below

FOR_EVER = ("--steps", "100000", "--evaluation.every", "0")


def signal_all(command: Command, number: signal.Signals, *, children: bool = False) -> None:
    """Signals each process of a run, as scancel, systemd and a time limit do; or all but the controller."""
    for process in [psutil.Process(command.process.pid)][children:] + command.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


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
    lost = tasks_by_step(out)
    actor_of(command, "trainer").kill()
    command.wait_for("trainer/0 failed.*SIGKILL")
    command.wait_for("trainer/0 has recovered")
    line = command.wait_for("the run continues from step [0-9]+$")
    back = int(line.rpartition(" ")[2])
    assert back in (saved, saved + every)
    command.wait_for(f"the run continues from step(.|\n)*step +{back + 3}/", whole=True)
    redone = tasks_by_step(out)
    for step in range(1, saved + 2):
        assert redone[step] == lost[step], "steps that were lost are done again on the same tasks"


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
    commands: list[Command], tiny_model: Path, tmp_path: Path, shm: Path
) -> None:
    before = shared_memory()
    out = tmp_path / "run"
    arguments = (*COLOCATED, "--generator.replicas", "2", "--reward.replicas", "2", "--trainer.ranks", "2")
    arguments += ("--trainer.minibatches", "2", "--loss", "clipped:kl_coef=0.1", "--checkpoint-every", "10")
    arguments += ("--weights.shm", str(shm))
    command = tiny_run(commands, tiny_model, out, "--steps", "100000", *arguments)
    command.wait_for("step +3/")
    # Others may tell all processes to stop; these wait for the controller, vLLM's own too.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal_all(command, number, children=True)
    command.wait_for(f"step +{metrics(out)[-1]['step'] + 2}/")
    assert "failed" not in command.output
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
    again = tiny_run(commands, tiny_model, out, "--steps", str(steps + 1), *arguments)
    again.wait_for("continued from")
    assert again.end(240) == 0, again.output
    counts = [(row["step"], row["updates"]) for row in metrics(out)]
    assert counts == [(step, 2 * step) for step in range(1, steps + 2)], "both go on from the checkpoint"
    assert json.loads((out / "summary.json").read_text())["faults"] == []
    assert again.strays() == []
    assert not forgotten(before)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_lends_devices_to_a_guest_and_survives_either_death(
    commands: list[Command], tiny_model: Path, tmp_path: Path, shm: Path
) -> None:
    before, out = shared_memory(), tmp_path / "run"
    arguments = ("--schedule.kind", "one_step", "--generator.guests", "1", "--checkpoint-every", "2", *TASKS)
    command = tiny_run(commands, tiny_model, out, *FOR_EVER, *arguments, "--weights.shm", str(shm))

    def wait_until_it_lends() -> None:
        seen = len(metrics(out))

        def lends() -> bool:
            return any(row.get("transition/wake_s") and row["busy/generator/0"] for row in metrics(out)[seen:])

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


@pytest.mark.long
def test_a_phase_that_takes_too_long_names_what_it_waits_for(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    arguments = (*FOR_EVER, "--phase-deadline-s", "1", "--generator.max-tokens", "200")
    command = tiny_run(commands, tiny_model, tmp_path / "run", *arguments)
    assert command.end(240) == 1
    assert re.search(r"phase \w+: .*did not end within its 1 s", command.output), command.output
    assert command.strays() == []


@pytest.mark.long
def test_a_port_in_use_is_named(commands: list[Command], tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = tiny_run(commands, tiny_model, tmp_path / "run", "--trainer.ranks", "2", "--trainer.port", str(port))
        assert command.end(240) == 1, command.output
    assert f":{port}" in command.output
    assert "--trainer.port" in command.output
    assert command.strays() == []


def events(out: Path) -> str:
    return (out / "events.jsonl").read_text()


def saved_steps(out: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((out / "checkpoints").glob("step-*"))]


def wait_until(holds: Callable[[], bool], command: Command, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert command.process.poll() is None, command.output
        assert time.monotonic() < until, command.output
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_survives_lost_output_and_full_disks_and_still_saves(
    commands: list[Command], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_RL_FAKE_ENGINES", str(tmp_path))
    before, out = shared_memory(), tmp_path / "run"
    arguments = (*FOR_EVER, "--checkpoint-every", "2", "--reward.replicas", "1", "--reward.restart.max-restarts", "0")

    def run() -> Command:
        return tiny_run(commands, tiny_model, out, *arguments, recipe="tests.tiny_fake")

    def steps() -> int:
        return int(metrics(out)[-1]["step"])

    # Whoever reads its output goes; then the disk has no room for what the controller writes, and has room again.
    command = run()
    command.wait_for("step +1/")
    command.stop_reading()
    wait_until(lambda: "nothing more is shown" in events(out), command)
    controller = psutil.Process(command.process.pid)
    controller.rlimit(psutil.RLIMIT_FSIZE, (0, -1))
    changes: set[int] = set()

    def tries(count: int) -> None:
        least = len(changes) + count
        wait_until(lambda: changes.add((out / "checkpoints").stat().st_mtime_ns) or len(changes) >= least, command)

    tries(3)  # a checkpoint may have been all but written
    seen, saved = steps(), saved_steps(out)
    tries(3)
    assert steps() == seen
    assert saved_steps(out) == saved
    controller.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    wait_until(lambda: steps() > seen and bool(set(saved_steps(out)) - set(saved)), command)
    assert steps() > seen + 1, "it trained meanwhile"
    wait_until(lambda: "JSONLSink.log works again" in events(out), command)

    signal_all(command, signal.SIGTERM)
    signal_all(command, signal.SIGHUP)
    assert command.process.wait(240) in (143, 129)  # two that wait for a busy process are handled by number
    assert command.strays() == []
    assert saved_steps(out)[-1] == steps()

    # A fault that ends a run: what was trained is saved, and where is said.
    command, begun = run(), steps()
    command.wait_for(f"step +{begun + 2}/")
    wait_until(lambda: saved_steps(out)[-1] != steps(), command)
    actor_of(command, "reward").kill()
    assert command.end() == 1
    assert "SIGKILL" in command.output
    last = steps()
    assert saved_steps(out)[-1] == last
    assert f"step {last} is saved in {out}/checkpoints" in command.output
    assert "Traceback" not in command.output
    assert command.strays() == []
    assert not forgotten(before)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["restore", "publish"])
def test_a_stop_in_a_recovery_leaves_checkpoints_of_one_step(
    place: str, commands: list[Command], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_RL_FAKE_ENGINES", str(tmp_path))
    out = tmp_path / "run"
    arguments = ("--evaluation.every", "0", "--keep-checkpoints", "9", "--groups-per-batch", "4", *TASKS)

    def run(steps: int, every: int, slow: str) -> Command:
        monkeypatch.setenv("SLOW", slow)
        flags = ("--steps", str(steps), "--checkpoint-every", str(every), *arguments)
        return tiny_run(commands, tiny_model, out, *flags, recipe="tests.slow_recovery")

    def counts() -> list[tuple[int, int, int]]:
        states = (json.loads(path.read_text()) for path in sorted((out / "checkpoints").glob("step-*/controller.json")))
        return [(state["step"], state["updates"], state["rollouts"]["batches"]) for state in states]

    command = run(100000, 4, place)
    command.wait_for("step +7/")
    wait_until(lambda: bool(saved_steps(out)), command)  # it is written while steps go on
    actor_of(command, "trainer").kill()
    command.wait_for(f"waits in {place}")
    command.process.send_signal(signal.SIGTERM)
    assert command.end(120) == 143, command.output
    assert "nothing is saved, as the run was rolling back" in command.output
    assert command.strays() == []
    saved = saved_steps(out)
    assert counts() == [(step, step, step) for step in saved]

    again = run(saved[-1] + 2, 1, "")
    assert again.end(150) == 0, again.output
    assert counts() == [(step, step, step) for step in (*saved, saved[-1] + 1, saved[-1] + 2)]
    assert [(row["step"], row["updates"]) for row in metrics(out)] == [(n, n) for n in range(1, saved[-1] + 3)]
