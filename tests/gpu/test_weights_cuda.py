"""Weights on CUDA: the same fingerprints as on the CPU, and the same bytes in shared memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forge_rl.weights import segment
from forge_rl.weights.fingerprints import Move, combine, fingerprint, move
from forge_rl.weights.slices import TensorSlice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (4096,), (3, 64), (5, 33), (4, 24, 128), (9000, 2048)])
def test_a_fingerprint_is_that_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(values.cuda(), shape) == fingerprint(values, shape)


def test_blocks_of_a_tensor_add_up():
    values = torch.randn(64, 256)
    quarters = [TensorSlice(start=(row, column), size=(32, 128)) for row in (0, 32) for column in (0, 128)]
    parts = [fingerprint(block.of(values).cuda(), (64, 256), block) for block in quarters]
    assert combine(parts) == fingerprint(values, (64, 256))


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Folder in shared memory: CUDA may refuse to pin the pages of a file on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tests-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
def test_a_segment_gets_the_bytes_and_an_engine_reads_them(published: torch.dtype, shared_memory: Path):
    torch.zeros(1, device="cuda")
    values = [torch.randn(2048, 1024) for _ in range(3)]
    size = values[0].numel() * published.itemsize
    ref = segment.create(shared_memory / "segment", size * len(values))
    memory = segment.writable(ref)
    print(f"pinned to write: {memory.is_pinned()}, to read: {segment.readable(ref).is_pinned()}")  # the driver's choice
    assert segment.writable(ref).data_ptr() == memory.data_ptr()
    places = [part.view(published).view(2048, 1024) for part in memory.split(size)]
    full_slice = TensorSlice.whole((2048, 1024))
    fingerprints = move(
        [Move(to, tensor.cuda(), (2048, 1024), full_slice) for to, tensor in zip(places, values, strict=True)]
    )
    for place, tensor, value in zip(places, values, fingerprints, strict=True):
        assert torch.equal(place, tensor.to(published))
        assert value == fingerprint(tensor.to(published), (2048, 1024))
    read = segment.readable(ref).view(published).view(3, 2048, 1024).cuda()
    assert torch.equal(read.cpu(), torch.stack([value.to(published) for value in values]))
    segment.release(ref)
    assert not memory.is_pinned()
