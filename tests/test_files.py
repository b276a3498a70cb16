"""Files of tasks: each kind gives the same tasks, every row once an epoch, and a stopped stream goes on exactly."""

import csv
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.data.mixture import Mixture, as_mixture
from forge_rl.data.sources import Columns, IterableSource, Source, TableSource, hub, lines
from forge_rl.data.sources.files import find_files, open_tables
from forge_rl.data.sources.order import key_of, permuted
from forge_rl.errors import TaskError
from forge_rl.types import Task

Rows = list[dict[str, object]]


def rows(count: int) -> Rows:
    return [
        {"question": f"What is {n} + 1?\nThink of «{n}».", "answer": str(n + 1), "level": n % 3} for n in range(count)
    ]


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: Rows, delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def write_arrow_file(path: Path, rows: Rows) -> Path:
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path, chunksize=7)
    return path


def write_arrow_stream(path: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    return path


def write_gz(path: Path, rows: Rows) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def write_zst(path: Path, rows: Rows) -> Path:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write("\n".join(json.dumps(row) for row in rows).encode())
    return path


def write_array(path: Path, rows: Rows) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


KINDS: dict[str, Callable[[Path, Rows], Path]] = {
    "a.jsonl": write_jsonl,
    "b.ndjson": write_jsonl,
    "c.csv": write_csv,
    "d.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "e.parquet": write_parquet,
    "f.arrow": write_arrow_file,
    "g.arrow": write_arrow_stream,
    "h.feather": write_arrow_file,
    "i.jsonl.gz": write_gz,
    "j.jsonl.zst": write_zst,
    "k.json": write_array,
    "l.json": write_jsonl,
}


def source(
    *paths: Path, seed: int = 0, share: float = 0.0, columns: Columns | None = None, bad: float = 0.0
) -> TableSource:
    tables = open_tables(paths, paths[0].parent / "cache")
    return TableSource("t", tables, columns or Columns(), seed=seed, held_out_share=share, max_bad_rows=bad)


def questions(tasks: list[Task] | tuple[Task, ...]) -> list[str]:
    return [str(task.messages[-1]["content"]) for task in tasks]


def draw(source: Source, count: int) -> list[Task]:
    return [source.draw() for _ in range(count)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read a few lines at a time, copied in small batches, and their indexes are kept in the cache."""
    monkeypatch.setattr("forge_rl.data.sources.lines._READ_BYTES", 150)
    monkeypatch.setattr("forge_rl.data.sources.lines.INDEXED_BYTES", 1)
    monkeypatch.setattr("forge_rl.data.sources.derived._READ_BYTES", 600)
    monkeypatch.setattr("forge_rl.data.sources.columnar._COPIED_BYTES", 200)
    monkeypatch.setattr("forge_rl.data.sources.columnar._ROWS_AT_ONCE", 3)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_gives_every_row_once_an_epoch_and_goes_on_exactly_wherever_it_stopped(
    name: str, tmp_path: Path, small_blocks: None
) -> None:
    path = KINDS[name](tmp_path / name, rows(60))
    whole = source(path, seed=3)
    drawn, states = [], []
    for _ in range(130):
        states.append(json.loads(json.dumps(whole.state())))
        drawn.append(whole.draw())
    texts = questions(drawn)
    expected = questions([Columns().read(row, "t")[0] for row in rows(60)])
    assert sorted(texts[:60]) == sorted(texts[60:120]) == sorted(expected)
    assert texts[:60] != texts[60:120]
    assert [str(task.truth["answer"]) for task in drawn] == [str(int(text.split()[2]) + 1) for text in texts]
    assert int(whole.epoch) == 2
    for stopped in (0, 1, 13, 59, 60, 61, 100, 119, 129):
        resumed = source(path, seed=3)
        resumed.restore(states[stopped])
        assert [resumed.draw() for _ in range(130 - stopped)] == drawn[stopped:]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.feather"])
def test_a_compressed_file_is_copied_once_until_it_changes_and_within_the_free_space(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = {"a.jsonl.gz": write_gz, "a.parquet": write_parquet, "a.feather": write_arrow_file}[name]
    path = write(tmp_path / name, rows(30))

    def copies() -> list[tuple[str, int]]:
        return sorted((each.name, each.stat().st_mtime_ns) for each in (tmp_path / "cache").glob("[!.]*"))

    assert len(set(questions(draw(source(path), 30)))) == 30
    (first,) = copies()
    assert questions(draw(source(path), 30))
    assert copies() == [first]
    write(path, rows(50))
    assert len(set(questions(draw(source(path), 50)))) == 50
    assert len(copies()) == 2
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    write(path, rows(60))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=200))
    with pytest.raises(TaskError, match=r"the copy of .* takes more than half of the free space in .*cache"):
        source(path)
    assert len(copies()) == 2


def test_a_cache_that_cannot_be_written_is_an_error_for_copies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_rl.data.sources.lines.INDEXED_BYTES", 1)
    (tmp_path / "cache").write_text("no folder")
    assert len(draw(source(write_jsonl(tmp_path / "a.jsonl", rows(5))), 5)) == 5
    with pytest.raises(TaskError, match=r"cannot write a copy of .*gz to .*cache"):
        source(write_gz(tmp_path / "a.jsonl.gz", rows(5)))


def test_several_files_are_one_source_in_an_order_that_mixes_them(tmp_path: Path, small_blocks: None) -> None:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", rows(40)[n * 20 : n * 20 + 20]) for n in range(2)]
    first = [int(text.split()[2]) for text in questions(draw(source(*paths), 40))]
    assert sorted(first) == list(range(40))
    assert first != questions(draw(source(*paths, seed=1), 40))
    assert 5 < sum(n < 20 for n in first[:20]) < 15


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000])
def test_the_order_of_rows_is_a_permutation_that_its_key_chooses(size: int) -> None:
    orders = [[permuted(place, size, key_of(seed, 0)) for place in range(size)] for seed in range(2)]
    assert sorted(orders[0]) == list(range(size))
    assert (orders[0] != orders[1]) is (size > 2) or size <= 5


def test_the_order_is_the_same_in_every_process_and_version() -> None:
    assert [permuted(place, 10, 1) for place in range(10)] == PERMUTED


PERMUTED = [0, 1, 2, 9, 7, 3, 5, 8, 4, 6]


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


def test_a_csv_may_have_line_breaks_quotes_and_commas_in_quotes(tmp_path: Path, small_blocks: None) -> None:
    texts = [f'{n}\n"quoted", and\r\n{"more, " * (n % 40)}"' for n in range(50)]
    path = write_csv(tmp_path / "a.csv", [{"question": text, "answer": ""} for text in texts])
    assert sorted(questions(draw(source(path), 50))) == sorted(texts)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_csv_is_guessed_and_json_in_its_cells_is_reached(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    meta = json.dumps({"ground": {"truth": "1;5, |"}}).replace('"', '""')
    path.write_text(f'question{delimiter}"a;b|c"{delimiter}meta\n"2;3, or 4?"{delimiter}x{delimiter}"{meta}"\n')
    columns = Columns(answer="meta.ground.truth")
    (task,) = draw(TableSource("a", open_tables([path], tmp_path), columns, seed=0, held_out_share=0), 1)
    assert task.messages[0]["content"] == "2;3, or 4?"
    assert task.truth["answer"] == "1;5, |"
    assert task.truth["a;b|c"] == "x"


def test_a_pattern_may_choose_some_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (0, 2):
        write_jsonl(tmp_path / f"t-0000{n}-of-00004.jsonl", rows(3))
    monkeypatch.chdir(tmp_path)
    assert len(find_files("t-0000[02]-of-00004.jsonl")) == 2
    assert len(find_files("./t-00002-of-00004.jsonl")) == 1


def test_held_out_tasks_are_never_drawn_are_the_same_for_every_seed_and_in_every_wording(
    tmp_path: Path, small_blocks: None
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(200))
    held_out = source(path, share=0.2).held_out(1000)
    assert 20 <= len(held_out) <= 60
    assert held_out == source(path, seed=5, share=0.2).held_out(1000)
    assert source(path, share=0.2).held_out(7) == held_out[:7]
    drawn = draw(source(path, share=0.2), 300)
    assert not set(questions(drawn)) & set(questions(held_out))
    shouted = write_jsonl(
        tmp_path / "b.jsonl", [{**row, "question": f"  {str(row['question']).upper()}"} for row in rows(200)]
    )
    asked = source(shouted, share=0.2, columns=Columns(instruction=" Think.", system="Be brief.")).held_out(1000)
    assert {task.truth["answer"] for task in asked} == {task.truth["answer"] for task in held_out}


def test_a_few_tasks_of_which_none_is_held_out_are_trained_on_all_the_same(tmp_path: Path) -> None:
    mixture = build(str(write_jsonl(tmp_path / "a.jsonl", rows(3))), held_out_share=1e-9)
    assert mixture.eval_sets(5) == {}
    assert len({mixture.draw_from("a").id for _ in range(3)}) == 3


def test_rows_of_one_problem_in_other_words_are_held_out_together(tmp_path: Path) -> None:
    found = [{"question": f"{words} {n}", "n": n} for n in range(60) for words in ("What is", "Compute", "Give")]
    path = write_jsonl(tmp_path / "a.jsonl", found)
    by_words, by_problem = (source(path, share=0.3, columns=Columns(problem=column)) for column in ("", "n"))
    assert {t.truth["n"] for t in by_words.held_out(500)} & {t.truth["n"] for t in draw(by_words, 100)}
    assert not {t.truth["n"] for t in by_problem.held_out(500)} & {t.truth["n"] for t in draw(by_problem, 150)}


def test_a_file_that_changed_is_refused_on_resuming_and_one_that_moved_is_not(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(30))
    state = source(path).state()
    moved = path.rename(tmp_path / "b.jsonl")
    source(moved).restore(state)
    text = moved.read_text()
    moved.write_text(text.replace("What is 3 ", "What is 9 "))
    with pytest.raises(TaskError, match="have changed since the run was saved: their contents differ"):
        source(moved).restore(state)
    moved.write_text(text + text)
    with pytest.raises(TaskError, match=r"there were 1 with [\d,]+ bytes, there are 1 with .*\n.*restore the old"):
        source(moved).restore(state)
    with pytest.raises(TaskError, match=r"there were 1 with .* bytes, there are 2 with"):
        source(moved, moved).restore(state)


def test_the_state_of_another_seed_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(TaskError, match=r"has seed 0, held_out_share 0\.0, this one seed 1"):
        source(path, seed=1).restore(source(path).state())


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    found = source(write_jsonl(tmp_path / "a.jsonl", rows(30)))
    write_jsonl(tmp_path / "a.jsonl", rows(20))
    with pytest.raises(TaskError, match="changed while it was being read"):
        found.draw()


def test_bad_rows_are_passed_over_and_counted_up_to_their_share(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows(100)]
    lines[17] = "{"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    found = source(path, bad=0.01)
    assert len(set(questions(draw(found, 99)))) == 99
    assert found.bad_rows == 1
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


def build(*tasks: str, eval_tasks: tuple[str, ...] = (), **data: object) -> Mixture:
    return DataConfig(**data).build(tasks, seed=0, eval_tasks=eval_tasks)  # type: ignore[arg-type]


def test_files_and_generated_tasks_make_a_mixture_and_only_the_generated_ask_for_a_number(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"problem": f"{n}?", "solution": n} for n in range(50)])
    mixture = build(f"{path}:question=problem,answer=solution*0.7", "chain_sum*0.3")
    assert mixture.shares == {"train": 0.7, "chain_sum": 0.3}
    task = mixture.draw_from("train")
    assert task.source == "train"
    assert str(task.messages[0]["content"]) == f"{task.truth['answer']}?"
    assert str(mixture.draw_from("chain_sum").messages[-1]["content"]).endswith(" Answer with a number.")
    assert {task.source for task in mixture.held_out(10)} == {"train", "chain_sum"}


def test_patterns_folders_and_named_tasks_are_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for n in range(2):
        write_jsonl(tmp_path / "data" / f"part-{n}.jsonl", rows(6)[n * 3 : n * 3 + 3])
    monkeypatch.chdir(tmp_path)
    for named, name in (
        ("data/*.jsonl*0.5", "data"),
        ("data*2", "data"),
        ("sums=data/*.jsonl", "sums"),
        ("./data", "data"),
    ):
        mixture = build(named, held_out_share=0.01) if "/" in named else build("./" + named, held_out_share=0.01)
        assert list(mixture) == [name]
        assert len({mixture.draw_from(name).id for _ in range(6)}) == 6


def test_a_plain_name_is_a_data_set_before_it_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chain_sum", "mine"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "a.jsonl", rows(20))
    monkeypatch.chdir(tmp_path)
    mixture = build("chain_sum", "mine")
    assert "entry" in mixture.draw_from("chain_sum").truth
    assert "entry" not in mixture.draw_from("mine").truth


def test_a_folder_that_datasets_wrote_is_read_split_by_split(tmp_path: Path) -> None:
    import datasets

    half = datasets.Dataset.from_list(rows(20))
    datasets.DatasetDict({"train": half, "test": half.select(range(5))}).save_to_disk(str(tmp_path / "saved"))
    paths = find_files(str(tmp_path / "saved"), split="test")
    assert len(set(questions(draw(source(*paths), 5)))) == 5
    assert len(list(source(*find_files(str(tmp_path / "saved" / "train"))).held_out(0))) == 0


def test_a_set_for_evaluation_has_a_name_and_takes_the_place_of_a_held_out_share(tmp_path: Path) -> None:
    train, test = (
        write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("train", rows(40)), ("test", rows(50)[40:]))
    )
    assert list(build(str(train)).eval_sets(5)) == ["held_out"]
    sets = build(str(train), eval_tasks=(f"maths={test}:answer=answer", "chain=chain_sum:max_terms=3")).eval_sets(20)
    assert {name: len(tasks) for name, tasks in sets.items()} == {"maths": 10, "chain": 20}
    mixture = build(str(train), eval_tasks=(str(test),))
    assert len({mixture.draw_from("train").id for _ in range(40)}) == 40
    assert list(mixture.eval_sets(5)) == ["test"]
    assert mixture.eval_sets(0) == {}
    assert list(build(str(train), eval_tasks=(str(test),), held_out_share=0.3).eval_sets(5)) == ["held_out", "test"]


def test_a_hub_id_is_read_from_the_files_that_datasets_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes a folder of that name for the data set: no network is needed."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    write_jsonl(tmp_path / "org" / "name" / "train.jsonl", rows(30))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for split, count in (("train", 30), ("train[:7]", 7)):
        found = TableSource("t", [hub.fetch("org/name", split=split)], Columns(), seed=0, held_out_share=0.0)
        expected = questions([Columns().read(row, "t")[0] for row in rows(count)])
        assert sorted(questions(draw(found, count))) == sorted(expected)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no route"), "cannot get the data set 'org/nothing' from the hub: the hub cannot be reached"),
        (ValueError("Unknown split 'dev'"), r"from the hub: Unknown split 'dev'\n.*:config=NAME,split=NAME"),
    ],
)
def test_a_hub_id_that_cannot_be_had_is_an_error(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(TaskError, match=said):
        build("org/nothing:config=main,split=dev")


# Iterables.


def generated() -> list[dict[str, object]]:
    return rows(30)


ITERABLES: dict[str, Callable[[], object]] = {
    "list": lambda: rows(30),
    "function of a list": lambda: generated,
    "generator function": lambda: lambda: (row for row in rows(30)),
    "tasks": lambda: [Task(id=str(n), source="x", messages=({"role": "user", "content": f"{n}?"},)) for n in range(30)],
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_an_iterable_is_a_source_that_begins_again_and_goes_on_where_it_stopped(kind: str) -> None:
    def made() -> IterableSource:
        return IterableSource("mine", ITERABLES[kind](), seed=1)  # type: ignore[arg-type]

    whole = made()
    held_out = whole.held_out(30)
    drawn, states = [], []
    for _ in range(80):
        states.append(json.loads(json.dumps(whole.state())))
        drawn.append(whole.draw())
    counts = Counter(task.id for task in drawn)
    assert len(counts) + len(held_out) == 30
    assert not counts.keys() & {task.id for task in held_out}
    assert {task.source for task in (*drawn, *held_out)} == {"mine"}
    assert whole.epoch >= 2
    for stopped in (0, 5, 40, 79):
        resumed = made()
        resumed.restore(states[stopped])
        assert [resumed.draw() for _ in range(80 - stopped)] == drawn[stopped:]


def test_a_bare_iterator_goes_on_until_it_ends() -> None:
    first = IterableSource("mine", iter(rows(10)))
    drawn = draw(first, 4)
    state = first.state()
    assert first.held_out(5) == ()
    resumed = IterableSource("mine", iter(rows(10)))
    resumed.restore(state)
    assert resumed.draw() == first.draw()
    assert len(drawn) == 4
    with pytest.raises(TaskError, match=r"is at item .* and cannot go back"):
        first.restore(IterableSource("mine", iter(rows(10))).state())
    with pytest.raises(TaskError, match="ended after 10 items"):
        draw(first, 10)


def test_a_python_file_gives_tasks_by_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def sums():\n    for n in range(50):\n        yield {'asked': f'{n} + 1?', 'answer': n + 1}\n")
    mixture = build(f"{path}:sums:question=asked*0.5", "chain_sum")
    assert mixture.shares["sums"] == pytest.approx(1 / 3)
    assert mixture.draw_from("sums").messages[0]["content"] == "0 + 1?"
    assert (
        len(
            build(
                str(tmp_path / "mine.py") + ":sums:question=asked", eval_tasks=(f"own={path}:sums:question=asked",)
            ).eval_sets(100)["own"]
        )
        == 50
    )


def test_a_mixture_is_made_of_whatever_gives_tasks() -> None:
    own = IterableSource("own", rows(5))
    assert as_mixture(Mixture({"a": own}), seed=0).shares == {"a": 1.0}
    assert list(as_mixture(own, seed=0)) == ["own"]
    assert list(as_mixture(rows(5), seed=0)) == ["tasks"]
    assert list(as_mixture({"a": rows(5), "b": own, "c": generated}, seed=0)) == ["a", "b", "c"]
    assert as_mixture(generated, seed=0).draw_from("tasks").source == "tasks"


def test_memory_holds_the_index_and_one_row(tmp_path: Path) -> None:
    """Reads a file of 30 MB with less than 20 MB more: measured in a process of its own."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for n in range(30_000):
            file.write(json.dumps({"question": f"{n} {'x' * 950}"}) + "\n")
    program = (
        "import resource, sys; from pathlib import Path; from forge_rl.data.data_config import DataConfig\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = most(); m = DataConfig().build(sys.argv[1:], seed=0)\n"
        "for _ in range(27_000): m.draw_from('a')\n"
        "print(most() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000_000
    assert lines.INDEXED_BYTES > 30_000_000, "the index is in memory"
