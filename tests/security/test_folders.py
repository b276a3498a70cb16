"""Folders that somebody else has written to, or could have, are not used; nobody else can enter a run folder."""

import asyncio
import os
import stat
import tempfile
from pathlib import Path

import pytest

from apps.gateway import Config as Served
from apps.gateway import serving
from forge_rl.errors import CheckpointError, ForgeError, ModelError
from forge_rl.run.records.run_dir import prepare_folder
from tests.security.other_user import NOBODY, as_user, needs_root, opens
from tests.test_run_dir import Config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that can be continued, beside a file that a link could reach."""
    (tmp_path / "precious").write_text("kept")
    os.close(prepare_folder(tmp_path / "run", Config()))
    os.close(prepare_folder(tmp_path / "run", Config()))
    return tmp_path / "run"


def refused(run: Path, because: str) -> None:
    with pytest.raises(CheckpointError, match=because) as caught:
        prepare_folder(run, Config())
    assert "chown -R and chmod -R go-w" in caught.value.hint
    precious = run.parent / "precious"
    assert precious.read_text() == "kept", "it was written to"
    assert stat.S_IMODE(precious.stat().st_mode) == 0o644, "its mode was changed"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_can_enter_a_run_folder(run: Path):
    assert mode(run) == 0o700
    run.chmod(0o2755)
    os.close(prepare_folder(run, Config()))
    assert mode(run) == 0o2700, "closed to others, and otherwise as it was"


@needs_root
def test_what_is_in_a_run_folder_cannot_be_read_by_another_user():
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        os.close(prepare_folder(Path(place, "run"), Config()))
        assert as_user(NOBODY, lambda: list(opens(Path(place, "run", "config.json")))) == []


@needs_root
def test_a_run_folder_of_another_user_is_refused(run: Path):
    os.chown(run, NOBODY, NOBODY)
    refused(run, f"it belongs to user {NOBODY}")


@needs_root
@pytest.mark.parametrize("name", ["config.json", "logs", "checkpoints/step-000001/training/.metadata"])
def test_a_file_of_another_user_is_refused(name: str, run: Path):
    (run / "checkpoints/step-000001/training").mkdir(parents=True)
    (run / "checkpoints/step-000001/training/.metadata").write_text("")
    os.chown(run / name, NOBODY, NOBODY)
    refused(run, f"{name} belongs to user {NOBODY}")


@needs_root
def test_a_link_of_another_user_in_place_of_a_run_folder_is_refused(run: Path):
    link = run.parent / "link"
    link.symlink_to(run)
    os.close(prepare_folder(link, Config()))
    os.lchown(link, NOBODY, NOBODY)
    refused(link, f"it belongs to user {NOBODY}")


def test_a_folder_that_anybody_may_write_to_is_refused_unless_it_is_empty(run: Path, tmp_path: Path):
    run.chmod(0o777)
    refused(run, r"anybody may write to it \(mode 777\)")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty").chmod(0o777)
    os.close(prepare_folder(tmp_path / "empty", Config()))
    assert mode(tmp_path / "empty") == 0o700


def test_a_file_that_anybody_could_write_to_is_refused(run: Path):
    (run / "notes").touch()
    (run / "notes").chmod(0o666)
    os.close(prepare_folder(run, Config()))  # nobody can enter
    run.chmod(0o755)
    refused(run, r"anybody may write to .*notes \(mode 666\)")


@pytest.mark.parametrize(
    "name",
    [
        *(".lock", "config.json", "versions.json", "metrics.jsonl", "events.jsonl", "episodes.jsonl", "trace.json"),
        *("summary.json", "wandb_run_id", "logs/trainer.log", "tensorboard", "skipped", "checkpoints"),
        "checkpoints/.step-000001.partial",
    ],
)
@pytest.mark.parametrize("target", ["precious", "new"])
def test_a_link_in_a_run_folder_that_leads_out_of_it_is_refused(name: str, target: str, run: Path):
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(run.parent / target)
    refused(run, f"{name} is a link to {run.parent / target}")
    assert not (run.parent / "new").exists(), "it was made"


def test_links_within_a_run_folder_are_as_wandb_makes_them(run: Path):
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    os.close(prepare_folder(run, Config()))


def test_a_pipe_which_would_be_waited_for_is_refused(run: Path):
    os.mkfifo(run / "metrics.jsonl")
    refused(run, "metrics.jsonl is neither file nor folder")


@needs_root
def test_files_are_this_users_on_a_file_system_that_changes_owners(run: Path, monkeypatch: pytest.MonkeyPatch):
    for path in (run, *run.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    actual = tempfile.TemporaryFile

    def squashed(**kwargs: Path) -> object:
        file = actual(**kwargs)
        os.fchown(file.fileno(), NOBODY, NOBODY)
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", squashed)
    os.close(prepare_folder(run, Config()))


def test_the_gateways_logs_are_private_and_not_written_through_a_link(tmp_path: Path):
    async def serve(out: Path, because: str, error: type[ForgeError]) -> None:
        with pytest.raises(error, match=because):
            async with serving(Served(model="absent/model/name", port=0, out=out)):
                raise AssertionError("it started")

    asyncio.run(serve(tmp_path / "new", "no such folder", ModelError))
    assert mode(tmp_path / "new" / "logs") == 0o700
    (tmp_path / "other").mkdir()
    (tmp_path / "new" / "logs" / "generator-0.log").symlink_to(tmp_path / "other" / "file")
    asyncio.run(serve(tmp_path / "new", r"generator-0.log is a link to", CheckpointError))
