"""The app that evaluates and compares models: what names a model, what is kept of a run that was cut short, errors."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from apps.evaluate import (
    Config,
    build_sets,
    main,
    with_room,
)
from forge_rl.algorithms.evaluation import compare_paired
from forge_rl.data.data_config import DataConfig
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import CheckpointError, ConfigError, ForgeError
from forge_rl.flags.command_line import parse
from forge_rl.harness.comparisons import check_scored, compare, pairs_of, print_comparisons, score
from forge_rl.harness.evaluated import EpisodeKeeper
from forge_rl.harness.results_file import Results, _key
from forge_rl.harness.score_tables import print_scores, short_names
from forge_rl.look.past_runs import read_run
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import recorded_files
from forge_rl.rollout.evaluation import EvalTasks
from forge_rl.services.generator import Generator
from forge_rl.types import Episode, Outcome, Score, Task
from tests.fake_engine import FOLDER, FakeEngine


def odd_length(task: Task, text: str) -> float:
    """A reward that depends on the task alone, as fake engines say nothing."""
    return float(len(task.prompt) % 2)


SETS = {
    "a": [Task(id=str(number), source="a", messages=()) for number in range(3)],
    "b": [Task(id="0", source="b", messages=())],
}


def episode_of(task: Task, reward: float, outcome: Outcome = Outcome.COMPLETED) -> Episode:
    return Episode(task=task, turns=(), score=Score(total=reward, answer="5"), outcome=outcome, problem="p")


def filled(path: Path, rewards: list[float], *, failed: bool = False) -> Results:
    """Results of both sets; the first task of `a` may have failed."""
    found = Results(path, SETS)
    for task, reward in zip(SETS["a"], rewards, strict=True):
        outcome = Outcome.JUDGE_ERROR if failed and task.id == "0" else Outcome.COMPLETED
        found.add("a", [episode_of(task, reward, outcome), episode_of(task, reward)])
    found.add("b", [episode_of(SETS["b"][0], 1.0)] * 2)
    return found


def test_finished_work_is_kept_and_failed_or_torn_work_is_redone(tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    filled(path, [0.0, 0.5, 1.0], failed=True)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"set": "a", "source": "a", "tas')
    again = Results(path, SETS)
    assert path.read_bytes() == whole
    assert {name: [task.id for task in tasks] for name, tasks in again.missing(SETS).items()} == {"a": ["0"], "b": []}
    again.add("a", [episode_of(SETS["a"][0], 1.0)] * 2)
    third = Results(path, SETS)
    assert not any(third.missing(SETS).values())
    assert [[episode.reward for episode in each] for each in third.of_set("a", SETS["a"])] == [
        [1, 1],
        [0.5, 0.5],
        [1, 1],
    ]
    fewer = {"b": SETS["b"]}
    assert not any(Results(path, fewer).missing(fewer).values()), "what is asked for no more is in nobody's way"


def test_lines_of_another_form_are_dropped_and_a_file_that_cannot_be_used_is_one_clear_message(tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    results = filled(path, [0.0, 0.5, 1.0])
    content = path.read_bytes()
    odd = {"set": "a", "source": "a", "task": "1", "digest": "d", "episodes": [{"reward": 10**400}]}
    path.write_bytes(content + json.dumps(odd).encode() + b'\n[]\n{"set": "a", "source": "a", "digest": []}\n7\n')
    Results(path, SETS)
    assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"model\.jsonl cannot be read: Is a directory"):
        Results(path, SETS)
    with pytest.raises(CheckpointError, match=r"cannot write .*model\.jsonl: Is a directory"):
        results.add("b", [episode_of(SETS["b"][0], 1.0)] * 2)


def test_two_models_are_compared_on_the_tasks_that_both_have_scores_of(tmp_path: Path) -> None:
    first = filled(tmp_path / "first.jsonl", [0.0, 0.0, 1.0])
    second = filled(tmp_path / "second.jsonl", [1.0, 1.0, 0.0])
    found = compare(SETS, first, second)
    assert (found["a"].difference, found["a"].won, found["a"].lost, found["a"].tasks) == (pytest.approx(1 / 3), 2, 1, 3)
    assert (found["b"].difference, found["b"].tasks) == (0.0, 1)
    second.episodes[_key("a", SETS["a"][0])] = [episode_of(SETS["a"][0], 0.0, Outcome.JUDGE_ERROR)]
    assert compare(SETS, first, second)["a"].tasks == 2
    config = Config(models=("x",), episodes=2, temperature=1.0)
    assert score(SETS, first, k=config.episodes, success=config.success)["a"]["avg@2"] == pytest.approx(1 / 3)


def test_a_set_of_which_all_episodes_failed_hides_no_other_score(tmp_path: Path) -> None:
    results = filled(tmp_path / "model.jsonl", [0.0, 0.5, 1.0])
    check_scored(SETS, results)
    results.episodes[_key("b", SETS["b"][0])] = [episode_of(SETS["b"][0], 0.0, Outcome.JUDGE_ERROR)] * 2
    scores = score(SETS, results, k=2, success=1.0)
    assert scores.keys() == {"a"}
    assert scores["a"]["avg@2"] == 0.5
    with pytest.raises(ForgeError, match="all 2 episodes of the evaluation set b failed; b 0 ended with judge_error"):
        check_scored(SETS, results)


def test_names_in_tables_are_as_short_as_can_be_told_apart() -> None:
    names = ["smollm2-135m", "runs/a/checkpoints/best", "runs/b/checkpoints/best"]
    assert list(short_names(names).values()) == ["smollm2-135m", "a/checkpoints/best", "b/checkpoints/best"]
    assert short_names(["runs/a", "org/b"]) == {"runs/a": "a", "org/b": "b"}


def test_a_table_shows_scores_that_the_first_model_lacks() -> None:
    console = Console(file=io.StringIO(), width=100, markup=False)
    base, tuned = {"avg@4": 0.0, "pass@4": 0.0}, {"avg@4": 0.5, "pass@4": 0.9, "maj@4": 0.75, "maj@4_stderr": 0.125}
    print_scores(console, {"base": {"a": base}, "tuned": {"a": tuned, "b": tuned}})
    assert isinstance(console.file, io.StringIO)
    _, header, *rows = (line.split() for line in console.file.getvalue().splitlines())
    assert header == ["set", "model", "avg@4", "pass@4", "maj@4"]
    assert rows[0] == ["a", "base", "0.000", "0.000"]
    cells = ["0.500", "0.900", "0.750", "±", "0.125"]
    assert rows[1:4] == [["a", "tuned", *cells], ["b", "base"], ["b", "tuned", *cells]]


def test_each_data_set_is_a_set_of_its_held_out_tasks() -> None:
    config = Config(models=("x",), tasks=("chain_sum:max_terms=2", "leg_counting"), evaluation=EvalTasks(tasks=3))
    sets = build_sets(config)
    assert {name: len(tasks) for name, tasks in sets.items()} == {"chain_sum": 3, "leg_counting": 3}
    assert sets["leg_counting"] == build_sets(config)["leg_counting"]


def test_rows_of_files_are_evaluated_whole_and_a_share_of_them_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(20)))
    config = Config(models=("x",), tasks=(str(rows),))
    assert len(build_sets(config)["rows"]) == 20
    with pytest.raises(ConfigError, match=r"--data\.held-out-share has no effect: all rows of files are evaluated"):
        build_sets(replace(config, data=DataConfig(held_out_share=0.1)))
    build_sets(replace(config, tasks=(str(rows), "chain_sum"), data=DataConfig(held_out_share=0.1)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"models": ()}, "no model is named"),
        ({"models": ("x", "x")}, "x is named twice"),
        ({"episodes": 4}, "4 greedy episodes of a task are equal"),
        ({"episodes": 0}, "--episodes"),
        ({"evaluation": EvalTasks(tasks=0)}, "--evaluation.tasks"),
        ({"temperature": -1.0}, "--temperature"),
        ({"json": Path("/nowhere/out.json")}, "the folder /nowhere does not exist"),
        ({"tasks": ("chain_summ",)}, "chain_sum"),
        ({"tasks": ("a.jsonl:answer=",)}, "--tasks: answer has no value"),
        ({"tasks": ("mine.py:TASKS",)}, "--tasks "),
        ({"tasks": ("chain_sum", "chain_sum")}, "given twice"),
        ({"benchmark": ("gsm9k",)}, "'gsm9k' is unknown"),
        ({"benchmark": ("bfcl",)}, "--benchmark bfcl=FILE"),
        ({"agent": "command:true", "env": "game"}, "both play the episodes"),
        ({"agent": "python agent.py"}, "or for a command: --agent 'command:python agent.py'"),
        ({"agent": "command:no_such_program agent.py"}, "program 'no_such_program' was not found"),
        ({"tool_parser": "hermes"}, "--tool-parser has no effect, as no task has tools"),
    ],
)
def test_wrong_flags_are_one_clear_message(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ForgeError) as caught:
        build_sets(Config(**{"models": ("x",)} | flags))
    assert said in str(caught.value)
    assert "hint" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lm-eval arc_easy --temperature 1", "--temperature has no effect: lm-eval's tasks have"),
        ("--lm-eval arc_easy --template-args enable_thinking=false", "--template-args has no effect: lm-eval's tasks"),
        ("--lm-eval arc_easy --live --generator.dtype bfloat16", "--generator.dtype has no effect: the engines are"),
        ("--num-fewshot 3", "--num-fewshot has no effect: only lm-eval's tasks read it"),
        ("--data.overlap leave-out", "--data.overlap has no effect: this command does not train"),
        ("--success 0.5", "--success has no effect: pass@k takes several episodes"),
        ("--generator.temperature 0.5", "--generator.temperature has no effect: --temperature, or lm-eval's"),
        ("--generator.guests 1", "--generator.guests has no effect: no trainer lends devices"),
        ("--environment.replicas 2", "--environment.replicas has no effect: no --env has processes"),
        ("--benchmark gsm8k --data.system x", "--data.system has no effect: --benchmark and --env have tasks"),
        ("--benchmark gsm8k --reward math", "--reward has no effect: benchmarks have rewards"),
        ("--lm-eval arc_easy --num-fewshot 3 --chat-template --limit 9", ""),
        ("--lm-eval arc_easy --live --generator.max-num-seqs 8", ""),
        ("--episodes 4 --temperature 1 --success 0.5 --tasks chain_sum --data.system x --reward math", ""),
        ("--env game --environment.replicas 2 --template-args enable_thinking=false", ""),
        ("--benchmark list --success 0.5", ""),
    ],
)
def test_flags_without_an_effect_are_refused_by_name(flags: str, message: str) -> None:
    config = parse(Config, "evaluate", ["x", *flags.split()])
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        config.check_effects()


@pytest.mark.parametrize(
    "settings",
    [
        {"generator": Generator.Config(quantization="fp8")},
        {"generator": Generator.Config(dtype="bfloat16")},
        {"template_args": ("enable_thinking=false",)},
        {"temperature": 0.5},
    ],
)
def test_results_of_other_settings_are_kept_apart(settings: dict[str, Any]) -> None:
    assert Config(models=("x",), **settings).digest != Config(models=("x",)).digest


@pytest.mark.parametrize(
    "agent", ["solver.py:solve", "solver:solve", "command:python solver.py --turns 3", "command:./solver.py"]
)
def test_an_edited_agent_has_results_of_its_own(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solver.py").write_text("def solve(task): return '5'")
    (tmp_path / "solver.py").chmod(0o755)
    config = Config(models=("x",), agent=agent)
    before = config.digest
    assert config.digest == before
    (tmp_path / "solver.py").write_text("def solve(task): return '6'")
    assert config.digest != before
    assert Config(models=("x",), agent="command:python -c " + "x" * 9999).digest != before


async def test_an_evaluation_that_is_killed_loses_only_its_last_episodes(small_tokenizer: Path, tmp_path: Path) -> None:
    def listed() -> list[list[tuple[str, str]]]:
        files = [EpisodeFile(path) for _, _, path in recorded_files(tmp_path / "x")]
        return [[(row["set"], row["task"]) for row in file.listing()] for file in files]

    keeper = EpisodeKeeper(tmp_path / "x", Config(models=("x",)), small_tokenizer)
    most_lost = 0
    for number in range(40):
        task = Task(id=str(number), source="a", messages=())
        keeper.add("a" if number % 2 else "b", [episode_of(task, 1.0), episode_of(task, 0.0)])
        if keeper._writing is not None:
            await keeper._writing
        num_kept = len(listed()[0]) // 2 if listed() else 0
        assert number + 1 - num_kept <= max(7, num_kept // 4)
        most_lost = max(most_lost, number + 1 - num_kept)
    assert most_lost == 7, "not each task is written alone"
    # What is killed here is read whole, and goes on in a file of its own.
    resumed = EpisodeKeeper(tmp_path / "x", Config(models=("x",)), small_tokenizer)
    resumed.add("a", [episode_of(task, 1.0)])
    await resumed.close()
    await keeper.close()
    expected = [("b", str(number)) for number in range(0, 40, 2)] + [("a", str(number)) for number in range(1, 40, 2)]
    first, second = listed()
    assert (first[::2], first[1::2], second) == (expected, expected, [("a", "39")])
    # A full disk is told of once, at the end, if there is no room then.
    (tmp_path / "y").write_text("no folder")
    blocked = EpisodeKeeper(tmp_path / "y", Config(models=("x",)), small_tokenizer)
    for _ in range(9):
        blocked.add("a", [episode_of(task, 1.0)])
    with pytest.raises(CheckpointError, match=r"y.* cannot be written: Not a directory"):
        await blocked.close()


class Twice:
    """A world of two turns, which gives 0.25 for the second."""

    def __init__(self, task: Task) -> None:
        self.task, self.turns = task, 0

    async def reset(self) -> Observation:
        return Observation(messages=self.task.messages)

    async def step(self, completion: str) -> Step:
        self.turns += 1
        if self.turns == 1:
            return Step(done=False, messages=({"role": "user", "content": "Again!"},))
        return Step(done=True, reward=0.25)


async def test_episodes_of_a_world_and_of_a_benchmark_are_scored_and_kept_whole(
    run_model: Path, tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(Generator, "start", partial(Generator.start, actor=FakeEngine))
    rows = tmp_path / "gsm8k.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(2)))
    config = Config(
        models=(str(run_model),),
        tasks=(f"own={rows}",),
        data=DataConfig(template="Q: {{ question }}"),
        benchmark=(f"gsm8k={rows}",),
        env="tests.test_evaluate:Twice",
        out=tmp_path / "out",
    )
    config.check_effects()
    await main(config)
    [folder] = [path.with_suffix("") for path in (tmp_path / "out").glob("*.jsonl")]
    [(_, _, whole)] = recorded_files(folder)
    episodes = [EpisodeFile(whole)[place].episode for place in range(4)]
    assert [episode.reward for episode in episodes] == [0.25] * 4, "the world's own reward"
    for episode in episodes:
        assert episode.turns[1].messages[-1]["content"] == "Again!"
    tasks = [episode.task for episode in episodes]
    assert [task.source for task in tasks].count("gsm8k") == 2
    assert sorted(task.prompt for task in tasks if task.source == "own") == ["Q: 0 + 1?", "Q: 1 + 1?"]


def test_benchmarks_get_room_for_their_answers_unless_flags_set_it(run_model: Path) -> None:
    folders = {"m": run_model}
    config = Config(models=("m",), benchmark=("gsm8k=rows.jsonl",))
    room = with_room(config, folders).generator
    assert (room.max_model_len, room.max_tokens) == (512, 256), "half of the tiny model's context"
    given = replace(config, generator=Generator.Config(max_tokens=64))
    assert with_room(given, folders) == given
    room = with_room(replace(config, generator=Generator.Config(max_model_len=300)), folders).generator
    assert (room.max_model_len, room.max_tokens) == (300, 150), "a context of the user's does not cut answers to 16"


def test_with_many_models_each_is_compared_with_the_first() -> None:
    assert pairs_of(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert pairs_of(["a", "b", "c", "d"]) == [("a", "b"), ("a", "c"), ("a", "d")]


def test_models_are_evaluated_once_under_one_set_of_settings(
    run_model: Path,
    tmp_path: Path,
    nothing_left: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(Generator, "start", partial(Generator.start, actor=FakeEngine))
    other = shutil.copytree(run_model, tmp_path / "other")
    config = Config(
        models=(str(run_model), str(other)),
        tasks=("chain_sum:min_terms=2,max_terms=2", "leg_counting"),
        evaluation=EvalTasks(tasks=3),
        rewards=("tests.test_evaluate:odd_length",),
        out=tmp_path / "out",
        json=tmp_path / "scores.json",
    )
    asyncio.run(main(config))
    written = json.loads((tmp_path / "scores.json").read_text())
    assert list(written["models"]) == [str(run_model), str(other)]
    scores = written["models"][str(other)]["sets"]
    tasks = build_sets(config)["chain_sum"]
    expected = sum(len(task.messages[-1]["content"]) % 2 for task in tasks) / len(tasks)
    assert scores["chain_sum"]["avg@1"] == pytest.approx(expected)
    assert {each["set"]: (each["difference"], each["tasks"]) for each in written["comparisons"]} == {
        "chain_sum": (0.0, 3),
        "leg_counting": (0.0, 3),
    }
    kept = [path.read_text().splitlines() for path in (tmp_path / "out").glob("*.jsonl")]
    assert [len(lines) for lines in kept] == [6, 6]
    assert json.loads(kept[0][0])["messages"][-1]["role"] == "user"
    shown = capsys.readouterr().out
    assert "± " in shown
    assert "6 of 6 answers were cut, by --generator.max-tokens 16 or by the context" in shown
    for folder in (path.with_suffix("") for path in (tmp_path / "out").glob("*.jsonl")):
        [(_, kind, whole)] = recorded_files(folder)
        assert (kind, len(EpisodeFile(whole))) == ("evaluated", 6)
        assert EpisodeFile(whole)[0].episode.turns[0].messages[-1]["role"] == "user"
        assert read_run(folder).step == 0
        assert "eval/chain_sum/avg@1" in json.loads((folder / "metrics.jsonl").read_text())

    began = (tmp_path / "scores.json").read_text()
    asyncio.run(main(config))
    assert "finished before" in capsys.readouterr().out
    again = json.loads((tmp_path / "scores.json").read_text())
    assert again["models"] == json.loads(began)["models"]
    with pytest.raises(ConfigError, match="holds results with other settings"):
        asyncio.run(main(Config(models=("smollm2-135m",), out=tmp_path / "out", seed=3)))


def test_the_picture_of_a_comparison_shows_what_the_app_prints() -> None:
    """Of 20 tasks, of which the bundled model solves 6, and the checkpoint these and 9 more."""
    picture = Path("docs/pictures/tasks/evaluate.svg").read_text()
    picture_text = html.unescape(re.sub(r"<[^>]*>", "", picture)).replace("\xa0", " ")
    console = Console(width=100, file=io.StringIO())
    found = compare_paired([1.0] * 6 + [0.0] * 14, [1.0] * 15 + [0.0] * 5)
    print_comparisons(console, [("smollm2-135m", "sums", "train", found)])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if "".join(line.split()) not in "".join(picture_text.split())] == []
