"""Walks through the files: what a trace counts, the smallest walk as it is, and the form of the page."""

import re
import zlib
from pathlib import Path

import pytest

from tools.walk_hook.sitecustomize import ENTRY
from tools.walks import PACKAGE, PAGE, TABLE, TITLES, Trace, Walk, row, table, trace_cells, walk


def line_of(file: str, function: str) -> int:
    """The line of a function's only definition of this name in a file."""
    lines = (PACKAGE / file).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if re.match(rf" *(async )?def {function}\(", text))
    return line


def write_trace(folder: Path, process: str, *entries: tuple[float, str, str]) -> None:
    """Write a process's entries as it does: times, files, and functions."""
    folder.mkdir(exist_ok=True)
    packed = [ENTRY.pack(time_s, zlib.crc32(file.encode()), line_of(file, name)) for time_s, file, name in entries]
    (folder / process).write_bytes(b"".join(packed) + bytes(ENTRY.size))


def test_a_walk_has_the_files_between_its_ends_but_not_those_that_watch(tmp_path: Path) -> None:
    publish = [(time_s, "services/trainer.py", "publish") for time_s in (1.0, 2.0)]
    write_trace(
        tmp_path,
        "controller",
        *publish,
        (1.5, "data/sources/table_source.py", "draw"),  # of the first step: the publish before it is of version 0
        (2.1, "data/sources/table_source.py", "draw"),
        (2.2, "rewards/scorer.py", "with_score"),
        (2.3, "run/run.py", "log"),
        (2.6, "packing/pack.py", "pack"),
    )
    write_trace(tmp_path, "trainer", (2.4, "engines/titan/train.py", "train_batch"), (2.5, *LOSS), (2.7, *LOSS))
    files = ["data/sources/table_source.py", "rewards/scorer.py", "engines/titan/train.py", "algorithms/losses.py"]
    assert row(Trace(tmp_path)) == Walk(files, 2)
    entries = Trace(tmp_path).entries
    assert "run/run.py" in walk(entries, counts_run=True).files
    assert files[0] not in walk(entries, left_out=files).files


LOSS = ("algorithms/losses.py", "__call__")


def test_an_end_that_is_gone_or_was_never_reached_is_an_error(tmp_path: Path) -> None:
    write_trace(tmp_path, "controller", (1.0, "services/trainer.py", "publish"))
    with pytest.raises(RuntimeError, match=r"forge_rl/services/trainer\.py has no function Trainer\.gone"):
        Trace(tmp_path).times("services/trainer.py", "Trainer.gone")
    with pytest.raises(RuntimeError, match=r"Trainer\.save of forge_rl/services/trainer\.py was not entered"):
        Trace(tmp_path).first("services/trainer.py", "Trainer.save")


def test_the_page_has_a_table_of_all_walks() -> None:
    match = TABLE.search(PAGE.read_text())
    assert match is not None
    form = re.escape(table(dict.fromkeys(TITLES, Walk([], 0))))
    form = re.sub(r"\\\|\\ 0\\ \\\|\\ 0\\ ", r"\\| [1-9]\\d* \\| [1-9]\\d* ", form)
    form = re.sub(r"\d{4}\\-\d\d\\-\d\d,\\ commit\\ `\w+`", r"\\d{4}-\\d\\d-\\d\\d, commit `\\w{8}`", form)
    assert re.fullmatch(form, match[0].removeprefix(match[1])), match[0]


@pytest.mark.nightly
def test_a_cell_is_traced_into_its_session(tmp_path: Path) -> None:
    cell = trace_cells(tmp_path)["cell"]
    assert cell.files[0] == "worlds/code_world.py"
    assert {"sandbox/session.py", "sandbox/inside/cells.py", "sandbox/inside/frames.py"} <= set(cell.files)
    assert cell.processes == 2
