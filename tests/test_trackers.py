"""TensorBoard and W&B: scalars, histograms and episodes, also of resumed runs."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.metrics import (
    Histogram,
    RunInfo,
    TensorBoardSink,
    WandbSink,
)
from forge_rl.types import Batch, Group
from tests.test_sinks import episode, info


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
    hostile_episodes = tuple(
        episode(f"t{n}", n / 4, "<script>alert(1)</script> \x1b[2J " + "z" * 9000) for n in range(episodes)
    )
    return Batch(groups=(Group(task=hostile_episodes[0].task, episodes=hostile_episodes),), version=0)


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
    (summary,) = events.Tensors("episodes/0/text_summary")
    text = summary.tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.splitlines())
    assert "<script>" in text, "as text: TensorBoard renders Markdown"
    assert "\x1b" not in text
    settings = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"tasks" in settings
    assert b"seed" in settings
