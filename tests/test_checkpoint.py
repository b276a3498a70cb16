"""Checkpoints: whole or not at all."""

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from forge_rl.checkpoint import Checkpoints
from forge_rl.errors import CheckpointError


def write(
    checkpoints: Checkpoints,
    step: int,
    *,
    fail: Exception | None = None,
    bytes_needed: int = 0,
    spare: int | None = None,
) -> None:
    async def run() -> None:
        async with checkpoints.writing(step, {"step": step}, bytes_needed=bytes_needed, spare=spare) as folder:
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
    assert latest.controller_state() == {"step": 10}
    assert (latest.model / "weights").read_text() == "10"


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    with pytest.raises(RuntimeError):
        write(checkpoints, 2, fail=RuntimeError("killed here"))
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    write(checkpoints, 3)
    assert not list(tmp_path.glob(".step-*")), "leftovers of the failed write are removed by the next"


def test_the_best_stays_whatever_is_written_and_so_does_one_whose_score_is_not_known_yet(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.best() is None
    for step in (1, 2, 3):
        write(checkpoints, step)
        if step == 1:
            checkpoints.mark_best(1)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 3]
    assert (tmp_path / "best" / "model" / "weights").read_text() == "1"
    write(checkpoints, 4, spare=3)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 3, 4]
    checkpoints.mark_best(3)
    write(checkpoints, 5)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [3, 5]
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.folder) == (3, tmp_path / "step-000003")
    shutil.rmtree(best.folder)
    assert checkpoints.best() is None, "its folder is gone"
    checkpoints.mark_best(None)
    checkpoints.mark_best(None)
    assert not (tmp_path / "best").is_symlink()


def test_a_link_that_is_not_written_yet_when_a_run_dies_is_no_best_and_in_nobodys_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)
    (tmp_path / ".best.partial").symlink_to("step-000001")
    assert checkpoints.best() is None
    checkpoints.mark_best(1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["best", "step-000001"]
    with pytest.raises(CheckpointError, match="best cannot be written"):
        Checkpoints(tmp_path / "none", keep=1).mark_best(1)


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


def test_the_loop_goes_on_while_the_disk_is_slow_and_a_cancelled_write_is_over_when_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
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

    asyncio.run(run())
