"""A table of right answers and of wrong ones that differ in a character or two, and answers that solve nothing."""

from __future__ import annotations

import asyncio
import inspect
import random
from typing import Any

import pytest

from benchmarks.answers import CONSTANTS, Row, copies, is_true, misjudged, table
from forge_rl.data.sources import ReasoningGymSource
from forge_rl.errors import TaskError
from forge_rl.rewards import verifiers
from forge_rl.rewards.auto import Auto
from forge_rl.rewards.choice import Choice
from forge_rl.rewards.equality import equal
from forge_rl.rewards.extract import final_number
from forge_rl.rewards.kinds import kind_of
from forge_rl.rewards.maths import Maths
from forge_rl.rewards.quantities import read_quantity
from forge_rl.rewards.verifiers import verify
from forge_rl.types import Task


def asked(truth: object, question: str = "?") -> Task:
    return Task(id="t", source="s", messages=({"role": "user", "content": question},), truth={"answer": truth})


def scored(reward: Any, task: Task, text: str) -> float:
    async def score() -> float:
        result = reward(task, text)
        return float((await result if inspect.isawaitable(result) else result).total)

    return asyncio.run(score())


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return table()


async def test_no_wrong_answer_of_the_table_scores_and_every_right_one_does(rows: list[Row]):
    assert len(rows) >= 600
    assert sum(not row.right for row in rows) >= len(rows) // 2
    assert await misjudged(rows) == ([], [])


def test_the_kind_of_each_true_answer_of_the_table(rows: list[Row]):
    assert {(row.truth, kind_of(row.truth)) for row in rows} == {(row.truth, row.kind) for row in rows}


@pytest.mark.parametrize("reward", [Auto(), Maths()])
def test_a_copy_of_the_question_is_wrong_unless_the_truth_is_one(reward: Any):
    assert scored(reward, asked("12", "What is 84/7?"), r"\boxed{84/7}") == 0
    assert scored(reward, asked("12", "What is 84/7?"), r"\boxed{12}") == 1
    assert scored(reward, asked("x^2+2x+1", "Expand (x+1)^2."), r"\boxed{(x+1)^2}") == 0
    assert scored(reward, asked("x^2+2x+1", "Expand (x+1)^2."), r"\boxed{2x + x^2 + 1}") == 1
    assert scored(reward, asked("1/2", "Which is larger, 1/3 or 1/2?"), r"\boxed{1/2}") == 1


def test_percentages_are_units_in_auto_and_hundredths_in_math():
    for truth, text, auto, maths in (
        ("50", "50%", 1, 0),
        ("0.5", "50%", 1, 1),
        ("0.5", "0.5%", 0, 0),
        ("50%", "50", 0, 0),
    ):
        assert (scored(Auto(), asked(truth), text), scored(Maths(), asked(truth), text)) == (auto, maths)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("There are 5 apples and 3 pears, which makes 8 in all.", "8"),
        ("The answer is 5, not 6.", "5"),
        ("The answer is not 5.", None),
        ("It is 5, not 6", None),
        ("so $x = 2$.", "2"),
        ("so $x^2$", None),
        ("x_3", None),
        ("x = - 5", "-5"),
        ("2 - 9", None),
        ("1, 2, 3", None),
        ("the 3rd", None),
        ("f(5)", None),
    ],
)
def test_the_number_that_prose_ends_with(text: str, number: str | None):
    assert final_number(text) == number


def test_choices_that_are_no_options_are_the_tasks_fault():
    for truth in ("Paris", "27", 27, True, "AB"):
        with pytest.raises(TaskError, match="which is not an option"):
            Choice()(asked(truth), "B")
    with pytest.raises(TaskError, match="no answer to compare with"):
        Choice()(asked(float("nan")), "B")
    with pytest.raises(TaskError, match="which is not an option"):
        Choice(first=1)(asked(0), "A")


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "(" * 2000 + "x",
        "x" + "+x" * 2000,
        "\\frac{" * 300 + "1",
        "\\sqrt{" * 900 + "2" + "}" * 900,
        "1," * 900 + "1",
        "1e999999999",
        "9" * 1900,
        "5!!!!!!!!",
        "\\sin(9^{999})",
        "((((((1,2),3),4),5),6),7),8)",
        "\\{" * 500,
        "|" * 999,
        "-" * 1999,
        "\\begin{pmatrix}" * 60,
    ],
)
def test_hostile_formulas_are_bounded(text: str):
    # Where one took exponential time or memory, this test would not end.
    assert not equal("x+1", text)
    read_quantity(text)
    final_number(text * 100)
    kind_of(text)


def test_decimals_beyond_the_largest_double_are_compared():
    true = f"1{'0' * 320}.5"
    for answer, right in ((true, True), (f"1{'0' * 320}.6", False), (f"2{'0' * 320}.5", False), ("1.5", False)):
        assert scored(Maths(), asked(true), f"\\boxed{{{answer}}}") == right
    assert scored(Maths(), asked("0.1234567890123456"), f"\\boxed{{{true}}}") == 0


@pytest.mark.parametrize(
    ("text", "equal_text", "other_text"),
    [
        ("sin x cos x", r"\sin(x)\cos(x)", r"\sin(x\cos(x))"),
        ("sin xcos x", r"\sin x \operatorname{cos} x", r"\sin(x\cos(x))"),
        (r"\sin x \mathrm{cos} x", r"\cos(x)\sin(x)", r"\sin(x\cos(x))"),
        ("2 ln x exp(x)", r"2\ln(x)\exp(x)", r"2\ln(x\exp(x))"),
        ("sin 2x", r"\sin(2x)", r"x\sin(2)"),
        ("sin 2x cos 3x", r"\sin(2x)\cos(3x)", r"\sin(2x\cos(3x))"),
        ("sin x y", r"\sin(xy)", r"y\sin(x)"),
        (r"\cos 2\sqrt{3}x", r"\cos(2\sqrt{3}x)", r"\cos(2)\sqrt{3}x"),
        ("cos 2 sqrt(3) x", r"\cos(2\sqrt{3}x)", r"\cos(2)\sqrt{3}x"),
        (r"\cos x\sqrt{x}", r"\cos(x)\sqrt{x}", r"\cos(x\sqrt{x})"),
        ("cos x sqrt(x)", r"\cos(x)\sqrt{x}", r"\cos(x\sqrt{x})"),
    ],
)
def test_the_argument_of_a_function_without_brackets_ends_before_the_next_function(
    text: str, equal_text: str, other_text: str
):
    assert equal(text, equal_text)
    assert equal(equal_text, text)
    assert not equal(text, other_text)
    assert not equal(other_text, text)


def test_random_text_of_signs_is_read_or_refused():
    signs, drawn = "0159xye+-*/^=()[]{},.:!%|\\ $<>", random.Random(0)
    for _ in range(2000):
        text = "".join(
            drawn.choices([*signs, "\\frac", "\\sqrt", "\\{", "\\}", "\\pm", " or "], k=drawn.randrange(1, 16))
        )
        kind_of(text)
        final_number(text)
        equal("x+1", text)


@pytest.mark.parametrize(
    "dataset", ["coin_flip", "complex_arithmetic", "countdown", "puzzle24", "game_of_life_halting", "boxnet"]
)
def test_constants_and_copies_solve_no_tasks_of_reasoning_gym(dataset: str):
    assert len(set(CONSTANTS)) == 40
    source = ReasoningGymSource(dataset, {}, 3, 0.1)
    for task in (source.draw() for _ in range(6)):
        entry = task.truth["entry"]
        assert isinstance(entry, dict)
        for answer in (*CONSTANTS, *(text for _, text in copies(task))):
            score = verify(dataset, {}, entry, answer)
            assert isinstance(score, float), "the answer is at fault, and not the task"
            assert score < 1 or is_true(answer, entry), answer


def test_a_verifier_that_gives_nan_gives_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifiers, "_verifier", lambda *settings: lambda answer, entry: float("nan"))
    assert verify("chain_sum", {}, {"answer": "5", "metadata": {}}, "nan") == 0


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ("propositional_logic", "any premise, copied from the question, is a valid conclusion"),
        ("composite", "unguarded"),
        ("string_insertion", r"in \d+ of 100 tasks the answer is the question's own string"),
    ],
)
def test_data_sets_that_copies_solve_are_refused_with_the_reason(dataset: str, reason: str):
    with pytest.raises(TaskError, match=reason):
        ReasoningGymSource(dataset, {}, 0, 0.1)
    longer = {"min_string_length": 200, "max_string_length": 300}
    assert ReasoningGymSource("string_insertion", longer, 0, 0.1).draw().source == "string_insertion"
