"""Checkpoints: whole or not at all."""

import asyncio
import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import CheckpointError
from forge_rl.run.checkpoints.files import FORMAT, Checkpoints


def write(
    checkpoints: Checkpoints,
    step: int,
    *,
    fail: Exception | None = None,
    bytes_needed: int = 0,
    unscored: int | None = None,
) -> None:
    async def run() -> None:
        async with checkpoints.writing(step, {"step": step}, bytes_needed=bytes_needed, unscored=unscored) as folder:
            (folder / "model" / "weights").write_text(str(step))
            if fail is not None:
                raise fail

    asyncio.run(run())


def test_the_newest_whole_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 10):
        write(checkpoints, step)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2, 10]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.controller_state() == {"format": FORMAT, "step": 10}
    assert (latest.model / "weights").read_text() == "10"


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    with pytest.raises(RuntimeError):
        write(checkpoints, 2, fail=RuntimeError("killed here"))
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    write(checkpoints, 3)
    assert not list(tmp_path.glob(".step-*")), "leftovers of the failed write are removed by the next"


def test_the_best_and_unscored_checkpoints_are_never_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.best() is None
    for step in (1, 2, 3):
        write(checkpoints, step)
        if step == 1:
            checkpoints.mark_best({1: 0.5})
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 3]
    assert (tmp_path / "best" / "model" / "weights").read_text() == "1"
    write(checkpoints, 4, unscored=3)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 3, 4]
    checkpoints.mark_best({3: 0.5})
    write(checkpoints, 5)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [3, 5]
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.folder) == (3, tmp_path / "step-000003")
    shutil.rmtree(best.folder)
    assert checkpoints.best() is None, "its folder is gone"
    checkpoints.mark_best({})
    checkpoints.mark_best({})
    assert not (tmp_path / "best").is_symlink()


def test_an_unfinished_best_link_of_a_dead_run_does_no_harm(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)
    (tmp_path / ".best.partial").symlink_to("step-000001")
    assert checkpoints.best() is None
    checkpoints.mark_best({1: 0.5})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["best", "step-000001"]
    (tmp_path / ".best.partial").mkdir()
    with pytest.raises(CheckpointError, match="best cannot be written"):
        checkpoints.mark_best({1: 0.5})


def test_the_best_of_a_folder_copied_without_links_is_a_link_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    write(checkpoints, 1)
    checkpoints.mark_best({1: 0.5})
    write(checkpoints, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # follows links, as cp -rL and scp -r do
    assert not (tmp_path / "copy" / "best").is_symlink()
    copied = Checkpoints(tmp_path / "copy", keep=1)
    best = copied.best()
    assert best is not None
    assert best.step == 1
    write(copied, 3)
    assert [path.name for path in sorted((tmp_path / "copy").iterdir())] == ["best", "step-000001", "step-000003"]
    copied.mark_best({3: 0.7})
    assert (tmp_path / "copy" / "best" / "model" / "weights").read_text() == "3"

    (tmp_path / "run" / "best").unlink()
    (tmp_path / "run" / "best").mkdir()
    (tmp_path / "run" / "best" / "manifest.json").write_text("of something else")
    with pytest.raises(CheckpointError, match="move it away if it is not a link"):
        Checkpoints(tmp_path / "run", keep=1).mark_best({1: 0.5})
    assert (tmp_path / "run" / "best" / "manifest.json").read_text() == "of something else"


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    write(checkpoints, 1)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="free"):
        write(checkpoints, 1, bytes_needed=1 << 60)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="No space left"):
        write(checkpoints, 1, fail=OSError(28, "No space left on device"))


def test_a_broken_controller_file_names_the_folder_to_delete(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    latest = checkpoints.latest()
    assert latest is not None
    (latest.folder / "controller.json").write_text(json.dumps({"step": 1})[:4])
    with pytest.raises(CheckpointError, match="delete"):
        latest.controller_state()


async def test_a_slow_write_does_not_block_the_loop_even_when_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, loop = Checkpoints(tmp_path, keep=2), asyncio.get_running_loop()
    syncing, go_on = asyncio.Event(), threading.Event()

    def fsync(fd: int) -> None:
        loop.call_soon_threadsafe(syncing.set)
        assert go_on.wait(60), "the loop does not go on"

    async def save() -> None:
        async with checkpoints.writing(3, {"step": 3}, bytes_needed=0):
            pass

    monkeypatch.setattr(os, "fsync", fsync)
    saving = asyncio.create_task(save())
    await syncing.wait()
    saving.cancel()
    await asyncio.sleep(0)
    assert not saving.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [3], "no thread writes on behind it"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_by_a_link(path: Path) -> None:
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def nonsense(path: Path) -> None:
    path.write_text('{"files": [1]}')


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("model/weights", flip, "model/weights has changed since it was written"),
        ("controller.json", flip, "controller.json has changed since it was written"),
        ("model/weights", truncate, "model/weights has 1 bytes, but was written with 2"),
        ("model/weights", Path.unlink, "model/weights is missing"),
        ("model/weights", replace_by_a_link, "model/weights is missing"),
        ("manifest.json", Path.unlink, "manifest.json cannot be read: .*No such file"),
        ("manifest.json", truncate, "manifest.json cannot be read: "),
        ("manifest.json", nonsense, "manifest.json cannot be read: "),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    name: str, harm: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (9, 10):
        write(checkpoints, step)
    (tmp_path / "checkpoints" / "step-000009" / "notes.txt").write_text("mine")
    warnings: list[str] = []
    for _ in range(2):  # a second one of that step is kept beside the first
        write(checkpoints, 11)
        latest = checkpoints.latest()
        assert latest is not None
        assert latest.damage() == ""
        (latest.model / "weights").write_text("22")
        truncated = (latest.folder / "manifest.json").read_text()
        assert "has changed since it was written" in latest.damage() or "has 2 bytes" in latest.damage(), truncated
        (latest.model / "weights").write_text("11")
        assert latest.damage() == ""
        harm(latest.folder / name)
        sound_checkpoint = checkpoints.set_damaged_aside(warnings.append)
        assert sound_checkpoint is not None
        assert sound_checkpoint.step == 10
    assert len(warnings) == 2
    for number, line in enumerate(warnings):
        assert line.startswith(f"{latest.folder} is damaged, so another checkpoint is used: ")
        assert re.search(message, line)
        assert line.endswith(f"it is kept as step-000011.damaged-{number}")
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [9, 10]
    assert checkpoints.all()[0].damage() == "", "files of others are no damage"
    warnings.clear()
    for checkpoint in checkpoints.all():
        truncate(checkpoint.model / "weights")
    assert checkpoints.set_damaged_aside(warnings.append) is None
    assert len(warnings) == 2


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fails: Callable[[str], bool], number: int = errno.ESTALE
) -> None:
    """Makes a function fail for paths for which `fails` holds, as a file server that is away does."""
    function = getattr(owner, name)

    def replacement(path: Any, *args: Any, **options: Any) -> Any:
        if fails(str(path)):
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *args, **options)

    monkeypatch.setattr(owner, name, replacement)


READS: dict[str, tuple[object, str, str]] = {
    "content": (Path, "open", "weights"),
    "status": (Path, "lstat", "weights"),
    "manifest": (Path, "read_text", "manifest.json"),
    "folder": (os, "scandir", "model"),
    "all": (os, "listdir", "checkpoints"),
}


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("place", READS)
def test_a_checkpoint_that_cannot_be_read_is_neither_damaged_nor_absent(
    place: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        write(checkpoints, step)
    owner, function, ending = READS[place]
    with monkeypatch.context() as patch:
        failing(patch, owner, function, lambda path: path.endswith(ending), number)
        with pytest.raises(CheckpointError, match=f"{ending} cannot be read: {os.strerror(number)}") as caught:
            checkpoints.set_damaged_aside(print)
    assert "once it can be read" in caught.value.hint
    assert checkpoints.set_damaged_aside(print) == checkpoints.latest() == checkpoints.of_step(2)


def test_a_second_write_of_a_step_that_fails_or_is_killed_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 2)
    with monkeypatch.context() as patch:
        failing(patch, Path, "rename", lambda path: path.endswith(".partial"))
        with pytest.raises(CheckpointError, match="step 2 cannot be written"):
            write(checkpoints, 2)
    assert checkpoints.latest() == checkpoints.of_step(2)
    checkpoints.of_step(2).folder.rename(tmp_path / ".step-000002.replaced")  # killed between the two renames
    assert Checkpoints(tmp_path, keep=1).latest() == checkpoints.of_step(2)
    assert checkpoints.of_step(2).damage() == ""


def test_a_new_checkpoint_survives_a_failed_removal_of_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 2)
    with monkeypatch.context() as patch:
        failing(patch, shutil, "rmtree", lambda path: "step-000002" in path)
        write(checkpoints, 4)
    assert "Stale file handle" in checkpoints.unremoved
    assert checkpoints.all() == [checkpoints.of_step(4)], "one that is half removed is not listed"
    write(checkpoints, 6)
    assert checkpoints.unremoved == ""
    assert not list(tmp_path.glob(".step-*"))


def test_a_newer_format_is_refused_and_a_missing_format_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    folder = checkpoints.of_step(1).folder

    def edit(name: str, **changes: object) -> None:
        content = {key: value for key, value in json.loads((folder / name).read_text()).items() if key != "format"}
        (folder / name).write_text(json.dumps(content | changes))

    edit("manifest.json", format=3, forge_rl="9.1", files="another layout")
    with pytest.raises(
        CheckpointError, match=r"step-000001 has the format 3, written by forge_rl 9\.1; forge_rl .* 1 to"
    ):
        checkpoints.set_damaged_aside(print)
    assert checkpoints.latest() is not None, "it keeps its name"
    edit("controller.json", rollouts={"batches": 7})
    assert checkpoints.of_step(1).controller_state() == {
        "format": FORMAT,
        "step": 1,
        "batches": 7,
        "rollouts": {"batches": 7},
    }


def test_a_run_does_not_start_over_where_checkpoints_were_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.check_new()
    write(checkpoints, 1)
    truncate(checkpoints.of_step(1).model / "weights")
    assert checkpoints.set_damaged_aside(print) is None
    with pytest.raises(CheckpointError, match=r"damaged ones are kept as step-000001\.damaged-0"):
        checkpoints.check_new()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"last_checkpoint\.json names one") as caught:
        checkpoints.check_new()
    assert f"delete {tmp_path / 'checkpoints'} and {tmp_path / 'last_checkpoint.json'}" in caught.value.hint


@pytest.mark.parametrize("name", ["../secret", "{}/secret", "model/../../secret"])
def test_a_manifest_that_names_a_file_outside_of_its_folder_opens_none(name: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    latest = checkpoints.latest()
    assert latest is not None
    (tmp_path / "secret").write_text("")
    name = name.format(tmp_path)
    (latest.folder / "manifest.json").write_text(json.dumps({"files": {name: [0, "99aa06d3014798d86001c324468d497f"]}}))
    assert latest.damage() == f"{name} is missing"
