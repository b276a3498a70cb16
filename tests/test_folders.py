"""Small files that are written whole."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from forge_rl.errors import CheckpointError
from forge_rl.run.records.json_files import write_json
from forge_rl.system.folders import make_private, write_whole
from tests.commands import ROOT

TORN = {
    "forge_rl/run/checkpoints/files.py": 2,  # in a folder that counts once it is renamed
    "forge_rl/run/start/hosts.py": 1,  # a probe of a file system
    "forge_rl/metrics/step_lines.py": 1,  # a journal that states its length
    "forge_rl/runtime/progress.py": 1,  # shared memory of this run
    "forge_rl/runtime/in_hand.py": 1,
    "forge_rl/gateway/agent_command.py": 1,  # read by a process that starts later
}
"""Files written in place, which need not be whole."""


def test_a_small_file_is_whole_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.json"
    write_json(path, {"step": 1})
    with monkeypatch.context() as full:

        def fails(_: int) -> None:
            assert path.read_text() == '{\n "step": 1\n}\n'
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="No space left"):
            write_json(path, {"step": 2})
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"x" * 9)
    assert path.read_text() == '{\n "step": 1\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["small.json"]
    write_whole(path, "é")
    assert path.read_bytes() == "é".encode()


def test_a_file_that_two_write_at_once_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "job.json", os.fsync

    def write_another(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_whole(path, "second")

    monkeypatch.setattr(os, "fsync", write_another)
    write_whole(path, "first")
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["job.json"]


def test_a_folder_that_cannot_be_made_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, cause in (("file", "Not a directory"), ("file/runs", "Not a directory"), ("loop", "Not a directory")):
        with pytest.raises(CheckpointError, match=f"the folder {tmp_path / place} cannot be written: {cause}"):
            make_private(tmp_path / place, CheckpointError)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644, "the mode of a file stays"
    make_private(tmp_path / "new" / "runs", CheckpointError)
    assert (tmp_path / "new" / "runs").stat().st_mode & 0o777 == 0o700


def test_files_of_runs_are_written_whole() -> None:
    places = [
        path
        for package in (
            "forecast",
            "gateway",
            "harness",
            "jobs",
            "look",
            "metrics",
            "rollout",
            "run",
            "runtime",
            "services",
        )
        for path in (ROOT / "forge_rl" / package).rglob("*.py")
    ]
    torn_names = {
        str(path.relative_to(ROOT)): count
        for path in places
        if (count := len(re.findall(r"\.write_(?:text|bytes)\(", path.read_text())))
    }
    assert torn_names == TORN
