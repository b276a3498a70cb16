"""Well-known benchmarks: rows in their true format become prompts, and right and wrong answers are scored."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from forge_rl.data.sources import hub
from forge_rl.errors import ConfigError, ForgeError, TaskError
from forge_rl.harness.benchmarks import BENCHMARKS, benchmark_source
from forge_rl.rewards.by_source import RewardBySource
from forge_rl.rewards.choice import chosen_letter
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.sandbox.inside.server import missing_layers
from forge_rl.sandbox.shared import default_profile
from forge_rl.types import Episode, Score, Task, ToolCall, Turn

GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, and half as many in May. How many in all?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nIn all, 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
MATH = {
    "problem": "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates.",
    "solution": "...",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
AIME = {"id": 60, "problem": "Find $m+n$.", "solution": "...", "answer": "033", "url": "u", "year": "2024"}
MMLU_PRO = {
    "question_id": 70,
    "question": "Typical advertising regulatory bodies suggest ...",
    "options": ["Safe practices, Fear", "Unsafe practices, Distress", "Safe practices, Wants"],
    "answer": "B",
    "answer_index": 1,
    "cot_content": "",
    "category": "business",
    "src": "ori_mmlu-business_ethics",
}
IFEVAL = {
    "key": 1000,
    "prompt": "Write a summary. Do not use any commas and highlight at least 1 section, as *this*.",
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:number_highlighted_sections"],
    "kwargs": [{"num_highlights": None}, {"num_highlights": 1, "relation": None}],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef double(n: List[int]) -> List[int]:\n    """ Double each.\n    """\n',
    "entry_point": "double",
    "canonical_solution": "    return [2 * each for each in n]\n",
    "test": "M = {}\n\ndef check(candidate):\n    assert candidate([1]) == [2]\n    assert candidate([]) == []\n",
}
MBPP = {
    "task_id": 11,
    "text": "Write a python function to remove first and last occurrence of a given character from the string.",
    "code": "...",
    "test_list": ['assert remove_Occ("hello","l") == "heo"', 'assert remove_Occ("abcda","a") == "bcd"'],
    "test_setup_code": "",
    "challenge_test_list": [],
}
BFCL = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "Find the area of a triangle with a base of 10 and height of 5."}]],
    "function": [
        {
            "name": "geometry.area",
            "description": "Calculate the area.",
            "parameters": {
                "type": "dict",
                "properties": {"base": {"type": "float"}, "height": {"type": "integer"}, "unit": {"type": "any"}},
                "required": ["base", "height"],
            },
        }
    ],
}
BFCL_ANSWER = {"id": "simple_0", "ground_truth": [{"geometry.area": {"base": [10], "height": [5], "unit": ["", "cm"]}}]}

CODE = "Here:\n```python\n{}\n```"
REMOVE = (
    "def remove_Occ(s, ch):\n    first, last = s.find(ch), s.rfind(ch)\n"
    "    return ''.join(c for at, c in enumerate(s) if at not in (first, last))"
)


def task_of(folder: Path, name: str, row: dict[str, Any]) -> Task:
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [task] = benchmark_source(f"{name}={path}").held_out(10)
    assert task.source == name
    return task


def score_of(name: str, task: Task, answer: str, calls: tuple[ToolCall, ...] = ()) -> float:
    """The score by the benchmark's reward, through the reward of several sources."""
    benchmark_reward = build_reward((BENCHMARKS[name].reward,))
    assert not isinstance(benchmark_reward, WeightedSum)
    reward = RewardBySource({name: benchmark_reward}, build_reward(("auto",)))  # type: ignore[arg-type]
    episode = Episode(task=task, turns=(Turn.unchecked(text=answer, calls=calls),))

    async def scored() -> Score:
        score = await reward(task, episode)
        assert isinstance(score, Score)
        return score

    return asyncio.run(scored()).total


@pytest.mark.parametrize(
    ("name", "row", "prompt", "right", "wrong"),
    [
        ("gsm8k", GSM8K, "Natalia sold", "24 + 48 = 72.", "So 24."),
        ("math-500", MATH, "\\boxed{}", "so \\boxed{(3, \\pi/2)}", "so \\boxed{(3, \\pi/3)}"),
        ("aime-2024", AIME, "Find $m+n$.", "so \\boxed{33}", "so \\boxed{34}"),
        (
            "mmlu-pro",
            MMLU_PRO,
            "B. Unsafe practices, Distress",
            "Not A: the answer is (B).",
            "The answer is (A).",
        ),
        ("ifeval", IFEVAL, "Do not use any commas", "A *short* one", "A *short*, one"),
    ],
)
def test_answers_are_scored_as_the_benchmark_defines(
    name: str, row: dict[str, Any], prompt: str, right: str, wrong: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, name, row)
    assert prompt in task.prompt
    assert "####" not in task.prompt, "the solution is not shown"
    assert (score_of(name, task, right), score_of(name, task, wrong)) == (1.0, 0.0)


@pytest.mark.skipif(bool(missing_layers(default_profile())), reason="the sandbox needs root here")
@pytest.mark.parametrize(
    ("name", "row", "prompt", "right", "wrong"),
    [
        (
            "humaneval",
            HUMANEVAL,
            "def double",
            HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"],
            "def double(numbers):\n    return numbers",
        ),
        ("mbpp", MBPP, 'assert remove_Occ("hello","l") == "heo"', REMOVE, "def remove_Occ(s, ch):\n    return s"),
    ],
)
def test_code_is_scored_in_the_sandbox(
    name: str, row: dict[str, Any], prompt: str, right: str, wrong: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, name, row)
    assert prompt in task.prompt
    assert "return [2" not in task.prompt
    assert (score_of(name, task, CODE.format(right)), score_of(name, task, CODE.format(wrong))) == (1.0, 0.0)


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(id="1", name=name, arguments=json.dumps(arguments))


def test_function_calls_are_compared_with_the_accepted_ones(tmp_path: Path) -> None:
    (tmp_path / "possible_answer").mkdir()
    (tmp_path / "possible_answer" / "bfcl.jsonl").write_text(json.dumps(BFCL_ANSWER) + "\n")
    task = task_of(tmp_path, "bfcl", BFCL)
    [tool] = task.tools
    function = tool["function"]
    assert isinstance(function, dict)
    assert function["name"] == "geometry_area"
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"] == {
        "base": {"type": "number"},
        "height": {"type": "integer"},
        "unit": {},
    }
    for model_calls, expected in (
        ([call("geometry_area", base=10, height=5)], 1.0),
        ([call("geometry_area", base=10.0, height=5, unit="CM.")], 1.0),
        ([call("geometry_area", base=10, height=5, unit="inches")], 0.0),
        ([call("geometry_area", base=10)], 0.0),
        ([call("geometry_area", base=10, height=5, depth=1)], 0.0),
        ([call("geometry_area", base="10", height=5)], 0.0),
        ([call("geometry_area", base=10, height=True)], 0.0),
        ([call("area", base=10, height=5)], 0.0),
        ([call("geometry_area", base=10, height=5)] * 2, 0.0),
        ([ToolCall(id="1", name="geometry_area", arguments="{" * 9999)], 0.0),
        ([], 0.0),
    ):
        assert score_of("bfcl", task, "", tuple(model_calls)) == expected, model_calls
    parallel = Task(
        id="p",
        source="bfcl",
        messages=(),
        truth={"ground_truth": [{"f": {"x": [1]}}, {"f": {"x": [[1, "A b"]]}}, {"g": {"o": [{"k": [1, ""]}]}}]},
    )
    calls = call("g", o={}), call("f", x=[1, "ab"]), call("f", x=1)
    assert score_of("bfcl", parallel, "", calls) == 1.0, "in any order"
    assert score_of("bfcl", parallel, "", (*calls[:2], call("f", x=2))) == 0.0
    assert score_of("bfcl", parallel, "", (*calls[:2], call("f", x=True))) == 0.0, "true is not 1"
    assert score_of("bfcl", parallel, "", (calls[0], call("f", x=[True, "ab"]), calls[2])) == 0.0, "nor in a list"
    truth = {"ground_truth": [{"f": {"x": [1, 2]}}, {"f": {"x": [1, 4]}}]}
    overlapping = Task(id="o", source="bfcl", messages=(), truth=truth)
    for first, second, total in ((1, 2, 1.0), (2, 1, 1.0), (1, 4, 1.0), (4, 2, 1.0), (2, 2, 0.0), (4, 4, 0.0)):
        assert score_of("bfcl", overlapping, "", (call("f", x=first), call("f", x=second))) == total, (first, second)
    rows = [{"field": ["age"], "value": ["25", 25]}, {"field": ["job"], "value": ["engineer"], "limit": [3, ""]}]
    where = {"table": ["user"], "where": [rows], "style": [{"font": [{"size": 3, "bold": True}]}]}
    nested = Task(id="n", source="bfcl", messages=(), truth={"ground_truth": [{"query": where}]})
    right = [{"field": "age", "value": 25}, {"field": "Job", "value": "engineer"}]
    style = {"font": {"size": 3, "bold": True}}
    for condition, font, total in (
        (right, style, 1.0),
        ([right[0], right[1] | {"limit": 3}], style, 1.0),
        (right[::-1], style, 0.0),
        (right[:1], style, 0.0),
        ([*right, right[0]], style, 0.0),
        ([right[0] | {"value": 26}, right[1]], style, 0.0),
        ([right[0] | {"limit": 3}, right[1]], style, 0.0),
        ([right[0], {"field": "job"}], style, 0.0),
        (rows, style, 0.0),
        (right, {"font": {"size": 3, "bold": 1}}, 0.0),
        (right, {"font": {"size": 3}}, 0.0),
        (right, {"font": [{"size": 3, "bold": True}]}, 0.0),
    ):
        calls_of_row = (call("query", table="user", where=condition, style=font),)
        assert score_of("bfcl", nested, "", calls_of_row) == total, (condition, font)
    nan = ToolCall(id="1", name="f", arguments='{"x": NaN}')
    assert score_of("bfcl", parallel, "", (*calls[:2], nan)) == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("**Answer: D**", "D"),
        ("the answer is **B**", "B"),
        ("first A, but finally \\boxed{J}", "J"),
        ("<answer>E</answer>", "E"),
        ("I would take F", "F"),
        ("no letter", ""),
        ("the answer is " * 50_000, ""),
    ],
)
def test_the_last_stated_letter_is_the_choice(text: str, letter: str) -> None:
    assert chosen_letter(text) == letter


def test_what_is_no_benchmark_or_has_other_rows_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GSM8K) + "\n" + json.dumps({"problem": "2+3?", "answer": "5"}) + "\n")
    with pytest.raises(TaskError, match=r"rows.jsonl, line 2: the row lacks question; it has problem, answer"):
        benchmark_source(f"gsm8k={path}").held_out(10)
    path.write_text(json.dumps(MMLU_PRO | {"options": "A"}) + "\n")
    with pytest.raises(TaskError, match=r"options.*not a list of 2 to 26 options"):
        benchmark_source(f"mmlu-pro={path}").held_out(10)
    path.write_text(json.dumps(BFCL | {"function": ["area"], "ground_truth": []}) + "\n")
    with pytest.raises(TaskError, match=r"function.*not a list of functions"):
        benchmark_source(f"bfcl={path}").held_out(10)
    with pytest.raises(ConfigError, match="gsm8k") as caught:
        benchmark_source("gsm8")
    assert "--benchmark list" in caught.value.hint

    def unreachable(name: str, **given: str) -> None:
        assert (name, given) == ("openai/gsm8k", {"config": "main", "split": "test", "revision": "abc"})
        raise TaskError("the hub cannot be reached", hint="check the network")

    monkeypatch.setattr(hub, "fetch", unreachable)
    with pytest.raises(TaskError, match="the hub cannot be reached") as error:
        benchmark_source("gsm8k@abc")
    assert "--benchmark gsm8k=FILE, with the columns question, answer" in error.value.hint


def test_rewards_of_sources_are_told_apart_and_groups_are_refused() -> None:
    with pytest.raises(ForgeError, match="needs the whole group"):
        RewardBySource({"a": build_reward(("diversity",))}, build_reward(("auto",)))  # type: ignore[dict-item,arg-type]
    reward = RewardBySource({}, build_reward(("unit_tests",)))  # type: ignore[arg-type]
    assert reward.deadline_s == 3600.0
    assert inspect.iscoroutinefunction(type(reward).__call__)
