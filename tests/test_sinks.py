"""The files of a run, TensorBoard and W&B, and the fan-out to all of them."""

import errno
import io
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from forge_rl.errors import CheckpointError, ConfigError, Fault
from forge_rl.metrics import (
    Display,
    EpisodeSink,
    EventSink,
    Histogram,
    JSONLSink,
    Level,
    Metric,
    PhaseClock,
    RunInfo,
    RunLog,
    Sink,
    TensorBoardSink,
    WandbSink,
)
from forge_rl.metrics.status import event_of
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, Turn


def info(folder: Path, step: int = 0) -> RunInfo:
    return RunInfo(recipe="grpo", model="tiny", folder=folder, steps=20, step=step, config={"seed": 7})


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(path: Path, steps: range, *, resume_from: int = 0, loss: float = 1.0) -> JSONLSink:
    sink = JSONLSink(path)
    sink.start(info(path.parent, resume_from))
    for step in steps:
        sink.log(step, {"loss": loss})
    sink.close()
    return sink


def test_each_step_is_one_line_and_there_at_once(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "new" / "metrics.jsonl")
    sink.start(info(tmp_path))
    sink.log(1, {"loss": 0.5, "seconds/step": 2})
    assert rows(tmp_path / "new" / "metrics.jsonl") == [{"step": 1, "loss": 0.5, "seconds/step": 2.0}]
    sink.log(2, {"loss": 0.25})
    assert [row["step"] for row in rows(tmp_path / "new" / "metrics.jsonl")] == [1, 2]
    sink.close()


def test_what_is_not_finite_is_null_in_the_file_and_nan_in_the_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.start(info(tmp_path))
    sink.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    assert rows(path) == [{"step": 1, "a": None, "b": None, "c": None, "d": 1.0}]
    sink.close()
    again = write_steps(path, range(0), resume_from=1)
    (step, values) = next(iter(again.history()))
    assert (step, values["d"], math.isnan(values["a"])) == (1, 1.0, True)


def test_a_histogram_is_an_object_in_the_file_and_left_out_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.start(info(tmp_path))
    sink.log(1, {"loss": 0.5, "lag/hist": Histogram({2: 40, 0: 512})})
    sink.close()
    assert rows(path) == [{"step": 1, "loss": 0.5, "lag/hist": {"0": 512, "2": 40}}]
    sink = write_steps(path, range(2, 3), resume_from=1)
    assert next(iter(sink.history())) == (1, {"loss": 0.5})
    assert rows(path)[0]["lag/hist"] == {"0": 512, "2": 40}


def test_a_step_that_is_logged_in_parts_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 3))
    sink = JSONLSink(path)
    sink.start(info(tmp_path, step=2))
    sink.log(2, {"held_out": 0.9})
    sink.log(2, {"loss": 3.0})
    sink.log(3, {"loss": 0.1})
    sink.close()
    assert rows(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 3.0, "held_out": 0.9}, {"step": 3, "loss": 0.1}]


def test_a_resumed_run_drops_the_steps_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(6), loss=1.0)
    sink = write_steps(path, range(4, 7), resume_from=3, loss=2.0)
    assert [(row["step"], row["loss"]) for row in rows(path)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]
    assert [step for step, _ in sink.history()] == [*range(7)]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3, "loss": 1.0}', b"\0\0\0\0", b'{"step": 3,\n'])
def test_a_last_line_that_a_crash_tore_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 3))
    path.write_bytes(path.read_bytes() + torn)
    write_steps(path, range(3, 5), resume_from=3)
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4]


def test_a_broken_line_among_whole_ones_is_told_and_the_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of .*nonsense") as caught:
        write_steps(path, range(0), resume_from=3)
    assert caught.value.hint
    assert path.read_text() == '{"step": 1}\nnonsense\n{"step": 3}\n'


def test_a_step_that_goes_back_is_a_bug(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.start(info(tmp_path))
    sink.log(3, {})
    with pytest.raises(AssertionError, match="step 2 was logged after step 3"):
        sink.log(2, {}, batch(1, 1))
    sink.close()


def test_late_values_are_added_to_their_step_in_every_sink(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.start(info(tmp_path))
    for step in (1, 2, 3):
        sink.log(step, {"loss": 1.0})
    sink.log(0, {"held_out": 0.25})  # of a step that has no line yet
    sink.log(2, {"held_out": 0.5})
    sink.log(3, {"held_out": 0.75})
    sink.log(4, {"loss": 0.5})
    sink.log(4, {"held_out": 1.0})
    expected = [(0, None, 0.25), (1, 1, None), (2, 1, 0.5), (3, 1, 0.75), (4, 0.5, 1)]
    assert [(row["step"], row.get("loss"), row.get("held_out")) for row in rows(path)] == expected
    sink.log(2, {"held_out": 0.6})
    sink.log(5, {"loss": 0.1})
    sink.close()
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 3, 4, 5]
    assert rows(path)[2]["held_out"] == 0.6
    assert not list(tmp_path.glob(".*"))
    sink.rollback(3)
    assert [step for step, _ in sink.history()] == [0, 1, 2, 3]

    curves = TensorBoardSink(tmp_path / "curves")
    display = Display("none", phase_clock=PhaseClock())
    display.start(info(tmp_path))
    for each in (curves, display):
        each.start(info(tmp_path))
        each.log(6, {"loss": 1.0})
        each.log(4, {"held_out": 0.5})
    assert (curves._step, display._state.step) == (6, 6)
    assert display._state.held_out[""].means == (0.5,)
    curves.close()


def test_late_values_and_rollbacks_touch_only_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = write_steps(path, range(1, 4001), loss=0.25)
    first, inode = b'{"step": 1, "loss": 0.25}\n', path.stat().st_ino
    path.write_bytes(path.read_bytes().replace(first, b"#" * 25 + b"\n"))
    for step in (3990, 3990, 4000, 3000):
        sink.log(step, {"held_out": step / 4000})
    sink.rollback(3999)
    assert path.stat().st_ino == inode
    row_by_step = {row["step"]: row for row in map(json.loads, path.read_bytes().splitlines()[1:])}
    assert [*row_by_step] == [*range(2, 4000)]
    late = {3000: 0.75, 3990: 0.9975}
    assert {step: row["held_out"] for step, row in row_by_step.items() if "held_out" in row} == late
    sink.rollback(1)
    assert path.stat().st_size == 0, "no line before it is whole"


@pytest.mark.parametrize(
    ("journal", "amended"),
    [
        (b'26 26 43\n{"step": 2, "loss": 1.0, "held_out": 0.5}\n', True),
        (b'26 26 43\n{"step": 2, "loss": 1.0, "held', False),  # torn itself
        (b"", False),
        (b'0 1 26\n{"step": 1, "loss": 2.0}\n\n', False),  # left by a process that went on to write step 2
    ],
)
def test_an_amendment_that_a_kill_tore_is_finished_at_the_next_start(
    tmp_path: Path, journal: bytes, amended: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 3))
    content = path.read_bytes()
    first, second = content.splitlines(keepends=True)
    journal = journal.replace(
        b"26 26 43", b"%d %d %d" % (len(first), len(content), len(second) + len(b', "held_out": 0.5'))
    )
    (tmp_path / ".metrics.jsonl.tail").write_bytes(journal)
    if amended:
        path.write_bytes(first + b'{"step": 2, "loss": 1.0, "hel')
    write_steps(path, range(3, 4), resume_from=2)
    assert [row["step"] for row in rows(path)] == [1, 2, 3]
    assert rows(path)[1].get("held_out") == (0.5 if amended else None)
    assert rows(path)[0] == {"step": 1, "loss": 1.0}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("late_step", [49, 50])
@pytest.mark.parametrize(("first", "room"), [("row", 24), ("late values", 5)])
def test_a_disk_that_is_full_for_a_while_tears_no_line(tmp_path: Path, first: str, room: int, late_step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = write_steps(path, range(1, 51))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot write"):
            sink.log(51, {"loss": 1.0}) if first == "row" else sink.log(late_step, {"held_out": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if first == "row":
        sink.log(late_step, {"held_out": 0.5})
    sink.log(52, {"loss": 1.0})
    sink.close()
    write_steps(path, range(53, 54), resume_from=52)
    assert [row["step"] for row in rows(path)] == [*range(1, 51), 52, 53]
    assert {row["step"] for row in rows(path) if row.get("held_out") == 0.5} == {late_step}
    assert not list(tmp_path.glob(".*"))


def test_a_failed_rollback_is_repeated_before_the_next_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = write_steps(path, range(1, 9))
    before = path.read_bytes()

    def unreadable(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", unreadable)
        for call in (lambda: sink.rollback(4), lambda: sink.log(5, {"loss": 2.0})):
            with pytest.raises(CheckpointError, match="cannot be read: Stale file handle"):
                call()
    assert path.read_bytes() == before
    sink.log(6, {"loss": 2.0})
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 6]


def test_long_texts_of_failures_are_cut_before_they_are_written(tmp_path: Path) -> None:
    problem = "TypeError: " + "x" * 5_000_000 + " is no number"
    sink = EpisodeSink(tmp_path / "episodes.jsonl")
    log = RunLog(Display("none", phase_clock=PhaseClock()), sink, EventSink(tmp_path / "events.jsonl"))
    sink.rollback(0)
    task = Task(id="1", source="s", messages=())
    log.episode(Episode(task=task, turns=(), outcome=Outcome.ENVIRONMENT_ERROR, problem=problem))
    log.warn(f"s 1: {problem}")
    for name in ("episodes.jsonl", "events.jsonl"):
        text = (tmp_path / name).read_text()
        assert len(text) < 12_000
        assert "TypeError: xxx" in text
        assert " characters … " in text
        assert "is no number" in text


def test_a_full_disk_is_told_with_a_hint(tmp_path: Path) -> None:
    sink = JSONLSink(Path("/dev/full"))
    sink.start(info(tmp_path))
    with pytest.raises(CheckpointError, match=r"cannot write /dev/full: no space left") as caught:
        sink.log(1, {"loss": 1.0})
    assert "free some space" in caught.value.hint
    sink.close()


def test_a_folder_that_cannot_be_made_is_told_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = JSONLSink(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl") as caught:
        sink.start(info(tmp_path))
    assert "another run folder" in caught.value.hint


def test_events_are_kept_through_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step, text in ((0, "generator/1 died"), (3, "resumed")):
        sink = EventSink(path, clock=lambda: 1234.5678)
        sink.start(info(tmp_path, step))
        sink.event(text, "fault" if step == 0 else "info")
        sink.close()
    assert rows(path) == [
        {"time": 1234.568, "level": "fault", "text": "generator/1 died"},
        {"time": 1234.568, "level": "info", "text": "resumed"},
    ]


def episode(name: str, reward: float, text: str = "four") -> Episode:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
    task = Task(id=name, source="arith", messages=messages)
    turn = Turn(prompt_ids=(1, 2), token_ids=(3, 4, 5), logprobs=(0.0,) * 3, versions=(0,) * 3, text=text)
    return Episode(task=task, turns=(turn,), score=Score(total=reward), outcome=Outcome.TRUNCATED)


def batch(groups: int, group_size: int) -> Batch:
    made = [[episode(f"t{p}", float(g)) for g in range(group_size)] for p in range(groups)]
    return Batch(groups=tuple(Group(task=group[0].task, episodes=tuple(group)) for group in made), version=0)


def test_a_sample_is_readable(tmp_path: Path) -> None:
    sink = EpisodeSink(tmp_path / "episodes.jsonl", episodes_per_step=1)
    sink.start(info(tmp_path))
    sink.log(5, {}, batch(1, 1))
    sink.close()
    assert rows(tmp_path / "episodes.jsonl") == [
        {
            "step": 5,
            "task": "t0",
            "source": "arith",
            "prompt": "system: Be brief.\n\nuser: 2 + 2?",
            "answer": "four",
            "reward": 0.0,
            "outcome": "truncated",
            "turns": 1,
            "tokens": 3,
        }
    ]


def test_samples_are_spread_over_groups_and_resume_drops_repeats(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    for resumed in (0, 1):
        sink = EpisodeSink(path, episodes_per_step=3)
        sink.start(info(tmp_path, resumed))
        for step in range(resumed + 1, 4):
            sink.log(step, {}, batch(3, 4))
        sink.close()
    assert [(row["step"], row["task"]) for row in rows(path)] == [(s, f"t{p}") for s in (1, 2, 3) for p in range(3)]


def test_a_batch_smaller_than_the_sample_is_written_whole(tmp_path: Path) -> None:
    sink = EpisodeSink(tmp_path / "episodes.jsonl", episodes_per_step=8)
    sink.start(info(tmp_path))
    sink.log(1, {}, batch(1, 2))
    sink.close()
    assert [row["reward"] for row in rows(tmp_path / "episodes.jsonl")] == [0.0, 1.0]


def test_failed_episodes_are_recorded_up_to_a_bound_a_step(tmp_path: Path) -> None:
    sink = EpisodeSink(tmp_path / "episodes.jsonl", episodes_per_step=2)
    sink.start(info(tmp_path))
    failed = replace(episode("a", 0.0), outcome=Outcome.JUDGE_ERROR, problem="KeyError: 'answer'")
    for _ in range(3):
        sink.episode(failed)
    found = [(row["step"], row["outcome"], row["problem"]) for row in rows(tmp_path / "episodes.jsonl")]
    assert found == [(1, "judge_error", "KeyError: 'answer'")] * 2
    sink.log(1, {}, batch(1, 2))
    sink.episode(failed)
    assert [row["step"] for row in rows(tmp_path / "episodes.jsonl")] == [1, 1, 1, 1, 2]


def test_the_last_episodes_of_a_run_without_a_batch_are_kept(tmp_path: Path) -> None:
    sink = EpisodeSink(tmp_path / "episodes.jsonl", episodes_per_step=2)
    sink.start(info(tmp_path))
    for name in "abc":
        sink.episode(episode(name, 1.0))
    sink.close()
    assert [row["task"] for row in rows(tmp_path / "episodes.jsonl")] == ["b", "c"]


def test_equal_warnings_are_folded_and_counted(tmp_path: Path) -> None:
    log = RunLog(Display("none", phase_clock=PhaseClock()), EventSink(tmp_path / "events.jsonl"))
    for number in range(59):
        log.event(f"chain_sum {number:016x}: judge error: KeyError after {number / 7:.3g} s", "warning")
        log.event("another", "info")
    log.event("one of its kind", "warning")
    log.close()
    told = [str(row["text"]) for row in rows(tmp_path / "events.jsonl") if row["level"] == "warning"]
    assert len(told) == 4
    assert told[0].startswith("chain_sum 0000000000000000: judge error")
    assert told[1].endswith("(10 like it so far)")
    assert told[2] == "one of its kind"
    assert told[3].endswith("(59 like it in all)")


@pytest.mark.parametrize("quoted", [True, False])
def test_warnings_that_differ_in_what_a_model_wrote_do_not_pile_up(quoted: bool, tmp_path: Path) -> None:
    log = RunLog(Display("none", phase_clock=PhaseClock()), EventSink(tmp_path / "events.jsonl"))
    for number in range(2000):
        said = "".join(chr(ord("g") + (number >> shift) % 16) for shift in range(0, 12, 4)) * 50
        log.event(f"code {number}: {'ValueError: no number in ' + repr(said) if quoted else said}", "warning")
    log.close()
    told = rows(tmp_path / "events.jsonl")
    assert len(told) == (5 if quoted else 200 + 5)
    assert len(log._warnings) == (1 if quoted else 201)
    assert str(told[-1]["text"]).endswith(f"({2000 if quoted else 1800} like it in all)")


def test_any_text_that_a_model_can_write_is_a_line_of_json(tmp_path: Path) -> None:
    strange = 'a\nb "q" \u2028 \ud800 é \x00'
    sink = EpisodeSink(tmp_path / "episodes.jsonl")
    sink.start(info(tmp_path))
    one = episode("t", math.nan, strange)
    sink.log(1, {}, Batch(groups=(Group(task=one.task, episodes=(one,)),), version=0))
    sink.close()
    data = (tmp_path / "episodes.jsonl").read_bytes()
    assert data.count(b"\n") == 1
    row = json.loads(data)
    assert (row["answer"], row["reward"]) == (strange, None)


def test_tensorboard_reads_the_scalars_of_a_resumed_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # The count in the names of files; 10 sorts before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for resumed, loss in ((0, 1.0), (2, 9.0)):
        sink = TensorBoardSink(tmp_path)
        sink.start(info(tmp_path, resumed))
        for step in range(resumed + 1, 5):
            sink.log(step, {"loss": loss + step, "busy/trainer": 0.5})
        sink.event("a replica died of \ud800", "fault")
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "busy/trainer"}
    assert events.Tensors("events/fault/text_summary")[-1].tensor_proto.string_val == [b"a replica died of \\ud800"]
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(1, 2.0), (2, 3.0), (3, 12.0), (4, 13.0)]


def test_tensorboard_reads_a_histogram_as_it_was(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.start(info(tmp_path))
    sink.log(1, {"lag/hist": Histogram({1: 512, 3: 40}), "empty": Histogram({})})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["histograms"] == ["lag/hist"]
    (point,) = events.Histograms("lag/hist")
    drawn = point.histogram_value
    assert (point.step, drawn.min, drawn.max, drawn.num) == (1, 1, 3, 552)
    assert (drawn.sum, drawn.sum_squares) == (632, 872)
    filled = [
        (low, high, count)
        for low, high, count in zip([None, *drawn.bucket_limit], drawn.bucket_limit, drawn.bucket, strict=False)
        if count
    ]
    assert filled == [(0.5, 1.5, 512), (2.5, 3.5, 40)]


class FakeWandb:
    """Records what wandb is asked."""

    def __init__(self) -> None:
        self.inits: list[dict[str, object]] = []
        self.logged: list[tuple[int, dict[str, object]]] = []
        self.finished = 0

    def init(self, **options: object) -> SimpleNamespace:
        self.inits.append(options)
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=self._finish)

    def Histogram(self, *, np_histogram: tuple[list[int], list[float]]) -> object:
        counts, edges = np_histogram
        assert len(edges) == len(counts) + 1
        return ("histogram", counts, edges)

    def Table(self, *, columns: list[str], data: list[list[object]]) -> object:
        assert all(len(row) == len(columns) for row in data)
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Html(self, data: str, *, inject: bool, data_is_not_path: bool) -> object:
        assert not inject
        assert data_is_not_path
        return data

    def _finish(self) -> None:
        self.finished += 1


def test_a_resumed_run_is_the_same_run_in_wandb_and_a_new_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resumed in (0, 3, 0):
        sink = WandbSink("papers")
        sink.start(info(tmp_path, resumed))
        sink.log(resumed + 1, {"loss": 0.5})
        sink.close()
        sink.close()
    first, resumed_run, new = (options["id"] for options in fake.inits)
    assert first == resumed_run != new
    assert fake.inits[0]["project"] == "papers"
    assert fake.inits[0]["config"] == {"seed": 7}
    assert fake.logged == [(1, {"loss": 0.5}), (4, {"loss": 0.5}), (1, {"loss": 0.5})]
    assert fake.finished == 3


def test_a_refusal_by_wandb_names_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def init(**options: object) -> None:
        raise Refused("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Refused))
    with pytest.raises(ConfigError, match="--wandb p: W&B refuses: No API key configured"):
        WandbSink("p").start(RunInfo(recipe="r", model="m", folder=tmp_path, steps=1))


def test_wandb_gets_a_histogram_in_its_own_form_and_none_that_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink("papers")
    sink.start(info(tmp_path))
    sink.log(1, {"lag/hist": Histogram({0: 5, 2: 1}), "empty": Histogram({}), "loss": 0.5})
    assert fake.logged == [(1, {"lag/hist": ("histogram", [5, 0, 1], [-0.5, 0.5, 1.5, 2.5]), "loss": 0.5})]


def hostile_batch(episodes: int = 40) -> Batch:
    made = tuple(episode(f"t{n}", n / 4, "<script>alert(1)</script> \x1b[2J " + "z" * 9000) for n in range(episodes))
    return Batch(groups=(Group(task=made[0].task, episodes=made),), version=0)


def test_wandb_gets_a_bounded_table_and_some_pages_of_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink("papers")
    sink.start(replace(info(tmp_path), steps=500))
    for step in range(1, 22):
        sink.log(step, {"loss": 0.5}, hostile_batch())
    sampled = [step for step, values in fake.logged if "episodes/table" in values]
    assert sampled == [1, 11, 21]
    table: Any = fake.logged[0][1]["episodes/table"]
    assert len(table) == 8
    assert (table[1]["source"], table[1]["reward"]) == ("arith", 1.25)
    assert len(str(table)) < 8 * 9000
    page = str(fake.logged[0][1]["episodes/first"])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page + str(table)


def test_tensorboard_has_the_settings_and_some_episodes_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.start(replace(info(tmp_path), config={"seed": 7, "model": "tiny", "tasks": ["a", "b"], "none": None}))
    sink.log(1, {"loss": 0.5}, hostile_batch(3))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [f"episodes/{n}/text_summary" in events.Tags()["tensors"] for n in range(4)] == [True] * 3 + [False]
    (shown,) = events.Tensors("episodes/0/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.splitlines())
    assert "<script>" in text, "as text: TensorBoard renders Markdown"
    assert "\x1b" not in text
    settings = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"tasks" in settings
    assert b"seed" in settings


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
    bad, good, events = Recorder("log", "event"), Recorder(), EventSink(tmp_path / "events.jsonl")
    log = RunLog(quiet(), bad, good, events)
    log.start(info(tmp_path))
    for step in range(1, 4):
        log.log(step, {"loss": 1.0})
    log.event("hello")
    bad.failing = ()
    log.log(4, {"loss": 1.0})
    log.close()
    assert [call for call in good.calls if call != "event"] == ["start", *["log"] * 4, "close"]
    assert [call for call in bad.calls if call != "event"] == ["start", *["log"] * 4, "close"]
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
    again = log()
    again.start(info(tmp_path, step=1))
    again.log(2, {"reward/mean": 0.5}, batch(1, 1))
    again.close()
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
    for seen in (
        fault,
        replace(fault, recovered_s=12.34),
        replace(fault, service="trainer", replica=None, phase="", fatal=True),
    ):
        log.event(*event_of(seen))
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
