"""The fan-out of a run's metrics and events to all sinks, of which some fail."""

import io
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from forge_rl.errors import CheckpointError, Fault
from forge_rl.metrics import (
    Display,
    EpisodeSink,
    EventSink,
    JSONLSink,
    Level,
    Metric,
    PhaseClock,
    RunInfo,
    RunLog,
    Sink,
)
from forge_rl.metrics.status import event_of
from forge_rl.types import Batch
from tests.test_sinks import batch, info, rows


class Recorder(Sink):
    """A sink that records its calls, and fails in those named."""

    def __init__(self, *failing: str) -> None:
        self.calls: list[str] = []
        self.failing = failing

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise CheckpointError(f"{name} failed in {self.failing}")

    def start(self, info: RunInfo) -> None:
        self._called("start")

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        self._called("log")

    def event(self, text: str, level: Level) -> None:
        self._called("event")

    def close(self) -> None:
        self._called("close")


def quiet() -> Display:
    return Display("none", phase_clock=PhaseClock())


def test_a_failing_sink_is_reported_once_and_retried(tmp_path: Path) -> None:
    failing_sink, sound_sink, events = Recorder("log", "event"), Recorder(), EventSink(tmp_path / "events.jsonl")
    log = RunLog(quiet(), failing_sink, sound_sink, events)
    log.start(info(tmp_path))
    for step in range(1, 4):
        log.log(step, {"loss": 1.0})
    log.event("hello")
    failing_sink.failing = ()
    log.log(4, {"loss": 1.0})
    log.close()
    assert [call for call in sound_sink.calls if call != "event"] == ["start", *["log"] * 4, "close"]
    assert [call for call in failing_sink.calls if call != "event"] == ["start", *["log"] * 4, "close"]
    assert [row["text"] for row in rows(tmp_path / "events.jsonl")] == [
        "Recorder.log fails, and the run goes on without it: log failed in ('log', 'event')",
        "Recorder.event fails, and the run goes on without it: event failed in ('log', 'event')",
        "hello",
        "Recorder.log works again; what it was given 3 times is lost",
        "Recorder.event works again; what it was given 3 times is lost",
    ]


def test_a_sink_that_cannot_start_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="start failed"):
        RunLog(quiet(), Recorder("start")).start(info(tmp_path))


def test_the_run_log_gives_a_resumed_display_its_past(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    display = Display("none", phase_clock=PhaseClock(), console=console)

    def log() -> RunLog:
        episodes = EpisodeSink(tmp_path / "episodes.jsonl", episodes_per_step=1)
        return RunLog(display, JSONLSink(tmp_path / "metrics.jsonl"), episodes)

    first = log()
    first.start(info(tmp_path))
    first.log(0, {"held_out": 0.5})
    first.log(1, {"reward/mean": 0.25}, batch(1, 1))
    first.log(2, {"reward/mean": 0.75}, batch(1, 1))
    first.close()
    resumed_log = log()
    resumed_log.start(info(tmp_path, step=1))
    resumed_log.log(2, {"reward/mean": 0.5}, batch(1, 1))
    resumed_log.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in rows(tmp_path / "episodes.jsonl")] == [1, 2]
    with console.capture() as drawn:
        console.print(display.panel)
    text = " ".join(drawn.get().split())
    assert "reward 0.500 ▁█ min 0.25 max 0.50" in text
    assert "held-out 0.50" in text


def test_a_fault_and_its_recovery_are_two_events(tmp_path: Path) -> None:
    log = RunLog(quiet(), EventSink(tmp_path / "events.jsonl"))
    log.start(info(tmp_path))
    fault = Fault(service="generator", replica=1, cause="its process was ended by SIGTERM", phase="rollout", at_s=65)
    for fault_seen in (
        fault,
        replace(fault, recovered_s=12.34),
        replace(fault, service="trainer", replica=None, phase="", fatal=True),
    ):
        log.event(*event_of(fault_seen))
    log.close()
    assert [(row["level"], row["text"]) for row in rows(tmp_path / "events.jsonl")] == [
        ("fault", "generator/1 failed in phase rollout: its process was ended by SIGTERM"),
        ("info", "generator/1 has recovered after 12.3s"),
        ("fault", "trainer failed: its process was ended by SIGTERM"),
    ]


def test_importing_metrics_imports_no_heavy_library() -> None:
    code = "import sys, forge_rl.metrics; print(sorted({'torch', 'tensorboard', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
