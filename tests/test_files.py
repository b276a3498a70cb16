"""Files of tasks: each kind gives the same tasks, every row once an epoch, and a stopped stream goes on exactly."""

import csv
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import Columns, Source, TableSource, lines
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


@pytest.mark.parametrize("name", KINDS)
def test_each_file_kind_gives_rows_once_an_epoch_and_resumes(name: str, tmp_path: Path, small_blocks: None) -> None:
    path = KINDS[name](tmp_path / name, rows(60))
    whole_table = source(path, seed=3)
    drawn, states = [], []
    for _ in range(130):
        states.append(json.loads(json.dumps(whole_table.state())))
        drawn.append(whole_table.draw())
    texts = questions(drawn)
    expected = questions([Columns().read(row, "t")[0] for row in rows(60)])
    assert sorted(texts[:60]) == sorted(texts[60:120]) == sorted(expected)
    assert texts[:60] != texts[60:120]
    assert [str(task.truth["answer"]) for task in drawn] == [str(int(text.split()[2]) + 1) for text in texts]
    assert int(whole_table.epoch) == 2
    for stopped in (0, 1, 13, 59, 60, 61, 100, 119, 129):
        resumed = source(path, seed=3)
        resumed.restore(states[stopped])
        assert [resumed.draw() for _ in range(130 - stopped)] == drawn[stopped:]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.feather"])
def test_a_compressed_file_is_copied_once_within_the_free_space(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = {"a.jsonl.gz": write_gz, "a.parquet": write_parquet, "a.feather": write_arrow_file}[name]
    path = write(tmp_path / name, rows(30))

    def copies() -> list[tuple[str, int]]:
        return sorted((entry.name, entry.stat().st_mtime_ns) for entry in (tmp_path / "cache").glob("[!.]*"))

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
    with pytest.raises(TaskError, match=r"the folder .*cache cannot be written: Not a directory"):
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


def test_a_pattern_may_choose_some_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (0, 2):
        write_jsonl(tmp_path / f"t-0000{n}-of-00004.jsonl", rows(3))
    monkeypatch.chdir(tmp_path)
    assert len(find_files("t-0000[02]-of-00004.jsonl")) == 2
    assert len(find_files("./t-00002-of-00004.jsonl")) == 1


def test_held_out_tasks_are_never_drawn_under_any_seed_or_wording(tmp_path: Path, small_blocks: None) -> None:
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
    instructed_tasks = source(shouted, share=0.2, columns=Columns(instruction=" Think.", system="Be brief.")).held_out(
        1000
    )
    assert {task.truth["answer"] for task in instructed_tasks} == {task.truth["answer"] for task in held_out}


def test_a_few_tasks_of_which_none_is_held_out_are_trained_on_all_the_same(tmp_path: Path) -> None:
    mixture = build(str(write_jsonl(tmp_path / "a.jsonl", rows(3))), held_out_share=1e-9)
    assert mixture.eval_sets(5) == {}
    assert len({mixture.draw_from("a").id for _ in range(3)}) == 3


def test_rows_of_one_problem_in_other_words_are_held_out_together(tmp_path: Path) -> None:
    file_rows = [{"question": f"{words} {n}", "n": n} for n in range(60) for words in ("What is", "Compute", "Give")]
    path = write_jsonl(tmp_path / "a.jsonl", file_rows)
    by_words, by_problem = (source(path, share=0.3, columns=Columns(problem=column)) for column in ("", "n"))
    assert {t.truth["n"] for t in by_words.held_out(500)} & {t.truth["n"] for t in draw(by_words, 100)}
    assert not {t.truth["n"] for t in by_problem.held_out(500)} & {t.truth["n"] for t in draw(by_problem, 150)}


def test_resuming_refuses_a_changed_file_but_not_a_moved_one(tmp_path: Path) -> None:
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
    table = source(write_jsonl(tmp_path / "a.jsonl", rows(30)))
    write_jsonl(tmp_path / "a.jsonl", rows(20))
    with pytest.raises(TaskError, match="changed while it was being read"):
        table.draw()


def build(*tasks: str, eval_tasks: tuple[str, ...] = (), **data: object) -> Mixture:
    return DataConfig(**data).build(tasks, seed=0, eval_tasks=eval_tasks)  # type: ignore[arg-type]


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
