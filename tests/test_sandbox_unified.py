"""Cgroups of version 2, on a second kernel: Linux in user mode (Debian's user-mode-linux), which has no Landlock."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.sandbox.inside import commands
from tests.security.other_user import NOBODY, needs_root, python_of_all

GUEST = Path(__file__).parent / "unified_guest.sh"


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], dict]:
    """What the guest has found, by profile and user."""
    kernel = shutil.which("linux.uml")
    if kernel is None or commands.bubblewrap() is None:
        pytest.skip("this machine lacks user-mode-linux or bubblewrap")
    pythons = [f"PYTHON={sys.executable}", f"OTHER_PYTHON={python_of_all() or ''}"]
    options = ["mem=1G", "rootfstype=hostfs", "rootflags=/", "rw", "quiet", "con=null", "con0=fd:0,fd:1"]
    done = subprocess.run(
        [kernel, *options, f"init={GUEST}", *pythons], stdin=subprocess.DEVNULL, capture_output=True, timeout=300
    )
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith("FOUND ")]
    each = [json.loads(line.removeprefix("FOUND ")) for line in lines]
    assert each, done.stdout[-3000:]
    return {(one["profile"], one["uid"]): one for one in each}


@needs_root
@pytest.mark.long
def test_version_2_limits_ends_and_removes_sessions(found: dict[tuple[str, int], dict]):
    """Of root, and of a user to whom a subtree is delegated; missing layers are refused by name."""
    others = [("process", 0)] if python_of_all() is None else [("strict", NOBODY), ("process", NOBODY)]
    for profile, uid in [("standard", 0), *others]:
        one, commands_only = found[profile, uid], profile == "process"
        assert "refused again" not in one, one
        assert ("landlock" in one.get("refused", "")) == (not commands_only)
        assert (one["memory"], one["forks"]) == ("OutOfMemory", "CellOverrun"), one
        assert one["alive after memory"] == commands_only
        assert one["limits"] == {
            "memory.max": str(96 << 20),
            "memory.oom.group": "0" if commands_only else "1",
            "pids.max": str(16 + commands.OWN_PROCESSES * commands_only),
            "cpu.max": "100000 100000",
        }
        assert one["left"] == 0
    without = found["strict", 0]
    assert "max_user_namespaces is 0" in without["refused again"]
