"""Copies of checkpoints at an address: whole or not there, and never anybody's paths."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.run.checkpoint_mirror import CheckpointMirror, MirrorTask
from forge_rl.run.checkpoints import Checkpoints


class Log:
    """Takes events and warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, line: str) -> None:
        self.said.append(line)

    warn = event


@pytest.fixture(params=["file", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        yield (tmp_path / "elsewhere").as_uri()
        return
    yield "memory://mirror"
    fsspec.filesystem("memory").store.clear()


def run_folder(path: Path, *steps: int, keep: int = 2) -> Checkpoints:
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "versions.json"):
        (path / name).write_text(json.dumps({"lr": 1}))
    checkpoints = Checkpoints(path / "checkpoints", keep=keep)
    for step in steps:
        write(checkpoints, step)
    return checkpoints


def write(checkpoints: Checkpoints, step: int) -> None:
    async def one() -> None:
        async with checkpoints.writing(step, {"step": step}, bytes_needed=0) as folder:
            (folder / "model" / "weights").write_text(f"weights of {step}")

    asyncio.run(one())


def restored(mirror: CheckpointMirror, folder: Path) -> tuple[list[int], list[str]]:
    """Restore into a folder; returns the steps there afterwards, and what was told."""
    folder.mkdir(exist_ok=True)
    told: list[str] = []
    mirror.restore(folder, same=lambda _: [], tell=told.append, progress=lambda *_: None)
    assert not (folder / ".restored").exists()
    found = Checkpoints(folder / "checkpoints", keep=2).all()
    assert [each.damage() for each in found] == [""] * len(found)
    return [each.step for each in found], told


def test_a_lost_run_goes_on_from_the_newest_and_has_the_best(address: str, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 5)
    checkpoints.mark_best({5: 1.0})
    for step in (10, 999_999, 1_000_000):
        write(checkpoints, step)
        assert mirror.copy(checkpoints) > 0
    assert mirror.copy(checkpoints) == 0, "only what is new is copied"
    assert restored(mirror, tmp_path / "fresh")[0] == [5, 1_000_000]
    assert (tmp_path / "fresh/checkpoints/step-1000000/model/weights").read_text() == "weights of 1000000"
    run_folder(tmp_path / "newer", 1_000_001)
    assert restored(mirror, tmp_path / "newer") == ([1_000_001], [])


@pytest.mark.parametrize(
    ("spoil", "said"),
    {
        "torn": (lambda folder: (folder / "manifest.json").unlink(), "step-000001 was copied"),
        "changed": (lambda folder: (folder / "model/weights").write_text("weights of 9"), "has changed"),
        "missing": (lambda folder: (folder / "model/weights").unlink(), "is missing"),
        "longer": (lambda folder: (folder / "model/weights").write_text("x" * 99), "99 bytes"),
        "no manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "malformed"),
        "empty": (lambda folder: (folder / "manifest.json").write_text("{}"), "malformed"),
        "outside": (lambda folder: name_file(folder, "../../../stolen"), "none of a checkpoint's"),
        "absolute": (lambda folder: name_file(folder, "/etc/passwd"), "none of a checkpoint's"),
        "escape": (lambda folder: name_file(folder, "\x1b[2J"), r"\\x1b\[2J is missing"),
    }.values(),
)
def test_a_copy_that_is_torn_or_hostile_is_not_used(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    mirror, checkpoints = CheckpointMirror(str(there)), run_folder(tmp_path / "run", 1, 2)
    mirror.copy(checkpoints)
    spoil(there / "step-000002")
    steps, told = restored(mirror, tmp_path / "fresh")
    assert steps == [1]
    assert "\x1b" not in "".join(told)
    assert re.search(said, told[0])
    assert not (tmp_path / "stolen").exists()


def name_file(folder: Path, name: str) -> None:
    (folder / "manifest.json").write_text(json.dumps({"files": {name: [4, "0" * 32]}}))


def test_another_runs_copy_is_refused_and_an_unknown_address_too(tmp_path: Path) -> None:
    mirror = CheckpointMirror(str(tmp_path / "elsewhere"))
    mirror.copy(run_folder(tmp_path / "run", 1))
    (tmp_path / "fresh").mkdir()

    def other(staged: Path) -> list[str]:
        assert json.loads((staged / "config.json").read_text()) == {"lr": 1}
        raise ConfigError("another run")

    with pytest.raises(ConfigError, match="another run"):
        mirror.restore(tmp_path / "fresh", same=other, tell=print, progress=lambda *_: None)
    assert not list((tmp_path / "fresh").iterdir())
    with pytest.raises(CheckpointError, match="fsspec cannot open"):
        CheckpointMirror("nosuch://x")


def test_what_cannot_be_copied_is_told_and_copied_with_the_next(tmp_path: Path) -> None:
    async def check() -> None:
        log: Any = Log()
        (tmp_path / "elsewhere").write_text("a file in the way")
        checkpoints = await asyncio.to_thread(run_folder, tmp_path / "run", 1)
        task = MirrorTask(CheckpointMirror(str(tmp_path / "elsewhere")), checkpoints, log)
        task.follow()
        await task.close()
        assert "not copied to --checkpoint-mirror" in log.said.pop()
        (tmp_path / "elsewhere").unlink()
        await asyncio.to_thread(write, checkpoints, 2)
        task.follow()
        task.follow()  # while the first runs
        await task.close()
        assert (tmp_path / "elsewhere/step-000001/manifest.json").exists()
        assert (tmp_path / "elsewhere/step-000002/manifest.json").exists()
        assert "checkpoints are copied" in log.said[0]

    asyncio.run(check())
