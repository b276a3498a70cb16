"""Whole episodes on disk: what comes back is what was written, and no file or disk harms a run or a reader."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from forge_rl.errors import CheckpointError, ForgeError
from forge_rl.metrics import RunInfo
from forge_rl.metrics.episode_files import Kind, RecordedEpisode, write_episodes
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import EpisodeRecorder, Recording, recorded_files
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.packing.unpacking import rounded_scores
from forge_rl.run.records.recording import evaluated_episodes, trained_episodes
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, ToolCall, Turn

HOSTILE = "\x1b]0;owned\x07\x1b[2J \u202egnp.exe <script>alert(1)</script> \ud800 <|im_end|>"

BEGAN = 1764115200.25
HELP = {"role": "system", "content": "You help."}


def turn(prompt: list[int], answer: list[int], **fields: object) -> Turn:
    turn_fields: dict[str, object] = {
        "logprobs": [-0.1 * (1 + index) for index in range(len(answer))],
        "text": "answer",
    }
    turn_fields |= {"versions": [3 + index % 2 for index in range(len(answer))]}
    return Turn(prompt_ids=prompt, token_ids=answer, **turn_fields | fields)  # type: ignore[arg-type]


def played(task: Task, reward: float = 0.5, text: str = "7") -> Episode:
    """An episode with a tool call, a sub-agent with a history of its own, and a completion without logprobs."""
    call = ToolCall(id="c1", name="add", arguments='{"a": 3}', seconds=0.25, error="error: add needs b")
    tool = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "error: add needs b"}
    turns = (
        turn([1, 2, 3], [4, 5], messages=task.messages, calls=(call,), seconds=0.5, response_s=0.26, text="calls"),
        turn(
            [9, 9], [8], messages=({"role": "system", "content": "You help."},), text="the sub-agent's", agent="helper"
        ),
        turn([1, 2, 3, 4, 5, 6], [7, 2], messages=(tool,), truncated=True, text=text),
        turn([9, 9, 8, 1], [5], messages=({"role": "user", "content": "more"},), logprobs=[np.nan], agent="helper"),
    )
    values = [[0.0, 1.0], [0.5], [1.0, 1.0], [0.25]]
    score = Score(
        total=reward,
        parts={"right": reward, "brief": 0.0},
        turns=(0.0, 1.0, 0.0, 2.0),
        tokens=values,
        answer="7",
        feedback="test_add failed",
    )
    return Episode(
        task=task, turns=turns, score=score, output=text, outcome=Outcome.TRUNCATED, seconds=2.5, began=BEGAN
    )


def task_of(number: int) -> Task:
    return Task(
        id=f"sums/{number}",
        source="sums",
        messages=({"role": "user", "content": f"{number} + 4?"},),
        truth={"answer": str(number + 4), "tries": [1, 2]},
        tools=({"type": "function", "function": {"name": "add"}},),
    )


def batch_of(groups: int = 2, size: int = 2) -> Batch:
    recorded_groups = []
    for number in range(groups):
        task = task_of(number)
        recorded_groups.append(Group(task=task, episodes=tuple(played(task, float(index)) for index in range(size))))
    return Batch(groups=tuple(recorded_groups), version=5)


def written(folder: Path, *records: RecordedEpisode) -> EpisodeFile:
    write_episodes(folder / "file.parquet", records)
    return EpisodeFile(folder / "file.parquet")


def test_an_episode_comes_back_as_it_was(tmp_path: Path) -> None:
    batch = batch_of()
    file = written(tmp_path, *trained_episodes(12, batch, None, None))
    assert file.batch() == batch
    second = file[1]
    assert (second.step, second.kind, second.group, second.index, second.version) == (12, "trained", 0, 1, 5)
    assert second.episode.runs == ((0, 2), (1, 3)), "of the agent and its sub-agent"
    first = second.episode.turns[0]
    assert (first.seconds, first.response_s, first.calls[0].seconds) == (0.5, 0.26, 0.25)
    assert second.episode.score is not None
    assert [list(values) for values in second.episode.score.tokens] == [[0.0, 1.0], [0.5], [1.0, 1.0], [0.25]]
    assert [turn.agent for turn in second.episode.turns] == ["", "helper", "", "helper"]
    assert second.episode.began == 1764115200.25
    assert (second.advantages, second.trainer_gaps, second.entropies, second.trained) == (None, None, None, None)
    with pytest.raises(IndexError):
        file[4]


def test_a_file_of_a_run_before_feedback_was_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    whole_episode = written(tmp_path, *trained_episodes(12, batch_of(), None, None))[0].episode
    table = pq.read_table(path).drop_columns(["feedback"])
    pq.write_table(table, path)
    episode = EpisodeFile(path)[0].episode
    assert whole_episode.score is not None
    assert episode.score == whole_episode.score.updated(feedback="")


def test_a_failed_episode_without_a_turn_comes_back(tmp_path: Path) -> None:
    failed = Episode(task=task_of(1), turns=(), outcome=Outcome.ENVIRONMENT_ERROR, problem="it raised", seconds=1.0)
    (row,) = (file := written(tmp_path, RecordedEpisode(step=1, kind="failed", episode=failed))).listing()
    assert file[0].episode == failed
    assert (row["reward"], row["outcome"], row["tokens"], row["turn_count"]) == (None, "environment_error", 0, 0)


def test_advantages_and_trainer_logprobs_find_their_tokens(tmp_path: Path) -> None:
    batch = batch_of(groups=2, size=2)
    layout, advantages = Layout(seq_len=64), torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
    packed = pack(batch, advantages, layout).without_uniform
    # The trainer scores each token a hundredth of its id above the engine.
    scored = [
        rounded_scores(row, torch.stack([row.behaviour + row.targets / 100, row.targets / 10], dim=1))
        for row in packed.rows
    ]
    file = written(tmp_path, *trained_episodes(1, batch, packed, scored))
    record = file[1]
    generated = [4, 5, 8, 7, 2, 5]  # turn after turn
    assert record.trained is not None
    assert record.trained.tolist() == [True] * 5 + [False], "the last has no logprob"
    assert record.advantages is not None
    assert record.advantages.tolist() == [1.0] * 5 + [0.0]
    assert record.trainer_gaps is not None
    np.testing.assert_allclose(record.trainer_gaps[:5], np.array(generated[:5]) / 100, rtol=2**-8)
    assert np.isnan(record.trainer_gaps[5])
    assert record.entropies is not None
    np.testing.assert_allclose(record.entropies[:5], np.array(generated[:5]) / 10, rtol=2**-8)
    assert np.isnan(record.entropies[5])
    left_out = file[2]
    assert left_out.trained is None, "its group is uniform"
    assert [row["advantage"] for row in file.listing()] == [-1.0, 1.0, 0.0, 0.0]


def test_evaluated_episodes_keep_their_set(tmp_path: Path) -> None:
    results = {"held_out": [(played(task_of(0)),), (played(task_of(1)),)], "other": [(played(task_of(2)),)]}
    file = written(tmp_path, *evaluated_episodes(4, results))
    listing = [(row["row"], row["kind"], row["set"], row["group"], row["task"]) for row in file.listing()]
    assert listing == [
        (0, "evaluated", "held_out", 0, "sums/0"),
        (1, "evaluated", "held_out", 1, "sums/1"),
        (2, "evaluated", "other", 0, "sums/2"),
    ]


def test_what_a_model_or_user_wrote_cannot_break_a_file_or_a_terminal(tmp_path: Path) -> None:
    hostile: object = object()
    task = Task(id=HOSTILE, source=HOSTILE, messages=({"role": HOSTILE, "content": HOSTILE},), truth={HOSTILE: hostile})
    call = ToolCall(id=HOSTILE, name=HOSTILE, arguments=HOSTILE, error=HOSTILE)
    hostile_turn = turn([1], [2], messages=task.messages, calls=(call,), text=HOSTILE)
    score = Score(total=1.0, parts={HOSTILE: 1.0}, answer=HOSTILE)
    episode = Episode(task=task, turns=(hostile_turn,), score=score, output=HOSTILE, problem=HOSTILE)
    stored_episode = written(tmp_path, RecordedEpisode(step=1, kind="trained", group=0, episode=episode))[0].episode
    assert stored_episode.turns[0].text == HOSTILE.replace("\ud800", "\\ud800")
    batch = Batch(groups=(Group(task=task, episodes=(episode,)),), version=0)
    for value in (stored_episode, episode, hostile_turn, batch, batch.groups[0]):
        assert not {"\x1b", "\x07", "\u202e", "\ud800"} & set(repr(value))


def test_a_repr_fits_a_screen() -> None:
    long = played(task_of(1), text="line\n" * 1000)
    many = Episode(task=task_of(1), turns=long.turns * 100)
    batch = batch_of(groups=100, size=64)
    for value in (long, many, batch, batch.groups[0], replace(long.turns[0], text="wide " * 1000)):
        lines = repr(value).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 120
    text = repr(long)
    for part in ("sums sums/1", "truncated", "reward 0.500", "4 turns, 6 tokens", "answer=5", "add", "0.25 s  failed"):
        assert part in text, text


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"PAR1" + b"\0" * 100 + b"PAR1",
        lambda data: data[:200] + bytes(200) + data[400:],
        lambda data: data[:-600] + bytes(550) + data[-50:],
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "file.parquet"
    write_episodes(path, trained_episodes(1, batch_of(8, 8), None, None))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ForgeError, match=r"file\.parquet cannot be read"):
        list(EpisodeFile(path))


def test_a_file_whose_columns_contradict_each_other_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    write_episodes(path, trained_episodes(1, batch_of(1, 1), None, None))
    table = pq.read_table(path)

    def with_column(name: str, value: object) -> None:
        column = table.schema.get_field_index(name)
        changed = table.set_column(
            column, table.schema.field(column), pa.array([value], table.schema.field(column).type)
        )
        pq.write_table(changed, path)

    for name, value in [
        ("logprobs", [0.0]),
        ("trained", [True]),
        ("context_ids", [[1]]),
        ("truth", "[" * 100_000),
        ("task_messages", '"text"'),
        ("outcome", "won"),
        ("kind", "kept"),
        ("turns", []),
        ("versions", None),
        ("context_ids", [None]),
        ("logprobs", [None] * len(table["logprobs"][0])),
        ("values", None),
    ]:
        with_column(name, value)
        with pytest.raises(ForgeError, match="cannot be read"):
            EpisodeFile(path)[0]
    pq.write_table(table.drop_columns(["trained"]), path)
    with pytest.raises(ForgeError, match="it has other columns than a file of episodes"):
        EpisodeFile(path)


def info(folder: Path, step: int = 0) -> RunInfo:
    return RunInfo(recipe="grpo", model="tiny", folder=folder, steps=20, step=step)


def recorder(folder: Path, step: int = 0, **settings: float) -> EpisodeRecorder:
    recorder = EpisodeRecorder(folder, Recording(**settings))  # type: ignore[arg-type]
    recorder.start(info(folder, step))
    return recorder


def kept(folder: Path) -> list[tuple[int, str]]:
    return [(step, kind) for step, kind, _ in recorded_files(folder)]


def record(sink: EpisodeRecorder, step: int, batch: Batch, kind: Kind = "trained") -> None:
    def episodes() -> Iterable[RecordedEpisode]:
        return (replace(record, kind=kind) for record in trained_episodes(step, batch, None, None))

    sink.record(step, kind, episodes)
    sink.flush()


def test_steps_that_are_repeated_replace_their_files(tmp_path: Path) -> None:
    sink = recorder(tmp_path)
    sink.episode(Episode(task=task_of(1), turns=(), outcome=Outcome.INFRASTRUCTURE_ERROR, problem="it died"))
    sink.episode(played(task_of(1)))  # which its batch will hold
    for step in (1, 2, 3):
        record(sink, step, batch_of())
    record(sink, 2, batch_of(), "evaluated")
    assert kept(tmp_path) == [(1, "failed"), (1, "trained"), (2, "evaluated"), (2, "trained"), (3, "trained")]
    sink.rollback(2)
    record(sink, 3, batch_of(groups=1))
    sink.close()
    assert len(EpisodeFile(tmp_path / "episodes" / "000003-trained.parquet")) == 2
    (tmp_path / "episodes" / ".000004-trained.parquet.partial").write_bytes(b"half")
    sink = recorder(tmp_path, step=1)
    sink.close()
    assert kept(tmp_path) == [(1, "failed"), (1, "trained")]
    assert len(list((tmp_path / "episodes").iterdir())) == 2
    sink.close()


def test_flags_bound_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_rl.metrics.recorder._MAX_EPISODES", 6)
    sink = recorder(tmp_path, share=0.5)
    record(sink, 1, batch_of(groups=4, size=2))
    record(sink, 2, batch_of(groups=8, size=2))
    record(sink, 3, batch_of(groups=1, size=8))
    for _ in range(10):
        sink.episode(Episode(task=task_of(1), turns=(), outcome=Outcome.JUDGE_ERROR))
    record(sink, 4, batch_of(groups=4, size=2))
    sink.close()
    groups = [
        [row["task"] for row in EpisodeFile(path).listing() if not row["index"]]
        for _, kind, path in recorded_files(tmp_path)
        if kind == "trained"
    ]
    assert groups == [["sums/0", "sums/2"], ["sums/0", "sums/2", "sums/5"], ["sums/0"], ["sums/0", "sums/2"]]
    assert [len(EpisodeFile(path)) for _, kind, path in recorded_files(tmp_path) if kind == "failed"] == [6]
    size = (tmp_path / "episodes" / "000001-trained.parquet").stat().st_size
    monkeypatch.undo()
    sink = recorder(tmp_path, step=4, gib=2.5 * size / 2**30)
    for step in (5, 6, 7):
        record(sink, step, batch_of(groups=4, size=2))
    sink.close()
    assert [step for step, _ in kept(tmp_path)][-1] == 7
    assert next(step for step, _ in kept(tmp_path)) > 4


def test_a_step_lists_no_files_of_other_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(sink := recorder(tmp_path), 1, batch_of())
    size = (tmp_path / "episodes" / "000001-trained.parquet").stat().st_size
    sink.close()
    listings = list[Path]()

    def listed(run: Path) -> list[tuple[int, str, Path]]:
        listings.append(run)
        return recorded_files(run)

    sink = recorder(tmp_path, step=1, gib=5.5 * size / 2**30)
    sink.flush()
    monkeypatch.setattr("forge_rl.metrics.recorder.recorded_files", listed)
    for step in range(2, 8):
        record(sink, step, batch_of())
    sink.rollback(5)
    for step in (6, 7, 8):
        record(sink, step, batch_of())
    sink.close()
    assert kept(tmp_path) == [(step, "trained") for step in range(4, 9)]
    assert len(listings) <= 2, "once at the start, and once for the files to delete"


def test_a_full_disk_costs_episodes_and_one_error_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = recorder(tmp_path)
    full = True

    def replacing(*paths: object) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space")
        os.rename(*paths)  # type: ignore[arg-type]

    monkeypatch.setattr("forge_rl.metrics.episode_files.os.replace", replacing)
    record(sink, 1, batch_of())  # fails in its thread
    with pytest.raises(CheckpointError, match="no space left"):
        record(sink, 2, batch_of())
    sink.flush()
    assert list((tmp_path / "episodes").iterdir()) == []
    full = False
    with pytest.raises(CheckpointError):
        record(sink, 3, batch_of())  # which is written
    sink.flush()
    record(sink, 4, batch_of())
    sink.close()
    assert kept(tmp_path) == [(3, "trained"), (4, "trained")]


def test_a_slow_disk_delays_no_step(tmp_path: Path) -> None:
    sink, let_go = recorder(tmp_path), threading.Event()

    def slowly() -> Iterable[RecordedEpisode]:
        assert let_go.wait(30), "a step waits for the disk"
        return trained_episodes(1, batch_of(), None, None)

    sink.record(1, "trained", slowly)
    sink.record(2, "trained", slowly)
    with pytest.raises(CheckpointError, match="more slowly than episodes come"):
        sink.record(3, "trained", slowly)
    let_go.set()
    sink.close()
    assert kept(tmp_path) == [(1, "trained"), (2, "trained")]


def test_a_file_is_readable_by_anything(tmp_path: Path) -> None:
    write_episodes(tmp_path / "file.parquet", trained_episodes(1, batch_of(), None, None))
    (row, *_) = pq.read_table(tmp_path / "file.parquet").to_pylist()
    assert row["context_ids"] == [[1, 2, 3, 4, 5, 6, 7, 2], [9, 9, 8, 1, 5]]
    assert json.loads(row["turns"][2]["messages"])[0]["content"] == "error: add needs b"
    assert (row["turns"][2]["segment"], row["turns"][2]["start"], row["turns"][2]["tokens"]) == (0, 6, 2)
    assert dict(row["parts"]) == {"right": 0.0, "brief": 0.0}
