"""Monarch's log: what others put in its way before a run starts, and who can read it."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.runtime.monarch_log import secure_monarch_log
from tests.security.other_user import NOBODY, needs_root

ROOT = Path(__file__).parent.parent.parent
NAME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", NAME)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_its_folder_is_made_for_this_user_alone(tmp_path: Path):
    secure_monarch_log(tmp_path)
    assert [(path.name, mode(path)) for path in tmp_path.iterdir()] == [(NAME, 0o700)]


def test_a_folder_that_others_could_read_or_write_is_closed(tmp_path: Path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME).chmod(0o777)
    secure_monarch_log(tmp_path)
    assert mode(tmp_path / NAME) == 0o700


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="not a folder of this user"):
        secure_monarch_log(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / NAME).touch()
    with pytest.raises(ConfigError, match="not a folder of this user"):
        secure_monarch_log(tmp_path)


@needs_root
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path):
    (tmp_path / NAME).mkdir()
    os.chown(tmp_path / NAME, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="not a folder of this user"):
        secure_monarch_log(tmp_path)


def test_the_folder_by_the_name_in_the_environment_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("USER", "by-environment")
    (tmp_path / "by-environment").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="by-environment"):
        secure_monarch_log(tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "", "a/../../b"])
def test_a_name_that_leaves_the_place_is_passed_over(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("USER", name)
    secure_monarch_log(tmp_path / "..")
    assert sorted(path.name for path in tmp_path.iterdir()) == []
    (tmp_path.parent / NAME).rmdir()


def test_links_put_into_an_open_folder_are_removed_but_not_followed(tmp_path: Path):
    folder, target = tmp_path / NAME, tmp_path / "target"
    folder.mkdir()
    target.write_text("precious")
    (folder / "monarch_log.log").symlink_to(target)
    os.link(target, folder / "monarch_log_2.log")
    secure_monarch_log(tmp_path)
    assert list(folder.iterdir()) == []
    assert target.read_text() == "precious"


def test_a_log_of_this_users_own_stays(tmp_path: Path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "monarch_log.log").write_text("before")
    secure_monarch_log(tmp_path)
    assert (tmp_path / NAME / "monarch_log.log").read_text() == "before"


# By the name in the environment, as this user's own folder is in use.
PROGRAM = "import forge_rl\nforge_rl.RunConfig"
REFUSED = "Monarch keeps its log in /tmp/{user}, which is not a folder of this user"


@pytest.fixture
def user(tmp_path: Path) -> str:
    """A name for which a link lies in the place of the folder."""
    name = f"forge_rl-{os.getpid()}"
    link = Path("/tmp", name)
    link.symlink_to(tmp_path)
    yield name
    link.unlink()


def test_a_program_says_so_in_a_line_and_monarch_is_not_imported(user: str, tmp_path: Path):
    script = tmp_path / "recipe.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "USER": user}
    done = subprocess.run([sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert REFUSED.format(user=user) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_says_so_in_a_line(user: str):
    environment = {**os.environ, "USER": user}
    command = [sys.executable, "-c", "from forge_rl.cli import main; main()", "grpo"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert REFUSED.format(user=user) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "module", ["forge_rl.runtime.cluster", "forge_rl.services.reward", "forge_rl.services.weight_store_actor"]
)
def test_modules_that_import_monarch_look_first(module: str, user: str):
    script = (
        f"import sys\ntry: import {module}\nexcept Exception as e: print(type(e).__name__, 'monarch' in sys.modules)"
    )
    environment = {**os.environ, "USER": user}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["ConfigError", "False"], done.stderr
