"""Small files that are written whole."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from forge_rl.run.records.json_files import write_json
from forge_rl.system.folders import write_whole
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
    found = {
        str(path.relative_to(ROOT)): count
        for path in places
        if (count := len(re.findall(r"\.write_(?:text|bytes)\(", path.read_text())))
    }
    assert found == TORN
