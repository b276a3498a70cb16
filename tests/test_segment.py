"""Segments: another process reads the weights by reference, and nothing is left of them."""

import errno
import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from forge_rl.errors import WeightsError
from forge_rl.weights import segment as segment_module
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.segment import Segment, SegmentRef, read_segment
from tests.fakes import manifest_of, open_files

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).view(5, 3),
    "b": torch.tensor([True, False, True]),
    "c": torch.linspace(-1, 1, 77).bfloat16(),
    "d": torch.tensor([[1 << 40]]),
}
MANIFEST = manifest_of(4, TENSORS)


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    """Another process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def filled() -> Segment:
    segment = Segment(MANIFEST)
    for name, tensor in TENSORS.items():
        segment.tensor(name).copy_(tensor)
    return segment


def read_all(ref: SegmentRef, manifest: Manifest) -> dict[str, list]:
    return {entry.name: tensor.tolist() for entry, tensor in read_segment(ref, manifest)}


def read_and_scribble(ref: SegmentRef, manifest: Manifest) -> int:
    """Overwrite what was read; returns the pid."""
    for _, tensor in read_segment(ref, manifest):
        tensor.zero_()
    return os.getpid()


def test_another_process_reads_by_reference(other: ProcessPoolExecutor):
    with filled() as segment:
        assert other.submit(read_all, segment.ref, MANIFEST).result() == {n: t.tolist() for n, t in TENSORS.items()}


def test_entries_come_in_the_manifest_s_order_with_their_shapes():
    with filled() as segment:
        for (entry, tensor), expected in zip(read_segment(segment.ref, MANIFEST), MANIFEST.tensors, strict=True):
            assert entry == expected
            assert (tuple(tensor.shape), str(tensor.dtype)) == (entry.shape, f"torch.{entry.dtype}")


def test_a_reader_cannot_change_the_weights(other: ProcessPoolExecutor):
    with filled() as segment:
        assert other.submit(read_and_scribble, segment.ref, MANIFEST).result() != os.getpid()
        assert all(torch.equal(segment.tensor(name), tensor) for name, tensor in TENSORS.items())


def test_a_segment_that_is_gone_is_an_error_with_its_version(other: ProcessPoolExecutor):
    with filled() as segment:
        ref = segment.ref
    with pytest.raises(WeightsError, match=r"segment of version 4 cannot be opened \(No such file"):
        other.submit(read_all, ref, MANIFEST).result()


def test_a_process_that_is_gone_is_an_error():
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    with pytest.raises(WeightsError, match="the process that read it has ended"):
        list(read_segment(SegmentRef(pid=child.pid, fd=3), MANIFEST))


def test_a_segment_of_another_size_is_refused():
    other_manifest = manifest_of(5, {"a": torch.zeros(1000)})
    with filled() as segment, pytest.raises(WeightsError, match="version 5 has 384 bytes, its manifest says 4032"):
        list(read_segment(segment.ref, other_manifest))


def test_a_segment_with_no_room_is_refused_before_any_memory_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segment_module, "_available_bytes", lambda: 383)
    files = open_files()
    with pytest.raises(WeightsError, match="version 4 in shared memory: 384 bytes are needed, 383 are free") as caught:
        Segment(MANIFEST)
    assert "fewer generator replicas" in caught.value.mend
    assert open_files() == files


def test_a_refusal_of_the_system_is_told_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch):
    def refuse(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    files = open_files()
    with pytest.raises(WeightsError, match=r"384 bytes are needed \(No space left on device\)"):
        Segment(MANIFEST)
    assert open_files() == files


def test_the_free_memory_is_that_of_this_machine():
    page = os.sysconf("SC_PAGE_SIZE")
    assert 0 < segment_module._available_bytes() <= os.sysconf("SC_PHYS_PAGES") * page


def test_nothing_is_left_of_segments_and_their_readers():
    gc.collect()
    files, shared = open_files(), set(Path("/dev/shm").glob("*forge*"))
    for _ in range(3):
        with filled() as segment:
            held = list(read_segment(segment.ref, MANIFEST))
            first = next(read_segment(segment.ref, MANIFEST))  # a reader that stops early
        with pytest.raises(WeightsError):
            list(read_segment(segment.ref, MANIFEST))
        del held, first, segment
    gc.collect()
    assert open_files() == files
    assert set(Path("/dev/shm").glob("*forge*")) == shared


def test_a_reader_keeps_what_it_mapped_when_the_segment_closes():
    with filled() as segment:
        held = {entry.name: tensor for entry, tensor in read_segment(segment.ref, MANIFEST)}
    assert all(torch.equal(held[name], tensor) for name, tensor in TENSORS.items())


def test_an_empty_manifest_has_a_segment_too():
    empty = Manifest(version=0, tensors=())
    with Segment(empty) as segment:
        assert list(read_segment(segment.ref, empty)) == []
