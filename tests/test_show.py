"""forge-rl show, runs and compare: what a person sees of the episodes and runs in their folders."""

import contextlib
import fcntl
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from apps import compare, runs, show
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.command_line import parse
from forge_rl.look.page.episode_json import episode_json
from forge_rl.metrics.episode_files import RecordedEpisode, write_episodes
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.run.records.recording import trained_episodes
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, Turn
from tests.test_recording import HOSTILE, played, task_of, turn


def run_folder(place: Path) -> Path:
    """A run folder with two trained steps, whose rewards are 0.0 to 0.3 and 1.0 to 1.3, and a failed episode."""
    (place / "episodes").mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"model": "tiny", "steps": 4}))
    (place / "versions.json").write_text("{}")
    for step in (1, 2):
        records = [
            RecordedEpisode(
                step=step,
                kind="trained",
                group=at // 2,
                index=at % 2,
                episode=played(task_of(at), step - 1 + at / 10),
                advantages=np.full(6, at - 1.5, np.float32),
                trainer_gaps=np.array([0.25, -0.5, 0, 0, 0, np.nan], np.float32),
                trained=np.array([True] * 5 + [False]),
            )
            for at in range(4)
        ]
        write_episodes(place / "episodes" / f"{step:06d}-trained.parquet", records)
    failed = Episode(task=task_of(9), turns=(), outcome=Outcome.ENVIRONMENT_ERROR, problem="the world raised")
    write_episodes(
        place / "episodes" / "000002-failed.parquet", [RecordedEpisode(step=2, kind="failed", episode=failed)]
    )
    return place


def shown(config: show.Config | runs.Config | compare.Config, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    sys.modules[type(config).__module__].show(config, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def listed(place: Path, **filters: object) -> list[str]:
    lines = shown(show.Config(run=place, **filters)).splitlines()  # type: ignore[arg-type]
    return [line.split()[0] for line in lines[1:-1]]


def test_episodes_are_listed_and_filtered(tmp_path: Path) -> None:
    place = run_folder(tmp_path / "run")
    newest = ["2-trained-0", "2-trained-1", "2-trained-2", "2-trained-3", "2-failed-0"]
    assert listed(place) == [*newest, *(f"1-trained-{at}" for at in range(4))]
    assert listed(place, most=2) == newest[:2]
    assert listed(place, step=1, worst=2) == ["1-trained-0", "1-trained-1"]
    assert listed(place, worst=5)[-2:] == ["1-trained-3", "2-trained-0"]
    assert listed(place, kind="failed") == listed(place, outcome="environment_error") == ["2-failed-0"]
    assert listed(place, task="sums/2") == ["2-trained-2", "1-trained-2"]
    with pytest.raises(ConfigError, match="has no such episodes"):
        shown(show.Config(run=place, source="other"))
    with pytest.raises(ConfigError, match="no episode ends with 'won'"):
        show.Config(run=place, outcome="won")
    with pytest.raises(ConfigError, match="has no episode '2-trained-4'"):
        shown(show.Config(run=place, episode="2-trained-4"))
    with pytest.raises(ConfigError, match="has no episodes"):
        shown(show.Config(run=tmp_path))


def test_a_list_has_questions_and_whole_names_on_a_narrow_screen(tmp_path: Path) -> None:
    task = Task(id="5a65160880e5b98e", source="train", messages=({"role": "user", "content": "What is 6 +\n3?"},))
    turns = (turn([1], [2, 3], messages=task.messages, text="Ada's formula. " * 20 + "It is 9."),)
    episode = Episode(task=task, turns=turns, score=Score(total=0.009091))  # a reward that extracts no answer
    (tmp_path / "run" / "episodes").mkdir(parents=True)
    records = [RecordedEpisode(step=1000, kind="trained", group=0, index=at, episode=episode) for at in range(2)]
    write_episodes(tmp_path / "run" / "episodes" / "001000-trained.parquet", records)
    assert listed(tmp_path / "run", task="6 + 3?") == ["1000-trained-0", "1000-trained-1"]
    wide = " ".join(shown(show.Config(run=tmp_path / "run"), width=200).split())
    assert "1000-trained-1 train What is 6 + 3? completed 0.00909" in wide
    assert "Ada's formula. It is 9. forge-rl show RUN 1000-trained-0" in wide
    narrow = shown(show.Config(run=tmp_path / "run"), width=80)
    assert "1000-trained-1  What is 6 + 3?  completed" in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def test_an_episode_is_printed_whole(tmp_path: Path) -> None:
    text = " ".join(shown(show.Config(run=run_folder(tmp_path / "run"), episode="2-trained-1"), width=1000).split())
    for part in (
        "trained in step 2, group 0; truncated",
        "reward 1.1, right 1.1, brief 0",
        "advantage -0.5",
        "truth answer 5",
        'turn 1 of 4, segment 1 of 2 user 1 + 4? assistant calls calls add {"a": 3} 0.2s error: add needs b',
        "3 + 2 tokens; versions 3 to 4; logprob -0.15 on average; gap 0.375, at most 0.5; value 0;",
        "0.5s to answer, 0.3s for the response",
        "turn 2 of 4, segment 2 of 2, helper system You help. assistant the sub-agent's",
        "turn 3 of 4, segment 1 of 2 tool error: add needs b assistant 7 6 + 2 tokens, truncated;",
    ):
        assert part in text, text
    whole = shown(show.Config(run=tmp_path / "run", kind="failed", whole=True))
    assert "the world raised" in whole
    assert "9 + 4?" in whole


def test_an_agents_text_is_shown_though_it_never_called_the_policy(tmp_path: Path) -> None:
    episode = Episode(task=task_of(1), turns=(), output="I gave up.", score=Score(total=0.0))
    (tmp_path / "run" / "episodes").mkdir(parents=True)
    records = [RecordedEpisode(step=1, kind="trained", group=0, index=0, episode=episode)]
    write_episodes(tmp_path / "run" / "episodes" / "000001-trained.parquet", records)
    assert "I gave up." in shown(show.Config(run=tmp_path / "run", episode="1-trained-0"))


def test_given_answers_are_labelled_without_metrics_of_sampled_ones(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_text("{}")
    pair = Task(
        id="p",
        source="pairs",
        messages=({"role": "user", "content": "2 + 3?"},),
        truth=dict.fromkeys(("chosen", "rejected"), "5"),
    )
    groups = tuple(
        Group(
            task=task, episodes=tuple(Episode(task=task, turns=(Turn.given((1, 2), (3, 4), text),)) for text in texts)
        )
        for task, texts in ((pair, ("five", "six")), (replace(pair, truth={}), ("seven", "eight")))
    )
    batch = Batch(groups=groups, version=0)
    packed = pack(batch, batch.rewards, Layout(seq_len=32), drop_uniform=False)
    records = [
        replace(record, trainer_gaps=np.full(2, -3.25, np.float32))
        for record in trained_episodes(1, batch, packed, None)
    ]
    path = tmp_path / "episodes" / "000001-trained.parquet"
    write_episodes(path, records)
    assert [row["said"] for row in EpisodeFile(path).listing()] == [
        "chosen: five",
        "rejected: six",
        "given: seven",
        "given: eight",
    ]
    assert {(row["seconds"], row["advantage"]) for row in EpisodeFile(path).listing()} == {(None, None)}
    assert "0.0" not in shown(show.Config(run=tmp_path))
    for place, answer in enumerate(("the chosen", "the rejected", "a given")):
        text = " ".join(shown(show.Config(run=tmp_path, episode=f"1-trained-{place}"), width=1000).split())
        assert f"group {place // 2}; {answer} answer" in text
        assert "2 + 2 tokens; logprob -3.25 on average" in text
        for undefined in ("version", "gap", "to answer", "advantage", "completed"):
            assert undefined not in text, text
        page = episode_json("1-trained-0", EpisodeFile(path)[place], [])
        (turn,) = page["turns"]
        assert (page["seconds"], turn["seconds"], turn["gaps"], turn["logprobs"]) == (None, None, None, -3.25)


def test_hostile_episodes_are_text_and_damaged_files_are_named(tmp_path: Path) -> None:
    place = run_folder(tmp_path / "run")
    task = Task(
        id=HOSTILE, source=HOSTILE, messages=({"role": HOSTILE, "content": [HOSTILE]},), truth={HOSTILE: HOSTILE}
    )
    markup = "[bold red]x[/bold red] [link=http://a.example]here[/link]"
    episode = Episode(
        task=task,
        turns=(turn([1], [2], messages=task.messages, text=HOSTILE + markup),),
        score=Score(total=0.0, parts={HOSTILE: 1.0}, answer=HOSTILE),
        output=HOSTILE,
        problem=HOSTILE,
    )
    write_episodes(
        place / "episodes" / "000003-trained.parquet", [RecordedEpisode(step=3, kind="trained", episode=episode)]
    )
    path = place / "episodes" / "000002-failed.parquet"  # an outcome that no run writes
    table = pq.read_table(path)
    column = table.schema.get_field_index("outcome")
    hostile_outcome = pa.array(["\x1b]52;c;cHduCg==\x07\u202e"])
    pq.write_table(table.set_column(column, pa.field("outcome", pa.string()), hostile_outcome), path)
    assert r"\x1b]52" in shown(show.Config(run=place, kind="failed"))
    for config in (show.Config(run=place, step=3), show.Config(run=place, step=3, whole=True)):
        text = shown(config, width=4000)
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert markup in text
    for name, values in (("task", [None]), ("source", [None]), ("tokens", [None]), ("reward", [math.nan])):
        field = table.schema.field(name)
        hostile = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
        pq.write_table(hostile, path)
        for config in (show.Config(run=place, kind="failed"), show.Config(run=place, task="t", worst=True)):
            with pytest.raises(ForgeError, match=rf"000002-failed\.parquet cannot be read: .*{name}"):
                shown(config)
    path.unlink()
    (place / "episodes" / "000003-trained.parquet").write_bytes(b"PAR1")
    with pytest.raises(ForgeError, match=r"000003-trained\.parquet cannot be read"):
        shown(show.Config(run=place))


@pytest.mark.parametrize("name", ["1-trained-4", "1-trained-00000000000000009", "1-trained-x", "7-trained-0", "1"])
def test_an_episode_that_is_not_there_is_one_clear_message(name: str, tmp_path: Path) -> None:
    place = run_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"has no episode '{name}'"):
        shown(show.Config(run=place, episode=name))
    assert "1-trained-3" in shown(show.Config(run=place, episode="1-trained-3"))


def test_an_episode_of_which_the_loss_saw_no_token_is_shown(tmp_path: Path) -> None:
    place, zeros = run_folder(tmp_path / "run"), np.zeros(6, np.float32)
    record = RecordedEpisode(
        step=3, kind="trained", episode=played(task_of(0), 1.0), advantages=zeros, trained=zeros.astype(bool)
    )
    write_episodes(place / "episodes" / "000003-trained.parquet", [record])
    assert "0; the loss saw no token" in shown(show.Config(run=place, episode="3-trained-0"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("1-trained-0 --worst 3", "--worst has no effect: the episode 1-trained-0 is printed whole"),
        ("1-trained-0 --whole", "--whole has no effect"),
        ("--worst 3 --most 2", "--most has no effect: --worst says how many"),
        ("--worst 3 --step 1 --whole", ""),
        ("1-trained-0", ""),
    ],
)
def test_filters_without_an_effect_are_refused_by_name(flags: str, message: str) -> None:
    config = parse(show.Config, "show", ["runs/a", *flags.split()])
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        config.check_effects()


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    steps = [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5, "held_out": 0.75}]
    for name in ("done", "live", "cut", "broken"):
        place = run_folder(tmp_path / name)
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps) + '{"step": 3, "rew')
        (place / ".lock").touch()
    summary = {"score_before": 0.1, "score_after": 0.9, "best": {"step": 1}}
    (tmp_path / "done" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "broken" / "summary.json").write_text(json.dumps({"outcome": "failed"}))
    odd = run_folder(tmp_path / "odd \x1b[2J")
    (odd / "metrics.jsonl").write_text('{"step": true}\n[' + "[" * 100_000 + '\n{"step": 7, "reward/mean": 1e999}\n')
    (odd / "config.json").write_text("[]")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    an_hour_ago = time.time() - 4000
    os.utime(tmp_path / "cut" / "metrics.jsonl", (an_hour_ago, an_hour_ago))
    with (tmp_path / "live" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = shown(runs.Config(place=tmp_path))
    found = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert "\x1b" not in text
    assert found.keys() == {"done", "live", "cut", "broken", "odd"}
    assert "finished  2 of 4     0.5           0.1    0.9   step 1" in found["done"]
    assert "running   2 of 4     0.5                 0.75" in found["live"]
    assert "stopped" in found["cut"]
    assert "1 h ago" in found["cut"]
    assert "failed" in found["broken"]
    assert " 7 " in found["odd"]
    # Another user's run in a shared place, or a disk that is away; root may enter any folder, so a link stands for it.
    (tmp_path / "away").symlink_to("x" * 300)
    afar = run_folder(tmp_path / "afar")
    (afar / ".lock").write_text("process 7 on another-machine\n")
    ended = run_folder(tmp_path / "ended")
    (ended / ".lock").write_text("process 7 on another-machine\n")
    (ended / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "cut" / ".lock").write_text(f"process 7 on {socket.gethostname()}\n")
    text = shown(runs.Config(place=tmp_path))
    states = {line.split()[0]: line.split()[1] for line in text.splitlines()[1:]}
    assert states["away"] == "unreadable"
    assert states["afar"] == "unknown", "its lock is not seen here"
    assert (states["ended"], states["cut"]) == ("finished", "stopped")
    with pytest.raises(ConfigError, match="has no runs"):
        shown(runs.Config(place=tmp_path / "done"))
    with pytest.raises(ConfigError, match="cannot be listed"):
        shown(runs.Config(place=tmp_path / "nowhere"))


def compared_run(place: Path, rewards: list[float], settings: dict[str, object], code: dict[str, str]) -> Path:
    """A run folder of a step for each mean reward, which is also the score of its two evaluated tasks."""
    (place / "episodes").mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(settings))
    (place / "versions.json").write_text(json.dumps({"vllm": "0.32", "code": code}))
    rows = []
    for step, mean in enumerate(rewards, 1):
        for kind, offsets in (("trained", (-0.1, 0.0, 0.1) * 4), ("evaluated", (-0.05, 0.05))):
            records = [
                RecordedEpisode(step=step, kind=kind, set="held", group=at, episode=played(task_of(at), mean + offset))
                for at, offset in enumerate(offsets)
            ]
            write_episodes(place / "episodes" / f"{step:06d}-{kind}.parquet", records)
        rows.append({"step": step, "reward/mean": mean, "loss": 0.5})
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.mark.parametrize(
    ("settings", "code", "first_line"),
    [
        ({"rewards": ["bad.py:score"]}, {}, "A and B differ in --reward ok.py:score -> bad.py:score"),
        ({"trainer": {"optimizer": {"lr": 0.1}}}, {}, "A and B differ in --trainer.optimizer.lr 1e-05 -> 0.1"),
        ({}, {"ok.py": "1234"}, "A and B differ in code of ok.py none -> 1234"),
        ({"display": "live"}, {}, "settings and code that define a run are the same; 1 other difference"),
        ({}, {}, "settings, code and versions are the same"),
    ],
)
def test_the_first_line_of_a_comparison_names_what_differs(
    tmp_path: Path, settings: dict[str, object], code: dict[str, str], first_line: str
) -> None:
    given: dict[str, object] = {"rewards": ["ok.py:score"], "trainer": {"optimizer": {"lr": 1e-05}}, "display": "none"}
    first = compared_run(tmp_path / "a", [0.1, 0.5], given, {})
    second = compared_run(tmp_path / "b", [0.1, 0.5], given | settings, code)
    assert shown(compare.Config(first=first, second=second)).splitlines()[0] == first_line


def test_a_flag_with_another_name_in_an_earlier_run_is_no_difference(tmp_path: Path) -> None:
    first = compared_run(tmp_path / "a", [0.1], {"generator": {"least_replicas": 1}}, {})
    second = compared_run(tmp_path / "b", [0.1], {"generator": {"min_replicas": 1}}, {})
    assert compare.differences(first, second) == []


def test_a_comparison_says_where_runs_part_and_how_they_score(tmp_path: Path) -> None:
    first = compared_run(tmp_path / "a", [0.1, 0.2, 0.4, 0.6, 0.8, 0.9], {}, {})
    second = compared_run(tmp_path / "b", [0.1, 0.25, 0.39, 0.2, 0.1, 0.1], {}, {})
    text = shown(compare.Config(first=first, second=second))
    assert "first different at step 2: reward/mean 0.2 and 0.25" in text
    bounds = r"  \[0\.\d+, 0\.\d+\]"
    assert re.search(rf"rewards are apart from step 4 on: 0\.600{bounds} and 0\.200{bounds}", text)
    (score,) = (line.split() for line in text.splitlines() if "held sums" in line)
    # Two tasks say little, within what scores can be.
    assert " ".join(score[2:]) == "0.900 [0.056, 0.999] 0.100 [0.001, 0.944] -0.800 [-1.000, +0.279] of 2 tasks"
    with pytest.raises(ConfigError, match="is not a run folder"):
        compare.Config(first=first, second=tmp_path)


def test_the_programs_load_neither_torch_nor_monarch() -> None:
    program = (
        "import sys, apps.show, apps.runs, apps.compare; print(sorted({'torch', 'monarch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_another_chat_template_is_named_first(tmp_path: Path) -> None:
    first = compared_run(tmp_path / "a", [0.5], {"model": "tiny"}, {})
    second = compared_run(tmp_path / "b", [0.1], {"model": "tiny"}, {})
    assert "different prompts" not in shown(compare.Config(first=first, second=second))
    path = second / "episodes" / "000001-evaluated.parquet"
    records = [*EpisodeFile(path)]
    for at, record in enumerate(records):
        turns = list(record.episode.turns)
        turns[0] = replace(turns[0], prompt_ids=[7, *turns[0].prompt_ids])
        records[at] = replace(record, episode=Episode(task=record.episode.task, turns=tuple(turns[:1]), score=None))
    write_episodes(path, records)
    lines = shown(compare.Config(first=first, second=second), width=200).splitlines()
    prompts = (
        "A and B have different prompts for the same messages (sums sums/0: 3 and 4 tokens): another chat template"
    )
    assert lines[0].startswith(prompts)
    assert lines[1] == "settings, code and versions are the same"
    (second / "config.json").write_text(json.dumps({"model": "other"}))
    lines = shown(compare.Config(first=first, second=second), width=200).splitlines()
    assert lines[0].startswith(prompts.replace("have", "differ in --model tiny -> other;"))
