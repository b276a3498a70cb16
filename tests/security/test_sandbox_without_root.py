"""Attacks from sessions of a user who is not root, who is the user of the sessions too, as far as the kernel knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.other_user import NOBODY, ROOT, needs_root, python_of_all

_ATTACKS = (
    "dangerous_system_calls or clone or killed or machines_files or written_elsewhere or abstract or channel_leads "
    "or descriptors or variables or privileges or fork_bomb or inode or links_lead or a_command_sees"
)


@needs_root
@pytest.mark.long
@pytest.mark.usefixtures("process_pool")
@pytest.mark.parametrize(
    "tests",
    [
        ["-m", "long", "tests/security/test_sandbox_escapes.py", "-k", f"(strict or process) and ({_ATTACKS})"],
        ["tests/test_image_sessions.py"],
        pytest.param(
            ["-m", "long", "tests/security/test_sandbox_escapes.py", "-k", f"debian_image and ({_ATTACKS})"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["attacks", "images", "attacks in an image"],
)
def test_sessions_hold_without_root(tests: list[str]):
    python = python_of_all()
    if python is None:
        pytest.skip("other users can run no Python of this version here")
    home = Path("/tmp") / f"nobody-{os.getpid()}"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [python, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=ROOT,
        env={"HOME": str(home), "TMPDIR": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{packages}"},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
    subprocess.run(["rm", "-r", str(home)], check=True)
    if "gives its users no namespaces" in done.stdout:
        pytest.skip("this machine gives its users no namespaces")
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
