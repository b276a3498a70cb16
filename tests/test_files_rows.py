"""Sources from files: lines, cells and columns become tasks, and bad rows are passed over."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from forge_rl.data.sources import Columns, TableSource, lines
from forge_rl.data.sources.files import open_tables
from forge_rl.errors import TaskError
from tests.test_files import KINDS, draw, questions, rows, source, write_csv, write_jsonl, write_parquet


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_long_lines_blank_lines_and_line_ends_make_no_difference(
    ending: str, tmp_path: Path, small_blocks: None
) -> None:
    lines = [json.dumps({"question": f"{n} {'long ' * (n % 7) * 50}"}) for n in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_bytes("﻿".encode() + ("\n\n" if not ending else ending + ending).join(lines).encode() + ending.encode())
    assert sorted(int(text.split()[0]) for text in questions(draw(source(path), 30))) == list(range(30))


@pytest.mark.parametrize("width", [50, 150, 300])
def test_lines_that_end_where_a_piece_that_is_read_ends_come_once(
    width: int, tmp_path: Path, small_blocks: None
) -> None:
    lines = [json.dumps({"question": f"{n:<{width - 17}}"}) for n in range(60)]
    assert {len(line) + 1 for line in lines} == {width}
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert sorted(int(text) for text in questions(draw(source(path), 60))) == list(range(60))


@pytest.mark.parametrize("name", ["a.jsonl", "c.csv"])
def test_a_row_without_end_is_one_bad_row_of_which_a_part_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = KINDS[name](tmp_path / name, [*rows(5), {**rows(1)[0], "question": "x" * 5000}, *rows(9)[5:]])
    monkeypatch.setattr(lines, "MOST_ROW_BYTES", 1000)
    assert len(set(questions(draw(source(path, bad=0.5), 9)))) == 9
    with pytest.raises(TaskError, match=r"the row has no end within 64 MiB: .{1,90}\n"):
        draw(source(path), 15)


def test_of_a_csv_without_line_breaks_no_more_than_a_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_ROW_BYTES", 1 << 17)
    (tmp_path / "a.csv").write_bytes(b"a" * (16 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TaskError, match="the first row cannot be read: the row has no end"):
            lines.DelimitedLines(tmp_path / "a.csv", tmp_path, ",")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_a_csv_may_have_line_breaks_quotes_and_commas_in_quotes(tmp_path: Path, small_blocks: None) -> None:
    texts = [f'{n}\n"quoted", and\r\n{"more, " * (n % 40)}"' for n in range(50)]
    path = write_csv(tmp_path / "a.csv", [{"question": text, "answer": "x"} for text in texts])
    assert sorted(questions(draw(source(path), 50))) == sorted(texts)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csvs_delimiter_is_guessed_and_json_in_cells_is_reached(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    meta = json.dumps({"ground": {"truth": "1;5, |"}}).replace('"', '""')
    path.write_text(f'question{delimiter}"a;b|c"{delimiter}meta\n"2;3, or 4?"{delimiter}x{delimiter}"{meta}"\n')
    columns = Columns(answer="meta.ground.truth")
    (task,) = draw(TableSource("a", open_tables([path], tmp_path), columns, seed=0, held_out_share=0), 1)
    assert task.messages[0]["content"] == "2;3, or 4?"
    assert task.truth["answer"] == "1;5, |"
    assert task.truth["a;b|c"] == "x"


def test_bad_rows_are_passed_over_and_counted_up_to_their_share(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows(100)]
    lines[17] = "{"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    table = source(path, bad=0.01)
    assert len(set(questions(draw(table, 99)))) == 99
    assert table.bad_rows == 1
    with pytest.raises(TaskError, match="line 18: the row is not JSON"):
        draw(source(path), 99)


# What of a row becomes what of a task.

SHOWN: list[tuple[Columns, Mapping[str, object], list[dict[str, object]], dict[str, object]]] = [
    (
        Columns(),
        {"question": "2+3?", "answer": "5", "n": 1},
        [{"role": "user", "content": "2+3?"}],
        {"answer": "5", "n": 1},
    ),
    (
        Columns(question="problem", answer="solution", system="Be brief.", instruction=" Think."),
        {"problem": "2+3?", "solution": "5"},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3? Think."}],
        {"solution": "5", "answer": "5"},
    ),
    (
        Columns(answer="reward_model.ground_truth"),
        {"prompt": [{"role": "user", "content": "2+3?", "name": None}], "reward_model": {"ground_truth": "5"}},
        [{"role": "user", "content": "2+3?"}],
        {"reward_model": {"ground_truth": "5"}, "answer": "5"},
    ),
    (
        Columns(instruction=" Think."),
        {"messages": '[{"role": "system", "content": "s"}, {"role": "user", "content": "2+3?"}]'},
        [{"role": "system", "content": "s"}, {"role": "user", "content": "2+3? Think."}],
        {},
    ),
    (Columns(), {"prompt": "2+3?"}, [{"role": "user", "content": "2+3?"}], {}),
    (
        Columns(),
        {"prompt": json.dumps([{"role": "user", "content": "2+3?"}], indent=1)},
        [{"role": "user", "content": "2+3?"}],
        {},
    ),
    (Columns(), {"prompt": "[ 2+3 ]"}, [{"role": "user", "content": "[ 2+3 ]"}], {}),
    (
        Columns(template="{{ a }} + {{ b }} = ?\n"),
        {"a": 2, "b": 3},
        [{"role": "user", "content": "2 + 3 = ?"}],
        {"a": 2, "b": 3},
    ),
    (
        Columns(
            template='{% block messages %}[{"role": "system", "content": "s"}, '
            '{"role": "user", "content": {{ a|tojson }}}]{% endblock %}'
        ),
        {"a": 'say "hi"'},
        [{"role": "system", "content": "s"}, {"role": "user", "content": 'say "hi"'}],
        {"a": 'say "hi"'},
    ),
]


@pytest.mark.parametrize(("columns", "row", "messages", "truth"), SHOWN)
def test_columns_become_messages_and_truth(
    columns: Columns, row: Mapping[str, object], messages: list[dict[str, object]], truth: dict[str, object]
) -> None:
    task = columns.read(row, "t")[0]
    assert [dict(message) for message in task.messages] == messages
    assert dict(task.truth) == truth


def test_tools_and_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    row = {"question": "2+3?", "tools": [tool], "uid": 7}
    for path in (write_jsonl(tmp_path / "a.jsonl", [row]), write_parquet(tmp_path / "a.parquet", [row])):
        task = source(path, columns=Columns(id="uid")).draw()
        assert (task.id, task.tools, dict(task.truth)) == ("7", (tool,), {"uid": 7})
    assert Columns(id="uid").read({"question": "?", "uid": "a\x1b[0m"}, "t")[0].id == r"a\x1b[0m"
    assert Columns(tools="schemas").read({"question": "?", "schemas": json.dumps([tool])}, "t")[0].tools == (tool,)


def test_a_template_cannot_reach_what_is_behind_its_row() -> None:
    with pytest.raises(Exception, match="unsafe"):
        Columns(template="{{ ''.__class__.__mro__ }}").read({"question": "?"}, "t")[0]


def test_rows_with_nested_fields_are_kept_as_they_are(tmp_path: Path) -> None:
    row = {"question": "?", "meta": {"a": [1, 2], "b": {"c": None, "d": "e"}}, "written": '{"c": 1}'}
    for path in (write_jsonl(tmp_path / "a.jsonl", [row]), write_parquet(tmp_path / "a.parquet", [row])):
        assert dict(source(path).draw().truth) == {"meta": row["meta"], "written": '{"c": 1}'}


# By flags.
