"""Segments: private, checked by readers, mapped once, and nothing is left of them."""

import errno
import fcntl
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_rl.errors import WeightsError
from forge_rl.weights import segment as module
from forge_rl.weights.manifest import SegmentRef
from forge_rl.weights.segment import (
    PAGE,
    SegmentBucket,
    check,
    create,
    create_anonymous,
    readable,
    release,
    renew,
    writable,
)

SIZE = 5000


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """Another process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_mapped() -> Iterator[None]:
    """No test leaves a mapping to the next."""
    yield
    for path, _ in list(module._MAPPINGS._mappings):
        module._MAPPINGS.release(path)


def filled(path: Path) -> SegmentRef:
    ref = create(path, SIZE)
    writable(ref).copy_(pattern())
    return ref


def pattern() -> torch.Tensor:
    return (torch.arange(SIZE) % 251).to(torch.uint8)


def sum_of(ref: SegmentRef) -> tuple[int, int]:
    """The reader's process, and what it read."""
    total = int(readable(ref).sum())
    check(ref)
    return os.getpid(), total


def files_and_mappings(*names: str) -> tuple[int, int]:
    """How many open files of this process, and how many mappings, have one of ``names`` in their path.

    Files of other paths are left out, as what another test left behind may be closed at any time.
    """

    def of_these(paths: list[str]) -> int:
        return sum(any(name in path for name in names) for path in paths)

    gc.collect()
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return of_these(opened), of_these(mapped)


def test_another_process_reads_what_was_written(tmp_path: Path, other_process: ProcessPoolExecutor):
    pid, total = other_process.submit(sum_of, filled(tmp_path / "s")).result()
    assert (pid != os.getpid(), total) == (True, int(pattern().sum()))


def test_a_segment_is_this_user_s_alone_with_its_header_before_its_bytes(tmp_path: Path):
    previous = os.umask(0)
    try:
        ref = filled(tmp_path / "s")
    finally:
        os.umask(previous)
    status = os.stat(ref.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == PAGE + SIZE
    assert status.st_blocks * 512 >= PAGE + SIZE, "its memory is taken at once"
    raw = Path(ref.path).read_bytes()
    assert raw[:8] == b"forge_rl"
    assert raw[8:24].hex() == ref.token
    assert int.from_bytes(raw[24:32], "little") == ref.bytes == SIZE
    assert raw[PAGE:] == bytes(pattern().tolist())


def test_fresh_segments_are_zero_and_have_tokens_of_their_own(tmp_path: Path):
    refs = [create(tmp_path / str(i), SIZE) for i in range(20)]
    assert len({ref.token for ref in refs}) == 20
    assert not readable(refs[0]).any()


def test_an_existing_file_is_not_taken(tmp_path: Path):
    (tmp_path / "s").write_text("mine")
    with pytest.raises(FileExistsError):
        create(tmp_path / "s", SIZE)
    assert (tmp_path / "s").read_text() == "mine"


def test_a_segment_that_finds_no_room_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    names = (str(tmp_path), "forge_rl-weights")
    before = files_and_mappings(*names)
    for make in (lambda: create(tmp_path / "s", SIZE), lambda: create_anonymous(SIZE)):
        with pytest.raises(OSError, match="No space left"):
            make()
    assert list(tmp_path.iterdir()) == []
    assert files_and_mappings(*names) == before


def test_what_is_mapped_for_reading_cannot_be_written(tmp_path: Path):
    # A write ends the process by a signal, so that it is tried in one of its own.
    ref = filled(tmp_path / "s")
    script = (
        "import sys\n"
        "from forge_rl.weights.manifest import SegmentRef\n"
        "from forge_rl.weights.segment import readable\n"
        f"values = readable({ref!r})\n"
        "print(int(values[0]), flush=True)\n"
        "values[0] = 77\n"
        "print('written')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.split() == ["0"], done.stderr
    assert done.returncode == -signal.SIGSEGV
    assert torch.equal(readable(ref), pattern())


def test_a_reader_sees_later_writes_through_the_same_mapping(tmp_path: Path):
    ref = filled(tmp_path / "s")
    values = readable(ref)
    writable(ref).fill_(9)
    assert (values == 9).all()


def test_a_segment_that_is_gone_is_told(tmp_path: Path):
    ref = filled(tmp_path / "s")
    mapped_values = readable(ref)
    Path(ref.path).unlink()
    for use in (readable, writable, check):
        with pytest.raises(
            WeightsError, match=r"cannot be opened \(No such file or directory\): it was freed"
        ) as caught:
            use(ref)
        assert "publish the version again" in caught.value.hint
    assert torch.equal(mapped_values, pattern()), "what was mapped stays readable"


def test_a_segment_that_was_freed_is_refused(tmp_path: Path, other_process: ProcessPoolExecutor):
    ref = filled(tmp_path / "s")
    assert other_process.submit(sum_of, ref).result()[1]
    renewed_ref = renew(ref)
    assert (renewed_ref.path, renewed_ref.bytes) == (ref.path, ref.bytes)
    assert renewed_ref.token != ref.token
    for use in (readable, writable, check):
        with pytest.raises(WeightsError, match="was freed and holds another version by now"):
            use(ref)
    # The other process has it mapped already, and notices all the same.
    with pytest.raises(WeightsError, match="was freed and holds another version by now"):
        other_process.submit(sum_of, ref).result()
    assert other_process.submit(sum_of, renewed_ref).result()[1] == int(pattern().sum())


def test_a_bucket_that_is_freed_while_it_is_read_is_refused(tmp_path: Path):
    ref = filled(tmp_path / "s")
    with (
        pytest.raises(WeightsError, match="was freed and holds another version"),
        SegmentBucket(segment=ref, entries=()).open(),
    ):
        renew(ref)


def test_a_segment_of_another_size_is_refused(tmp_path: Path):
    ref = filled(tmp_path / "s")
    with pytest.raises(WeightsError, match=f"has {SIZE} bytes, its manifest says {SIZE + 1}"):
        readable(replace(ref, bytes=SIZE + 1))
    os.truncate(ref.path, PAGE)
    with pytest.raises(WeightsError, match=f"has 0 bytes, its manifest says {SIZE}"):
        readable(ref)


def test_a_mapped_segment_is_not_taken_for_one_of_another_size(tmp_path: Path):
    ref = filled(tmp_path / "s")
    readable(ref)
    with pytest.raises(WeightsError, match="holds another version by now"):
        readable(replace(ref, bytes=SIZE - 8))


def test_what_is_no_segment_is_refused(tmp_path: Path):
    path = tmp_path / "s"
    path.write_bytes(bytes(PAGE + SIZE))
    path.chmod(0o600)
    with pytest.raises(WeightsError, match="is not a segment of weights"):
        readable(SegmentRef(path=str(path), bytes=SIZE, token="00" * 16))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o601])
def test_a_segment_that_others_could_touch_is_refused(tmp_path: Path, mode: int):
    ref = filled(tmp_path / "s")
    release(ref)
    Path(ref.path).chmod(mode)
    with pytest.raises(WeightsError, match=f"is not this user's alone: owner {os.geteuid()}, mode {mode:o}"):
        readable(ref)


def test_a_segment_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ref = filled(tmp_path / "s")
    release(ref)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WeightsError, match=f"is not this user's alone: owner {os.getuid()}, mode 600"):
        readable(ref)


def test_a_link_to_a_segment_is_refused(tmp_path: Path):
    ref = filled(tmp_path / "s")
    (tmp_path / "link").symlink_to(ref.path)
    linked = replace(ref, path=str(tmp_path / "link"))
    for use in (readable, writable):
        with pytest.raises(WeightsError, match="cannot be opened"):
            use(linked)
    with pytest.raises(OSError, match="symbolic links"):
        renew(linked)


def test_refused_segments_leave_no_file_open(tmp_path: Path):
    ref = filled(tmp_path / "s")
    release(ref)
    before = files_and_mappings(ref.path)
    Path(ref.path).chmod(0o644)
    for wrong in (ref, replace(ref, bytes=1), replace(ref, path=str(tmp_path))):
        with pytest.raises(WeightsError):
            readable(wrong)
    assert files_and_mappings(ref.path) == before


def test_a_segment_is_mapped_once_however_often_it_is_read_and_renewed(tmp_path: Path):
    ref = filled(tmp_path / "s")
    first = readable(ref)
    before = files_and_mappings(ref.path)
    for _ in range(3):
        ref = renew(ref)
        assert readable(ref).data_ptr() == first.data_ptr()
        check(ref)
    assert files_and_mappings(ref.path) == before
    del first
    release(ref)
    release(ref)  # nothing happens
    assert files_and_mappings(ref.path)[1] == 0


def test_another_file_of_the_same_name_is_mapped_anew(tmp_path: Path):
    old = filled(tmp_path / "s")
    mapped_values = readable(old)
    before = files_and_mappings(old.path)
    keep = os.open(old.path, os.O_RDONLY)  # so that the new file does not get the old one's inode
    Path(old.path).unlink()
    new = create(tmp_path / "s", SIZE)
    assert not readable(new).any()
    with pytest.raises(WeightsError, match="holds another version by now"):
        readable(old)
    assert torch.equal(mapped_values, pattern())
    del mapped_values
    os.close(keep)
    writable(new)
    assert files_and_mappings(old.path) == before


def test_mappings_of_removed_segments_go_when_the_next_one_is_mapped(tmp_path: Path):
    before, _ = files_and_mappings(str(tmp_path))
    refs = [filled(tmp_path / f"s{i}") for i in range(3)]
    with_three, mapped = files_and_mappings(str(tmp_path))
    assert mapped == 3
    file_count = (with_three - before) // 3
    for ref in refs:
        Path(ref.path).unlink()
    segment_ref = filled(tmp_path / "s3")
    assert files_and_mappings(str(tmp_path)) == (before + file_count, 1)
    release(segment_ref)
    assert files_and_mappings(str(tmp_path)) == (before, 0)


def test_an_anonymous_segment_is_read_elsewhere_while_it_is_open(other_process: ProcessPoolExecutor):
    before = files_and_mappings("forge_rl-weights")
    for number in range(4):
        ref, fd = create_anonymous(SIZE)
        writable(ref).fill_(number)
        assert other_process.submit(sum_of, ref).result()[1] == number * SIZE
        assert int(readable(ref)[-1]) == number
        release(ref)
        os.close(fd)
        with pytest.raises(WeightsError, match="cannot be opened"):
            other_process.submit(sum_of, ref).result()
        with pytest.raises(WeightsError, match="cannot be opened"):
            readable(ref)
    assert files_and_mappings("forge_rl-weights") == before


def test_readers_of_anonymous_segments_keep_nothing_of_them(other_process: ProcessPoolExecutor):
    mapping_counts = []
    number = fcntl.fcntl(0, fcntl.F_DUPFD, 500)
    for with_check in (True, True, True, False, False, False):
        ref, fd = create_anonymous(SIZE)
        os.dup2(fd, number)
        os.close(fd)
        # Of the same name each time, also if another thread has opened a file meanwhile.
        ref = replace(ref, path=ref.path.replace(f"/fd/{fd}", f"/fd/{number}"))
        other_process.submit(sum_of if with_check else readable_sum, ref).result()
        os.close(number)
        mapping_counts.append(other_process.submit(files_and_mappings, "forge_rl-weights").result())
    assert mapping_counts[:3] == [(mapping_counts[0][0], 0)] * 3
    # One that does not look again keeps the last one only, until the next takes its place.
    assert mapping_counts[3:] == [(mapping_counts[3][0], 1)] * 3


def readable_sum(ref: SegmentRef) -> int:
    return int(readable(ref).sum())


@pytest.mark.parametrize(("may_write", "flags"), [(True, 0), (False, 8)])
def test_pages_are_pinned_under_cuda_as_long_as_their_segment_lives(
    may_write: bool, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []

    class Cudart:
        def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
            calls.append((begin, size, flags))
            return 0

        def cudaHostUnregister(self, begin: int) -> int:
            calls.append((begin,))
            return 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    ref = create(tmp_path / "segment", 5000)
    memory = (writable if may_write else readable)(ref)
    begin = memory.data_ptr() - PAGE
    release(ref)
    assert calls == [(begin, PAGE + 5000, flags), (begin,)]
    nameless, fd = create_anonymous(100)
    readable(nameless)
    release(nameless)
    os.close(fd)
    assert len(calls) == 2
