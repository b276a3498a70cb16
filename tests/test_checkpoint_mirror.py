"""Copies of checkpoints at an address: whole or not there, and never anybody's paths."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.run.checkpoints.files import Checkpoints
from forge_rl.run.checkpoints.mirror import CheckpointMirror, MirrorTask
from forge_rl.run.records.started_from import read_records
from forge_rl.run.start.preparation import prepare
from tests.conftest import edited
from tests.s3 import S3
from tests.tiny import Config


class Log:
    """Takes events and warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, line: str) -> None:
        self.said.append(line)

    warn = event


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
    lines: list[str] = []
    mirror.restore(folder, check_settings=lambda _: [], tell=lines.append, progress=lambda *_: None)
    assert not (folder / ".restored").exists()
    checkpoints = Checkpoints(folder / "checkpoints", keep=2).all()
    assert [checkpoint.damage() for checkpoint in checkpoints] == [""] * len(checkpoints)
    return [checkpoint.step for checkpoint in checkpoints], lines


def test_a_lost_run_goes_on_from_the_newest_and_has_the_best(address: str, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 5)
    checkpoints.mark_best({5: 1.0})
    for step in (10, 100_000, 1_000_000):
        write(checkpoints, step)
        assert mirror.copy(checkpoints) > 0
    assert mirror.copy(checkpoints) == 0, "only what is new is copied"
    assert restored(mirror, tmp_path / "fresh")[0] == [5, 1_000_000]
    assert (tmp_path / "fresh/checkpoints/step-1000000/model/weights").read_text() == "weights of 1000000"
    run_folder(tmp_path / "newer", 1_000_001)
    assert restored(mirror, tmp_path / "newer") == ([1_000_001], [])


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "torn": (lambda folder: (folder / "manifest.json").unlink(), "step-000001 was copied"),
    "changed": (lambda folder: (folder / "model/weights").write_text("weights of 9"), "has changed"),
    "missing": (lambda folder: (folder / "model/weights").unlink(), "is missing"),
    "longer": (lambda folder: (folder / "model/weights").write_text("x" * 99), "99 bytes"),
    "no manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "malformed"),
    "empty": (lambda folder: (folder / "manifest.json").write_text("{}"), "malformed"),
    "endless": (
        lambda folder: (folder / "manifest.json").write_text('{"files": {"model/weights": [Infinity, ""]}}'),
        "malformed",
    ),
    "outside": (lambda folder: name_file(folder, "../../../stolen"), "none of a checkpoint's"),
    "absolute": (lambda folder: name_file(folder, "/etc/passwd"), "none of a checkpoint's"),
    "escape": (lambda folder: name_file(folder, "\x1b[2J"), r"\\x1b\[2J is missing"),
}


@pytest.mark.parametrize(
    ("address", "damage"),
    [*(("file", how) for how in SPOILT), *(("s3", how) for how in ("torn", "missing", "longer"))],
    indirect=["address"],
)
def test_a_copy_that_is_torn_or_hostile_is_not_used(damage: str, address: str, tmp_path: Path) -> None:
    spoil, message = SPOILT[damage]
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 1, 2)
    mirror.copy(checkpoints)
    with edited(address, tmp_path / "edited") as copy:
        spoil(copy / "step-000002")
    steps, lines = restored(mirror, tmp_path / "fresh")
    assert steps == [1]
    assert "\x1b" not in "".join(lines)
    assert re.search(message, lines[0])
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
        mirror.restore(tmp_path / "fresh", check_settings=other, tell=print, progress=lambda *_: None)
    assert not list((tmp_path / "fresh").iterdir())
    with pytest.raises(CheckpointError, match="fsspec cannot open"):
        CheckpointMirror("nosuch://x")


def test_older_copies_of_another_run_are_refused_too(tmp_path: Path) -> None:
    CheckpointMirror(str(tmp_path / "elsewhere")).copy(run_folder(tmp_path / "run", 1))
    run_folder(tmp_path / "other", 5)

    def refuse(staged: Path) -> list[str]:
        raise ConfigError("another run")

    mirror = CheckpointMirror(str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="another run"):
        mirror.restore(tmp_path / "other", check_settings=refuse, tell=print, progress=lambda *_: None)
    assert not (tmp_path / "other" / ".restored").exists()


def test_of_two_runs_with_one_address_the_first_to_copy_has_it(address: str, tmp_path: Path) -> None:
    first, second = CheckpointMirror(address), CheckpointMirror(address)
    ours, theirs = run_folder(tmp_path / "first", 1), run_folder(tmp_path / "second", 7)
    (tmp_path / "second" / "config.json").write_text('{"lr": 2}')
    for mirror, folder in ((first, "first"), (second, "second")):
        mirror.restore(tmp_path / folder, check_settings=lambda _: [], tell=print, progress=lambda *_: None)
    assert first.copy(ours) > 0
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"another run copies there, \w+ process \d+ on .*an address of its own"
        ):
            second.copy(theirs)
    assert first._folders() == {"step-000001"}
    assert json.loads(first._files.read("config.json", 100)) == {"lr": 1}


def test_a_run_that_starts_after_the_last_copy_takes_the_address_over(tmp_path: Path) -> None:
    address = str(tmp_path / "elsewhere")
    earlier_mirror, ours = CheckpointMirror(address), run_folder(tmp_path / "run", 1)
    earlier_mirror.copy(ours)
    later_mirror = CheckpointMirror(address)
    assert restored(later_mirror, tmp_path / "later")[0] == [1]
    assert later_mirror.copy(run_folder(tmp_path / "later", 2)) > 0
    write(ours, 3)
    with pytest.raises(CheckpointError, match="another run copies there"):
        earlier_mirror.copy(ours)
    assert restored(CheckpointMirror(address), tmp_path / "fresh")[0] == [2]


def test_the_record_of_models_comes_back_with_the_checkpoints(address: str, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 1)
    record = {"--model": {"name": "org/name", "folder": "/cache/snapshots/1", "files": {"config.json": "1"}}}
    (tmp_path / "run" / "models.json").write_text(json.dumps(record))
    mirror.copy(checkpoints)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "models.json").write_text("{}")  # of the model that the command leads to now
    staged_names: list[str] = []

    def check(staged: Path) -> list[str]:
        staged_names.extend(sorted(path.name for path in staged.iterdir()))
        return []

    mirror.restore(tmp_path / "fresh", check_settings=check, tell=print, progress=lambda *_: None)
    assert staged_names == ["checkpoints", "config.json", "models.json", "versions.json"]
    assert read_records(tmp_path / "fresh")["--model"].folder == "/cache/snapshots/1"
    run_folder(tmp_path / "newer", 2)
    (tmp_path / "newer" / "models.json").write_text("{}")
    mirror.restore(tmp_path / "newer", check_settings=check, tell=print, progress=lambda *_: None)
    assert read_records(tmp_path / "newer") == {}, "its own, as nothing was brought"


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


def test_a_damaged_checkpoint_is_repaired_from_its_copy_which_stays(address: str, tmp_path: Path) -> None:
    config = Config(out=str(tmp_path / "run"), checkpoint_mirror=address, keep_checkpoints=1, display="none")

    async def resume() -> int | None:
        async with prepare(config, "grpo", {}) as prepared:
            return prepared.checkpoint and prepared.checkpoint.step

    async def begin() -> None:
        async with prepare(config, "grpo", {}) as prepared:
            await asyncio.to_thread(write, prepared.checkpoints, 8)
            CheckpointMirror(address).copy(prepared.checkpoints)

    asyncio.run(begin())
    weights = tmp_path / "run/checkpoints/step-000008/model/weights"
    weights.write_text("weights of 9")
    assert asyncio.run(resume()) == 8
    assert weights.read_text() == "weights of 8"

    # While the run's folder lacks it, its copy is not removed; nor is one overwritten by what is damaged.
    mirror, checkpoints = CheckpointMirror(address), Checkpoints(tmp_path / "run/checkpoints", keep=1)
    shutil.rmtree(weights.parent.parent)
    write(checkpoints, 4)
    mirror.copy(checkpoints)
    assert mirror._complete(mirror._folders()) == {"step-000004", "step-000008"}
    assert restored(mirror, tmp_path / "run")[0] == [4, 8]
    (weights.parent.parent / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-000008 is damaged"):
        mirror.copy(checkpoints)
    write(checkpoints, 8)
    assert mirror.copy(checkpoints) >= 0
    assert restored(mirror, tmp_path / "fresh")[0] == [8]


def test_a_first_copy_cut_short_is_restored_as_far_as_it_came(address: str, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 1, 2)
    (tmp_path / "run/checkpoints/step-000001/model/weights").unlink()
    with pytest.raises(FileNotFoundError):
        mirror.copy(checkpoints)
    assert restored(mirror, tmp_path / "fresh")[0] == [2]


def test_a_step_that_is_written_again_is_copied_again(address: str, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 1)
    mirror.copy(checkpoints)

    async def write_other() -> None:
        async with checkpoints.writing(1, {"step": 1}, bytes_needed=0) as folder:
            (folder / "model" / "weights").write_text("other weights")

    asyncio.run(write_other())
    assert mirror.copy(checkpoints) > 0
    assert restored(mirror, tmp_path / "fresh")[0] == [1]
    assert (tmp_path / "fresh/checkpoints/step-000001/model/weights").read_text() == "other weights"


def test_what_a_killed_run_left_half_written_is_not_restored_and_goes(address: str, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror(address), run_folder(tmp_path / "run", 1)
    mirror.copy(checkpoints)
    files, root = fsspec.url_to_fs(address, skip_instance_cache=True)
    files.makedirs(f"{root}/step-000002/model", exist_ok=True)
    files.pipe_file(f"{root}/step-000002/model/weights", b"weig")
    assert restored(mirror, tmp_path / "fresh") == ([1], ["step-000001 was copied from --checkpoint-mirror"])
    mirror.copy(checkpoints)
    files.invalidate_cache()
    assert {path.rpartition("/")[2] for path in files.ls(root, detail=False)} == {
        *("config.json", "versions.json", "writer"),
        "step-000001",
    }


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "reset"])
def test_a_copy_outlives_single_failures_of_a_store(kind: str, s3: S3, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror("s3://bucket/run"), run_folder(tmp_path / "run", 1, 2)
    for request in (("PUT", "step-000001/model/weights"), ("PUT", "step-000002/manifest.json"), ("GET", "list-type=2")):
        s3.fails(*request, kind)
    mirror.copy(checkpoints)
    assert len(s3.struck) == 3
    for request in (("GET", "step-000002/model/weights"), ("GET", "manifest.json"), ("HEAD", "model/weights")):
        s3.fails(*request, kind)
    assert restored(mirror, tmp_path / "fresh") == ([2], ["step-000002 was copied from --checkpoint-mirror"])
    assert len(s3.struck) == 6
    write(checkpoints, 3)
    s3.fails("POST", "delete", kind)
    mirror.copy(checkpoints)
    assert len(s3.struck) == 7
    assert mirror._folders() == {"step-000002", "step-000003"}


@pytest.mark.parametrize(
    ("path", "kind"), [("model/weights", "InternalError"), ("manifest.json", "reset"), ("config.json", "InternalError")]
)
def test_a_copy_that_a_store_refuses_is_told_and_not_taken(path: str, kind: str, s3: S3, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror("s3://bucket/run"), run_folder(tmp_path / "run", 1)
    mirror.copy(checkpoints)
    write(checkpoints, 2)
    s3.fails("PUT", path, kind, times=100)
    with pytest.raises(OSError, match=r"told to|endpoint"):
        mirror.copy(checkpoints)
    s3.fails_no_more()
    assert restored(mirror, tmp_path / "before")[0] == [1]
    mirror.copy(checkpoints)
    assert restored(mirror, tmp_path / "after")[0] == [2]

    s3.fails("GET", path, kind, times=100)
    (tmp_path / "fresh").mkdir()
    with pytest.raises(
        CheckpointError, match=r"--checkpoint-mirror cannot be read: .*(told to|not completed)"
    ) as raised:
        restored(mirror, tmp_path / "fresh")
    assert not [*(tmp_path / "fresh").rglob("step-*")]
    assert str(raised.value).count("\n") == 1, "a line and a hint"


WRONG = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "another"}, "does not match the signature"),
    "key": ({"AWS_ACCESS_KEY_ID": "AKIAANOTHERANOTHER12"}, "does not exist in our records"),
    "no key": ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "Unable to locate credentials"),
    "nobody there": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "Could not connect"),
    "malformed": ({"AWS_ENDPOINT_URL": "http://somebody:password@:x"}, "endpoint"),
}


@pytest.mark.parametrize(("environment", "message"), WRONG.values(), ids=WRONG)
def test_wrong_credentials_are_one_line_without_the_secret(
    environment: dict[str, str | None], message: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    with pytest.raises(CheckpointError, match=f"--checkpoint-mirror cannot be read: .*{message}") as raised:
        restored(CheckpointMirror("s3://bucket/run"), tmp_path / "fresh")
    assert str(raised.value).count("\n") == 1, "a line and a hint"
    for secret in (s3.environment["AWS_SECRET_ACCESS_KEY"], "another", "password"):
        assert secret not in str(raised.value)


def test_a_bucket_that_is_not_there_is_told_and_not_made(s3: S3, tmp_path: Path) -> None:
    mirror = CheckpointMirror("s3://another-bucket/run")
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        restored(mirror, tmp_path / "fresh")
    with pytest.raises(OSError, match="bucket does not exist"):
        mirror.copy(run_folder(tmp_path / "run", 1))
    assert s3.buckets() == ["bucket"]


def test_a_listing_that_lags_gives_an_older_copy_and_never_a_torn_one(s3: S3, tmp_path: Path) -> None:
    mirror, checkpoints = CheckpointMirror("s3://bucket/run"), run_folder(tmp_path / "run", 1, 2)
    mirror.copy(checkpoints)
    s3.lags = True
    assert mirror._folders() == {"step-000001", "step-000002"}
    write(checkpoints, 3)
    for _ in range(2):  # what is listed no more, or still, is copied and removed again
        mirror.copy(checkpoints)
    assert restored(mirror, tmp_path / "early")[0] == [2]
    s3.lags = False
    assert restored(mirror, tmp_path / "fresh")[0] == [3]
    assert mirror._folders() == {"step-000002", "step-000003"}
