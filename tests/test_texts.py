"""Texts of flags: one grammar for tasks, rewards and environments, with errors that mark the place."""

from __future__ import annotations

import pytest

from forge_rl.errors import ConfigError, TaskError
from forge_rl.flags.texts import FlagText, names_code, parse

BUNDLED = ("auto", "regex", "number", "adapter", "tools")


def of_tasks(text: str) -> FlagText:
    return parse(text, "--tasks", error=TaskError)


def of_reward(text: str) -> FlagText:
    return parse(text, "--reward", bundled=BUNDLED)


def of_env(text: str) -> FlagText:
    return parse(text, "--env", bundled=BUNDLED, takes_argument=True, takes_weight=False)


@pytest.mark.parametrize(
    ("text", "title", "name", "raw_params", "weight"),
    [
        ("leg_counting", "", "leg_counting", {}, 1),
        ("chain_sum:min_terms=2,max_terms=3*0.5", "", "chain_sum", {"min_terms": "2", "max_terms": "3"}, 0.5),
        ("data/*.jsonl*0.5", "", "data/*.jsonl", {}, 0.5),
        ("data/*.jsonl", "", "data/*.jsonl", {}, 1),
        ("data/*", "", "data/*", {}, 1),
        ("data/**/*.parquet:question=a b*2", "", "data/**/*.parquet", {"question": "a b"}, 2),
        ("data/part*1*1", "", "data/part*1", {}, 1),
        (
            "a.jsonl:question=problem,answer=meta.truth*.25",
            "",
            "a.jsonl",
            {"question": "problem", "answer": "meta.truth"},
            0.25,
        ),
        ("/logs/12:30/a.jsonl:question=q", "", "/logs/12:30/a.jsonl", {"question": "q"}, 1),
        ("/logs/12:30/a.jsonl", "", "/logs/12:30/a.jsonl", {}, 1),
        ("maths=data/test.jsonl:question=q", "maths", "data/test.jsonl", {"question": "q"}, 1),
        ("chain=chain_sum:max_terms=3*0.5", "chain", "chain_sum", {"max_terms": "3"}, 0.5),
        ("./day=1/a.jsonl", "", "./day=1/a.jsonl", {}, 1),
        ("openai/gsm8k:config=main,split=train", "", "openai/gsm8k", {"config": "main", "split": "train"}, 1),
        ("a.csv:question=1,answer=true", "", "a.csv", {"question": "1", "answer": "true"}, 1),
        ("chain_sum:max_terms=3", "", "chain_sum", {"max_terms": "3"}, 1),
        ("mine.py:tasks:question=q*2", "", "mine.py:tasks", {"question": "q"}, 2),
        ("x=../a b/mine.py:make.tasks", "x", "../a b/mine.py:make.tasks", {}, 1),
    ],
)
def test_texts_of_tasks(text: str, title: str, name: str, raw_params: dict[str, str], weight: float) -> None:
    spec = of_tasks(text)
    assert (spec.title, spec.name, spec.raw_params, spec.weight) == (title, name, raw_params, weight)
    assert spec.is_code == (".py" in text)


@pytest.mark.parametrize(
    ("text", "name", "raw_params", "weight"),
    [
        ("auto=0.5", "auto", {}, 0.5),
        ("auto*-0.5", "auto", {}, -0.5),
        ("mine:score=2", "mine:score", {}, 2),
        ("mine.py:A.score*2", "mine.py:A.score", {}, 2),
        ("number:tolerance=0.5", "number", {"tolerance": "0.5"}, 1),
        ("regex:pattern=^it.*5$", "regex", {"pattern": "^it.*5$"}, 1),
        ("regex:pattern='it, is|5*5'*2", "regex", {"pattern": "it, is|5*5"}, 2),
        ("regex:pattern=(", "regex", {"pattern": "("}, 1),
        ("number:key=", "number", {"key": ""}, 1),
        ("style=mine.py:score*0.5", "mine.py:score", {}, 0.5),
    ],
)
def test_texts_of_rewards(text: str, name: str, raw_params: dict[str, str], weight: float) -> None:
    spec = of_reward(text)
    assert (spec.name, spec.raw_params, spec.weight) == (name, raw_params, weight)
    assert spec.is_code == (":" in name)
    assert spec.title == ("style" if text.startswith("style") else "")


def test_texts_of_environments() -> None:
    spec = of_env("adapter:http://localhost:1/a?b=c,sessions=4,deep=true,names=[1,2],text=a b")
    assert (spec.name, spec.argument) == ("adapter", "http://localhost:1/a?b=c")
    assert spec.params == {"sessions": 4, "deep": True, "names": [1, 2], "text": "a b"}
    assert of_env("tools:text=2*3").params == {"text": "2*3"}, "an environment has no weight"
    assert of_env("./mine.py:World,rooms=3") == FlagText(name="./mine.py:World", params={"rooms": 3}, is_code=True)


def test_values_are_read() -> None:
    for listed in ('["+","*"]', "['+', '*']", "[+,*]"):
        spec = of_tasks(f"basic_arithmetic:operators={listed},allow_negation=false,format_style=natural,most=none*2")
        assert spec.params == {
            "operators": ["+", "*"],
            "allow_negation": False,
            "format_style": "natural",
            "most": None,
        }
        assert spec.weight == 2
    assert of_tasks('basic_arithmetic:operators=["*"]').weight == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain_sum*x", "--tasks: the weight 'x' is not a finite number\n  chain_sum*x\n            ^\n"),
        ("chain_sum*", "--tasks: the weight '' is not a finite number\n  chain_sum*\n            ^\n"),
        ("a.jsonl*nan", "--tasks: the weight 'nan' is not a finite number\n  a.jsonl*nan\n          ^^^\n"),
        ("chain_sum=inf", "--tasks: the weight 'inf' is not a finite number\n  chain_sum=inf\n            ^^^\n"),
        ("chain_sum:a=1,terms", "--tasks: 'terms' is not KEY=VALUE\n  chain_sum:a=1,terms\n                ^^^^^\n"),
        ("x=chain_sum:a=1,a=2", "--tasks: 'a' is given twice\n  x=chain_sum:a=1,a=2\n                  ^^^\n"),
        (":a=1", "--tasks: there is no name\n  :a=1\n  ^\n"),
    ],
)
def test_an_error_marks_the_place(text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        of_tasks(text)
    assert str(caught.value) == f"{message}  hint: write NAME:KEY=VALUE,KEY=VALUE*WEIGHT"


@pytest.mark.parametrize("text", ["mine.py:score=x", "auto=nan", "auto*", "mine:score*y"])
def test_a_weight_of_a_reward_is_a_finite_number(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a finite number"):
        of_reward(text)


def test_texts_that_name_code_are_told_from_other_names() -> None:
    assert all(map(names_code, ("mine.py:score", "a.b:C", "/x/y.py:A.score")))
    assert not any(map(names_code, ("math", "regex:pattern=a:b", "judge:", ":x")))
