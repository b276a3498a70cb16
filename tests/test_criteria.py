"""Rubrics that come with tasks: read as they are meant, and refused with a reason if they are not."""

from __future__ import annotations

import json

import pytest

from forge_rl.criteria import Criterion, read_criteria
from forge_rl.data.sources.rows import Columns
from forge_rl.data.sources.tables import RowError

GOOD = {"criterion": "Names it.", "weight": 2}


def test_a_rubric_is_a_list_or_json_of_one():
    expected = (Criterion("Names it.", 2.0), Criterion("Is rude.", -0.5))
    criteria = [{**GOOD, "tags": ["axis"]}, {"criterion": "Is rude.", "weight": -0.5}]
    assert read_criteria(criteria) == read_criteria(tuple(criteria)) == read_criteria(json.dumps(criteria)) == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "is a NoneType, not a list"),
        ({"criterion": "Names it.", "weight": 1}, "is a dict, not a list"),
        ("be kind", "is text, but not a list in JSON"),
        ("[" * 100_000, "is text, but not a list in JSON"),
        ("[" + "9" * 5000 + "]", "is text, but not a list in JSON"),
        ("3", "is a int, not a list"),
        (" " * 500_001, "500,001 letters, more than 500,000"),
        ([], "has 0 criteria"),
        ([GOOD] * 65, "has 65 criteria, not 1 to 64"),
        ([GOOD, "Names it."], "a criterion 2 that is a str, not a mapping"),
        ([GOOD, {"text": "Names it.", "weight": 1}], "a criterion 2 without text in 'criterion'"),
        ([{"criterion": " \n", "weight": 1}], "a criterion 1 without text"),
        ([{"criterion": ["Names it."], "weight": 1}], "a criterion 1 without text"),
        ([{"criterion": "x" * 4001, "weight": 1}], "a criterion 1 of 4,001 letters, more than 4,000"),
        ([{"criterion": "Names it."}], "a criterion 1 without a number in 'weight'"),
        ([{"criterion": "Names it.", "weight": "2"}], "without a number in 'weight'"),
        ([{"criterion": "Names it.", "weight": True}], "without a number in 'weight'"),
        *(
            ([{"criterion": "Names it.", "weight": weight}], "whose weight is 0, or not from -1e6 to 1e6")
            for weight in (0, float("nan"), float("-inf"), 10**400, 1e7)
        ),
        ([{"criterion": "Is rude.", "weight": -1}], "no criterion with a weight above 0"),
    ],
)
def test_a_rubric_that_cannot_be_is_refused_with_the_reason(value: object, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_criteria(value)


def test_the_column_of_a_rubric_is_checked_as_its_row_is_read():
    columns = Columns(question="question", rubric="points")
    task, _ = columns.read({"question": "?", "points": json.dumps([GOOD])}, "s")
    assert task.truth["rubric"] == [{"criterion": "Names it.", "weight": 2.0}]
    with pytest.raises(RowError, match="column 'points' has 0 criteria"):
        columns.read({"question": "?", "points": []}, "s")
    with pytest.raises(RowError, match="column 'points' is missing"):
        columns.read({"question": "?"}, "s")
    task, _ = Columns().read({"question": "?", "rubric": "be kind"}, "s")
    assert task.truth["rubric"] == "be kind"
