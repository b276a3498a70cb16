"""Folders of killed processes are removed by the next process that makes one; those of live processes stay."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forge_rl.runtime.scratch import make_scratch

CODE = """
import os, socket, sys
from forge_rl.runtime.scratch import make_scratch
folder = make_scratch()
socket.socket(socket.AF_UNIX).bind(folder + "/socket")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def started() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_processs_folder_alone_is_removed_by_the_next(temporary: Path):
    killed, dead = started()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    process, live = started()
    (target := temporary / "others").mkdir()
    (linked := temporary / "forgerl-link").symlink_to(target)
    (other := temporary / "forge_rl-other").mkdir()
    (new := temporary / "forgerl-new").mkdir()  # its process is about to lock it
    try:
        for folder in (dead, live, target, other):
            os.utime(folder, (0, 0))
        assert (dead / "socket").is_socket()
        mine = Path(make_scratch())
        assert {*temporary.iterdir()} == {live, mine, target, linked, other, new}
        assert (live / "socket").is_socket()
    finally:
        process.communicate("")
