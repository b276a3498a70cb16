"""The trace file: valid at any moment, lanes that are named and do not overlap, and a bound."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from forge_rl.errors import CheckpointError
from forge_rl.metrics import PhaseClock, Trace

Event = dict[str, object]


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self, seconds: float = 5000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def read(path: Path) -> list[Event]:
    """Events of a closed trace."""
    return json.loads(path.read_text())


def read_cut(path: Path) -> list[Event]:
    """Events of a trace that nobody closed."""
    return json.loads(path.read_text() + "]")


def named(events: list[Event], kind: str) -> dict[object, object]:
    """tid -> name of threads, or pid -> name of processes."""
    key = {"thread_name": "tid", "process_name": "pid"}[kind]
    names_of = {(event[key], event["args"]["name"]) for event in events if event["name"] == kind}
    assert len(dict(names_of)) == len(names_of), "two lanes of one number"
    return dict(names_of)


def of_phase(events: list[Event], *phases: str) -> list[Event]:
    return [event for event in events if event["ph"] in phases]


def test_a_closed_trace_is_json_with_all_that_was_told(tmp_path: Path) -> None:
    time = FakeClock()
    trace = Trace(tmp_path / "new" / "trace.json", clock=time)
    time.seconds += 3.0
    trace.span("controller", "rollout", 5001.0, 5003.0)
    trace.instant("trainer", "fault", cause="killed")
    trace.counter("queue", 2.5)
    trace.close()
    trace.close()
    events = read(tmp_path / "new" / "trace.json")
    assert [
        {k: v for k, v in event.items() if k not in ("pid", "tid")} for event in of_phase(events, "X", "i", "C")
    ] == [
        {"ph": "X", "ts": 1_000_000, "dur": 2_000_000, "name": "rollout"},
        {"ph": "i", "ts": 3_000_000, "s": "t", "name": "fault", "args": {"cause": "killed"}},
        {"ph": "C", "ts": 3_000_000, "name": "queue", "args": {"value": 2.5}},
    ]


def test_each_lane_is_a_named_thread_of_its_service(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json")
    for lane in ("generator/1", "trainer", "generator/0", "controller", "custom", "generator/1"):
        trace.instant(lane, lane, "why")
    trace.close()
    events = read(tmp_path / "t.json")
    threads, processes = named(events, "thread_name"), named(events, "process_name")
    assert sorted(threads.values()) == ["controller", "custom", "generator/0", "generator/1", "trainer"]
    assert sorted(processes.values()) == ["controller", "custom", "generator", "trainer"]
    assert not threads.keys() & processes.keys()
    for event in of_phase(events, "i"):
        assert threads[event["tid"]] == event["name"]
        assert processes[event["pid"]] == str(event["name"]).partition("/")[0]
    orders = {processes[e["pid"]]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(orders, key=lambda name: orders[name]) == ["controller", "trainer", "generator", "custom"]
    rows = {threads[e["tid"]]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert rows["generator/0"] < rows["generator/1"]


def test_a_lane_is_named_before_its_first_event(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json")
    trace.instant("trainer", "x", "why")
    trace.close()
    assert [event["ph"] for event in read(tmp_path / "t.json")] == ["M", "M", "M", "M", "i"]


def test_overlapping_spans_have_ids_of_their_own_by_engine(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", clock=FakeClock(0.0))
    for engine in range(2):
        for i in range(3):
            trace.span(f"generator/{engine}", "request", i * 0.1, 1.0 + i * 0.2, overlapping=True)
    trace.close()
    events = read(tmp_path / "t.json")
    begins, ends = of_phase(events, "b"), of_phase(events, "e")
    assert len({event["id"] for event in begins}) == 6
    for begin, end in zip(begins, ends, strict=True):
        assert events.index(begin) < events.index(end)
        assert [begin[k] for k in ("id", "cat", "name", "pid")] == [end[k] for k in ("id", "cat", "name", "pid")]
    assert [(e["ts"], f["ts"]) for e, f in zip(begins, ends, strict=True)][1] == (100_000, 1_200_000)
    assert Counter(event["name"] for event in begins) == {"generator/0 request": 3, "generator/1 request": 3}


def test_spans_that_touch_do_not_overlap_whatever_the_fractions(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", clock=FakeClock(1234.5678))
    edges = [1234.5678 + i * 0.0333333337 for i in range(200)]
    for begin, end in pairwise(edges):
        trace.span("controller", "phase", begin, end)
    trace.close()
    spans = of_phase(read(tmp_path / "t.json"), "X")
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(spans))


def test_a_killed_run_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    time = FakeClock()
    trace = Trace(tmp_path / "t.json", clock=time)
    assert read_cut(tmp_path / "t.json") == []
    trace.instant("trainer", "a", "why")
    time.seconds += 1.0
    trace.span("generator/0", "b", 5000.0, 5001.0, overlapping=True)
    time.seconds += 0.5
    trace.instant("trainer", "lost", "why")
    events = read_cut(tmp_path / "t.json")
    assert [event["name"] for event in of_phase(events, "i", "b", "e")] == ["a", "generator/0 b", "generator/0 b"]
    trace.flush()
    assert read_cut(tmp_path / "t.json")[-1]["name"] == "lost"


@pytest.mark.parametrize("ending", ["closed", "killed", "torn"])
def test_a_continued_run_goes_on_after_what_is_there(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "t.json"
    trace = Trace(path, clock=FakeClock(100.0))
    trace.span("generator/0", "request", 101.0, 109.0, overlapping=True)
    trace.span("controller", "rollout", 100.0, 112.0)
    trace.instant("controller", "earlier than the last end", "why")
    trace.flush()
    before = read_cut(path)
    if ending == "closed":
        trace.close()
    elif ending == "torn":
        path.write_bytes(path.read_bytes() + b',\n{"ph":"X","ts":99999999,"dur":5,"name":"x","args":{"a":1}')
    second = FakeClock(7.0)
    trace = Trace(path, clock=second)
    trace.span("controller", "rollout", 6.0, 8.0)  # Began before the trace: cut where the last run ended.
    trace.span("generator/0", "request", 7.0, 8.0, overlapping=True)
    trace.span("generator/1", "request", 7.0, 8.0, overlapping=True)
    trace.close()
    events = read(path)
    assert events[: len(before)] == before
    new = [event for event in events[len(before) :] if event["ph"] != "M"]
    assert (new[0]["name"], new[0]["ts"], new[0]["dur"]) == ("rollout", 12_000_000, 1_000_000)
    assert sorted(named(events, "thread_name").values()) == ["controller", "generator/0", "generator/1"]
    assert sorted(named(events, "process_name").values()) == ["controller", "generator"]
    assert len({event["id"] for event in of_phase(events, "b")}) == 3


def test_a_run_continues_from_a_trace_with_no_events(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text in ("", "[", "[\n", "[\n\n]\n"):
        path.write_text(text)
        trace = Trace(path)
        trace.instant("trainer", "x", "why")
        trace.close()
        assert len(read(path)) == 5


def test_a_file_that_is_no_trace_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text in ("hello\n", '{"traceEvents": []}\n', '[\n{"name": 1},\n{"name": 2}\n]\n'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="something else than the trace"):
            Trace(path)
        assert path.read_text() == text


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        Trace(tmp_path / "file" / "t.json")


def test_a_full_trace_says_so_once_and_stays_valid_and_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for _ in range(2):
        trace = Trace(path, most_bytes=8000)
        for i in range(200):
            trace.span("trainer", "backward", i, i + 1, overlapping=True)
        trace.instant("never seen", "x", "why")
        trace.close()
        events = read(path)
        assert 5000 < path.stat().st_size <= 8000
        assert len(of_phase(events, "b")) == len(of_phase(events, "e")) > 5
        assert [event["name"] for event in of_phase(events, "i")] == [
            "the trace is full: nothing is written after this"
        ]
        assert events[-1]["args"] == {"most_bytes": 8000}


def test_a_full_trace_is_gone_on_with_when_it_may_be_larger(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for most_bytes in (6000, 9000):
        trace = Trace(path, most_bytes=most_bytes)
        for i in range(200):
            trace.instant(f"service-{i}/0", "x", "why")
        trace.close()
    events = read(path)
    assert [event["args"] for event in events if event.get("s") == "g"] == [{"most_bytes": 6000}, {"most_bytes": 9000}]
    threads, processes = named(events, "thread_name"), named(events, "process_name")
    assert all(event["tid"] in threads and event["pid"] in processes for event in events)
    assert path.stat().st_size > 6000


def test_text_that_is_no_unicode_does_not_break_the_file(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json")
    trace.instant("trainer", 'quo"te\n\ud800 é', "\ud800")
    trace.close()
    (event,) = of_phase(read(tmp_path / "t.json"), "i")
    assert (event["name"], event["args"]) == ('quo"te\n? é', {"cause": "?"})


def test_phases_land_in_the_trace_by_the_listener(tmp_path: Path) -> None:
    time = FakeClock()
    phases, trace = PhaseClock(time), Trace(tmp_path / "t.json", clock=time)
    phases.ended.add(lambda name, begin_s, end_s: trace.span("controller", name, begin_s, end_s))
    with phases.phase("rollout"):
        time.seconds += 2.0
    with phases.phase("train"):
        time.seconds += 3.0
    trace.close()
    spans = of_phase(read(tmp_path / "t.json"), "X")
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("rollout", 0, 2_000_000),
        ("train", 2_000_000, 3_000_000),
    ]
