"""The run's monitor: depths of the queues, the trace, and faults as they are logged."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_rl.errors import Fault
from forge_rl.metrics import Display, EventSink, PhaseClock, RolloutStatus, RunInfo, RunLog
from forge_rl.metrics.status import outcome_of
from forge_rl.run.records.monitor import RunMonitor
from forge_rl.runtime.faults import Faults


class Bench:
    """A monitor whose clock and rollouts the test moves."""

    def __init__(self, folder: Path) -> None:
        self.seconds = 100.0
        self.decoding = 0
        self.folder = folder
        self.phases = PhaseClock(lambda: self.seconds)
        self.faults = Faults(lambda: self.seconds)
        self.display = Display("none", phase_clock=self.phases)
        self.log = RunLog(self.display, EventSink(folder / "events.jsonl"))
        self.log.start(RunInfo(recipe="grpo", model="tiny", folder=folder, steps=2))
        self.monitor = RunMonitor(folder, self.display, self.log, self.phases, self.faults, clock=lambda: self.seconds)

    def status(self) -> RolloutStatus:
        return RolloutStatus(batch=0, groups_done=0, groups=2, episodes_running=self.decoding, queue=1)

    def events(self, kind: str) -> list[dict[str, object]]:
        return [event for event in json.loads((self.folder / "trace.json").read_text()) if event["ph"] == kind]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.log.close()


def test_depths_of_queues_are_the_mean_and_the_highest_since_the_last_call(bench: Bench) -> None:
    assert bench.monitor.pop_depths() == {}
    bench.monitor.follow(bench.status, lambda: "groups")
    bench.decoding = 7
    first = bench.monitor.pop_depths()
    assert (first["queue/decoding/mean"], first["queue/decoding/max"], first["queue/engine/mean"]) == (7.0, 7.0, 1.0)
    bench.decoding = 3
    second = bench.monitor.pop_depths()
    assert (second["queue/decoding/mean"], second["queue/decoding/max"]) == (3.0, 3.0)
    bench.monitor.close()
    drawn = [event["args"] for event in bench.events("C") if event["name"] == "queue/decoding"]
    assert drawn == [{"value": 7}, {"value": 3}]


def test_phases_and_faults_are_in_the_trace_and_among_the_events(bench: Bench) -> None:
    with bench.phases.phase("rollout"):
        bench.seconds += 5.00049
        fault = Fault(service="reward", replica=0, cause="hung", phase="rollout", at_s=bench.seconds, fatal=False)
        bench.faults.seen.append(fault)
        bench.faults.listeners.tell(fault)
    (fault,) = bench.monitor.recoveries()
    assert (fault.name, fault.at_s, outcome_of(fault)) == ("reward/0", 5.0, "no")
    bench.monitor.close()
    assert [(event["name"], event["dur"]) for event in bench.events("X")] == [("rollout", 5_000_490)]
    assert [event["args"] for event in bench.events("i")] == [{"cause": "hung"}]
    (line,) = (bench.folder / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "reward/0 failed in phase rollout: hung"
