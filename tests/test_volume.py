"""Volumes: all or no segments, room that is checked before it is taken, and leftovers that the next one removes."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_rl.errors import WeightsError
from forge_rl.weights import volume as module
from forge_rl.weights.manifest import SegmentRef
from forge_rl.weights.segment import PAGE, check, readable, writable
from forge_rl.weights.volume import Volume, problem, reclaim, writing
from tests.fake_host import bytes_of

SIZES = {"1/0": 3 * PAGE, "1/1": 100}
TAKEN = 4 * PAGE + 2 * PAGE
"""Bytes of SIZES, with a page for each header."""


@contextlib.contextmanager
def opened(root: Path) -> Iterator[Volume]:
    volume = Volume(root)
    try:
        yield volume
    finally:
        volume.close()


def files(volume: Volume) -> set[str]:
    return {str(path) for path in volume.folder.iterdir()} - {str(volume.folder / "lock")}


def paths(refs: dict[str, SegmentRef]) -> set[str]:
    return {ref.path for ref in refs.values()}


def test_segments_are_private_and_have_random_names(shm: Path):
    with opened(shm) as volume:
        refs = volume.reserve(SIZES)
        assert [ref.bytes for ref in refs.values()] == list(SIZES.values())
        assert {key: volume.find(key) for key in (*SIZES, "9/9")} == {**refs, "9/9": None}
        assert files(volume) == paths(refs)
        assert bytes_of(volume) == 3 * PAGE + 100
        home = volume.folder.parent
        assert home == shm / f"forge_rl-{os.geteuid()}"
        for folder in (home, volume.folder):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in map(Path, files(volume)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert re.fullmatch("[0-9a-f]{32}", path.name)


def test_what_is_freed_is_used_again_and_refused_to_those_who_knew_it(shm: Path):
    with opened(shm) as volume:
        first = volume.reserve(SIZES)
        for ref in first.values():
            readable(ref)
        assert volume.free(["1/0", "1/1", "8/8"]) == list(first.values())
        assert volume.find("1/0") is None
        for ref in first.values():
            with pytest.raises(WeightsError, match="was freed and holds another version by now"):
                readable(ref)
        second = volume.reserve({"2/0": SIZES["1/1"], "2/1": SIZES["1/0"]})
        assert paths(second) == paths(first)
        assert bytes_of(volume) == 3 * PAGE + 100
        for ref in first.values():
            with pytest.raises(WeightsError, match="was freed"):
                check(ref)
        for ref in second.values():
            assert readable(ref).numel() == ref.bytes


def test_memory_of_sizes_that_are_no_longer_asked_for_is_given_back(shm: Path):
    with opened(shm) as volume:
        volume.reserve(SIZES)
        volume.free(SIZES)
        assert bytes_of(volume) == 3 * PAGE + 100
        refs = volume.reserve({"2/0": 2 * PAGE})
        assert bytes_of(volume) == 2 * PAGE
        assert files(volume) == paths(refs)


def test_a_key_is_reserved_once(shm: Path):
    with opened(shm) as volume:
        volume.reserve(SIZES)
        with pytest.raises(WeightsError, match="bucket 1/1 is held already"):
            volume.reserve({"2/0": PAGE, "1/1": PAGE})
        assert volume.find("2/0") is None
        assert len(files(volume)) == 2


def test_memory_freed_during_a_write_is_not_reused_before_its_end(shm: Path):
    with opened(shm) as volume:
        first = volume.reserve(SIZES)
        with writing(volume.folder):
            late = writable(first["1/0"])
            volume.free(SIZES)
            second = volume.reserve({"2/0": SIZES["1/0"], "2/1": SIZES["1/1"]})
            assert not paths(first) & paths(second)
            assert bytes_of(volume) == 2 * (3 * PAGE + 100)
            late.fill_(7)  # by a rank of the version that was given up
            with pytest.raises(WeightsError, match="was freed"):
                check(first["1/0"])
            assert not readable(second["2/0"]).any()
        third = volume.reserve({"3/0": SIZES["1/0"], "3/1": SIZES["1/1"]})
        assert paths(third) == paths(first)
        assert files(volume) == paths(first) | paths(second)


def test_whoever_begins_to_write_after_the_free_is_refused(shm: Path):
    with opened(shm) as volume:
        first = volume.reserve(SIZES)
        volume.free(SIZES)
        with writing(volume.folder), pytest.raises(WeightsError, match="was freed"):
            writable(first["1/0"])
    with pytest.raises(WeightsError, match="No such file or directory"), writing(volume.folder):
        pass


def test_a_segment_that_somebody_removed_is_made_anew(shm: Path):
    with opened(shm) as volume:
        first = volume.reserve(SIZES)
        Path(first["1/0"].path).unlink()
        volume.free(SIZES)
        spare = Path(first["1/1"].path)
        spare.unlink()
        second = volume.reserve({"2/0": SIZES["1/0"], "2/1": SIZES["1/1"]})
        assert files(volume) == paths(second)
        assert all(readable(ref).numel() == ref.bytes for ref in second.values())


def test_too_little_room_is_told_before_anything_is_taken(small_shm: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(small_shm) as volume:
        first = volume.reserve(SIZES)
        writable(first["1/0"]).fill_(3)
        free = module.free_bytes(small_shm)
        assert TAKEN <= 16 * PAGE - free < TAKEN + 2 * PAGE
        message = f"no room for a version of the weights in {small_shm}: {12 * PAGE} bytes are needed, {free} are free"
        with monkeypatch.context() as patch:
            patch.delattr(module, "create")
            with pytest.raises(WeightsError, match=message) as caught:
                volume.reserve({"2/0": 9 * PAGE, "2/1": 1})
        assert "--shm-size" in caught.value.hint
        assert module.free_bytes(small_shm) == free
        assert files(volume) == paths(first)
        assert set(readable(first["1/0"]).tolist()) == {3}
        volume.free(SIZES)
        second = volume.reserve({"2/0": 9 * PAGE, "2/1": 1})
        assert files(volume) == paths(second)


def test_room_that_others_take_meanwhile_leaves_nothing(small_shm: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(small_shm) as volume:
        first = volume.reserve(SIZES)
        free = module.free_bytes(small_shm)
        monkeypatch.setattr(module, "free_bytes", lambda root, real=module.free_bytes: real(root) + (1 << 30))
        with pytest.raises(WeightsError, match=f"{12 * PAGE} bytes are needed"):
            volume.reserve({"2/0": PAGE, "2/1": PAGE, "2/2": 7 * PAGE})  # the first two do fit
        monkeypatch.undo()
        assert module.free_bytes(small_shm) == free
        assert files(volume) == paths(first)
        assert [volume.find(key) for key in ("2/0", "2/1", "2/2")] == [None] * 3
        volume.reserve({"2/0": PAGE, "2/1": PAGE})


def test_spare_segments_go_too_when_the_rest_finds_no_room(small_shm: Path):
    with opened(small_shm) as volume:
        volume.reserve(SIZES)
        volume.free(SIZES)
        with pytest.raises(WeightsError, match="no room"):
            volume.reserve({"2/0": SIZES["1/0"], "2/1": 20 * PAGE})
        assert files(volume) == set()
        assert bytes_of(volume) == 0


def test_segments_that_fail_otherwise_are_not_called_too_large(shm: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, size: int) -> SegmentRef:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with opened(shm) as volume:
        monkeypatch.setattr(module, "create", refuse)
        with pytest.raises(WeightsError, match=f"segments cannot be made in {shm}: Permission denied"):
            volume.reserve(SIZES)


def test_a_folder_that_cannot_hold_weights_is_told(shm: Path, small_shm: Path):
    assert problem(shm, 0) is None
    assert problem(shm / "no", 0) == f"{shm / 'no'} is no folder"
    assert re.fullmatch(rf"{small_shm} has 0.0 GiB free, 1.0 are needed", problem(small_shm, 1 << 30) or "")
    with pytest.raises(WeightsError, match=f"{shm / 'no'} is no folder"):
        Volume(shm / "no")


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_home_that_others_can_enter_is_refused(shm: Path, mode: int):
    home = shm / f"forge_rl-{os.geteuid()}"
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(WeightsError, match=f"{home} is not this user's alone"):
        Volume(shm)
    assert list(home.iterdir()) == []
    home.rmdir()


def test_a_home_of_another_user_is_refused(shm: Path):
    home = shm / f"forge_rl-{os.geteuid()}"
    home.mkdir(mode=0o700)
    try:
        os.chown(home, 12345, -1)
    except PermissionError:
        home.rmdir()
        pytest.skip("only root can give a folder to another user")
    with pytest.raises(WeightsError, match="is not this user's alone"):
        Volume(shm)
    assert list(home.iterdir()) == []
    home.rmdir()


def test_a_home_that_is_a_link_is_refused(shm: Path, tmp_path: Path):
    home = shm / f"forge_rl-{os.geteuid()}"
    tmp_path.chmod(0o700)
    home.symlink_to(tmp_path)
    with pytest.raises(WeightsError, match="is not this user's alone"):
        Volume(shm)
    assert list(tmp_path.iterdir()) == []
    home.unlink()


HOLD = """
import sys
from pathlib import Path
from forge_rl.weights.segment import writable
from forge_rl.weights.volume import Volume
volume = Volume(Path(sys.argv[1]))
for ref in volume.reserve({"1/0": 3 * 4096, "1/1": 100}).values():
    writable(ref).fill_(1)
print(volume.folder, volume.reclaimed, flush=True)
sys.stdin.read()
volume.close()
"""


@contextlib.contextmanager
def holder(shm: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """A process that holds a volume until its input ends; with the folder, and what it reclaimed."""
    command = [sys.executable, "-c", HOLD, str(shm)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder, reclaimed = process.stdout.readline().split()
        try:
            yield process, Path(folder), int(reclaimed)
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(20)


def test_a_killed_runs_segments_are_reclaimed_but_no_living_ones(shm: Path):
    with holder(shm) as (killed, left, _), holder(shm) as (_, living, reclaimed):
        assert reclaimed == 0
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert len(list(left.iterdir())) == 3
        with opened(shm) as volume:
            assert volume.reclaimed == 3 * PAGE + 100 + 2 * PAGE
            assert not left.exists()
            assert len(list(living.iterdir())) == 3
            volume.reserve(SIZES)
            assert reclaim(shm) == 0  # nor are this one's
            assert len(files(volume)) == 2
        assert living.is_dir()


def test_a_killed_run_s_leftovers_go_without_a_new_volume(shm: Path):
    with holder(shm) as (killed, _, _):
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert reclaim(shm) == 3 * PAGE + 100 + 2 * PAGE
        assert list(shm.iterdir()) == []


def test_a_folder_whose_process_was_killed_while_it_made_it_is_reclaimed(shm: Path):
    home = shm / f"forge_rl-{os.geteuid()}"
    (home / "0123").mkdir(parents=True)
    home.chmod(0o700)
    with opened(shm):
        assert not (home / "0123").exists()


def test_readers_keep_what_they_have_mapped_when_the_volume_is_gone(shm: Path):
    with holder(shm) as (killed, folder, _):
        (segment,) = (path for path in folder.iterdir() if path.stat().st_size == 4 * PAGE)
        token = segment.read_bytes()[8:24].hex()
        ref = SegmentRef(path=str(segment), bytes=3 * PAGE, token=token)
        memory = readable(ref)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert reclaim(shm) > 0
        assert memory.sum() == 3 * PAGE
        with pytest.raises(WeightsError, match="its store has ended"):
            check(ref)


def test_a_forked_child_does_not_keep_the_folder_of_a_volume_that_closes(shm: Path):
    with opened(shm):
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
    try:
        assert list(shm.iterdir()) == []
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("before", ["os.open", "fcntl.flock"])
def test_a_home_that_another_process_removes_meanwhile_is_made_again(
    before: str, shm: Path, monkeypatch: pytest.MonkeyPatch
):
    home = shm / f"forge_rl-{os.geteuid()}"
    real = {"os.open": os.open, "fcntl.flock": fcntl.flock}[before]

    def vanish(*args: object) -> object:
        monkeypatch.undo()
        home.rmdir()
        return real(*args)  # type: ignore[operator]

    monkeypatch.setattr(before, vanish)
    with opened(shm) as volume:
        assert volume.folder.is_dir()
        assert volume.folder.parent == home


def test_a_home_with_another_volume_stays(shm: Path):
    with opened(shm) as other:
        with opened(shm):
            pass
        assert reclaim(shm) == 0
        assert other.folder.is_dir()
    assert list(shm.iterdir()) == []


def open_and_close(shm: Path, rounds: int) -> None:
    for number in range(rounds):
        volume = Volume(shm)
        refs = volume.reserve({"1/0": 100, "1/1": 200})
        assert files(volume) == paths(refs)
        if number % 3 == 0:
            os.close(volume._lock)  # as if it had been killed
        else:
            volume.close()
    reclaim(shm)


def test_many_processes_that_come_and_go_at_once_leave_nothing(shm: Path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=open_and_close, args=(shm, 30)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
