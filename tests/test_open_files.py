"""Files of rows that stay open: how many, until when, and what happens when they change."""

import os
from pathlib import Path

import pytest

from forge_rl.data.sources import open_files
from forge_rl.data.sources.lines import JSONLines
from forge_rl.data.sources.open_files import OpenFile
from forge_rl.errors import TaskError


def descriptors() -> set[Path]:
    """Return the files that this process has open."""
    paths = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            paths.add(Path(os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # the one that lists them
    return paths


def test_the_files_opened_last_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "_MOST_OPEN", 3)
    paths = [tmp_path / f"{number}.jsonl" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_text(f'{{"n": {number}}}\n')
    tables = [JSONLines(path, tmp_path / "cache") for path in paths]
    assert not descriptors() & set(paths), "opened at the first read"
    for _ in range(2):
        assert [table.row(0) for table in tables] == [b'{"n": %d}' % number for number in range(5)]
        assert descriptors() & set(paths) == set(paths[2:])
    del tables
    assert not descriptors() & set(paths)


def test_a_file_that_was_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    table = JSONLines(path, tmp_path / "cache")
    assert table.row(0) == b'{"n": 1}'
    (tmp_path / "new").write_text("{}")
    (tmp_path / "new").rename(path)
    assert table.row(1) == b'{"n": 2}'


def test_a_file_that_grows_or_is_gone_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("12345")
    file, late = OpenFile(path), OpenFile(path)
    assert file.read(1, 3) == b"23"
    path.write_text("123456")
    with pytest.raises(TaskError, match=r"a\.jsonl changed while it was being read"):
        file.read(1, 3)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        late.read(1, 3)
