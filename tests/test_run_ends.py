"""Whole runs that end early or lose what they write to, on engines without vLLM: what is named, and what is saved."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.commands import TASKS, Command, actor_of, forgotten, metrics, shared_memory, signal_all, tiny_run, wait_until
from tests.fake_engine import FOLDER, Orders

pytestmark = pytest.mark.long
FOR_EVER = ("--steps", "100000", "--evaluation.every", "0")


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    """Orders of the runs' engines."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return Orders(tmp_path)


def test_a_phase_that_takes_too_long_names_what_it_waits_for(
    commands: list[Command], run_model: Path, tmp_path: Path, engines: Orders
) -> None:
    for engine in range(2):
        engines.tell(engine, stream="hold", after=1)
    arguments = (*FOR_EVER, "--phase-deadline-s", "1")
    command = tiny_run(commands, run_model, tmp_path / "run", *arguments, recipe="tests.tiny_fake")
    assert command.end(240) == 1
    assert re.search(r"phase \w+: .*did not end within its 1 s", command.output), command.output
    assert command.strays() == []


def events(out: Path) -> str:
    return (out / "events.jsonl").read_text()


def saved_steps(out: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((out / "checkpoints").glob("step-*"))]


@pytest.mark.timeout(900)
def test_a_run_survives_lost_output_and_full_disks_and_still_saves(
    commands: list[Command], run_model: Path, tmp_path: Path
) -> None:
    before, out = shared_memory(), tmp_path / "run"
    arguments = (*FOR_EVER, "--checkpoint-every", "2", "--generator.restart.max-restarts", "0")

    def run() -> Command:
        return tiny_run(commands, run_model, out, *arguments, recipe="tests.tiny_fake")

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
        target = len(changes) + count
        wait_until(lambda: changes.add((out / "checkpoints").stat().st_mtime_ns) or len(changes) >= target, command)

    tries(3)  # a checkpoint may have been all but written
    last_step, saved = steps(), saved_steps(out)
    tries(3)
    assert steps() == last_step
    assert saved_steps(out) == saved
    controller.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    wait_until(lambda: steps() > last_step and bool(set(saved_steps(out)) - set(saved)), command)
    assert steps() > last_step + 1, "it trained meanwhile"
    wait_until(lambda: "JSONLSink.log works again" in events(out), command)

    signal_all(command, signal.SIGTERM)
    signal_all(command, signal.SIGHUP)
    assert command.process.wait(240) in (143, 129)  # two that wait for a busy process are handled by number
    assert command.strays() == []
    assert saved_steps(out)[-1] == steps()

    # A fault that ends a run, as no restart is left: what was trained is saved, and where is said, in one message.
    command, begun = run(), steps()
    command.wait_for(f"step +{begun + 2}/")
    wait_until(lambda: saved_steps(out)[-1] != steps(), command)
    actor_of(command, "generator").kill()
    assert command.end() == 1
    error = command.output[command.output.rindex("error:") :]
    for word in ("generator", "SIGKILL", "phase"):
        assert word in error
    summary = json.loads((out / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert "SIGKILL" in summary["cause"]
    last = steps()
    assert saved_steps(out)[-1] == last
    assert f"step {last} is saved in {out}/checkpoints" in command.output
    assert "Traceback" not in command.output
    assert command.strays() == []
    assert not forgotten(before)


@pytest.mark.timeout(900)
def test_a_stop_in_a_recovery_leaves_checkpoints_of_one_step(
    commands: list[Command], run_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    arguments = ("--evaluation.every", "0", "--keep-checkpoints", "99", "--groups-per-batch", "4", *TASKS)

    def run(steps: int, every: int, slow: str) -> Command:
        monkeypatch.setenv("SLOW", slow)
        flags = ("--steps", str(steps), "--checkpoint-every", str(every), *arguments)
        return tiny_run(commands, run_model, out, *flags, recipe="tests.slow_recovery")

    def counts() -> list[tuple[int, int, int]]:
        states = (json.loads(path.read_text()) for path in sorted((out / "checkpoints").glob("step-*/controller.json")))
        return [(state["step"], state["updates"], state["rollouts"]["batches"]) for state in states]

    last = 0
    for place in ("restore", "publish"):
        command = run(100000, 4, place)
        command.wait_for(f"step +{last + 7}/")
        wait_until(lambda last=last: saved_steps(out)[-1:] > [last], command)  # it is written while steps go on
        actor_of(command, "trainer").kill()
        command.wait_for(f"waits in {place}")
        command.process.send_signal(signal.SIGTERM)
        assert command.end(120) == 143, command.output
        assert "nothing is saved, as the run was rolling back" in command.output
        assert command.strays() == []
        saved = saved_steps(out)
        assert counts() == [(step, step, step) for step in saved]
        last = saved[-1]

    resumed_run = run(last + 2, 1, "")
    assert resumed_run.end(150) == 0, resumed_run.output
    assert counts() == [(step, step, step) for step in (*saved, last + 1, last + 2)]
    assert [(row["step"], row["updates"]) for row in metrics(out)] == [(n, n) for n in range(1, last + 3)]
