"""The compiled loops, against Python's integers and torch's cast, at any alignment."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.weights.kernels import cast_rows, copy_rows, fingerprint_rows
from tests.test_fingerprints import formula

FIRST, FIRST_STEP = 1000, 7777


def memory(words: int, shift: int) -> torch.Tensor:
    """Zeros whose address is `shift` words past a multiple of 64 bytes."""
    buffer = torch.zeros(words + 16, dtype=torch.int64)
    skip = -buffer.data_ptr() // 8 % 8 + shift
    return buffer[skip : skip + words]


def expected(values: list[list[int]]) -> int:
    return formula(
        {FIRST + row * FIRST_STEP + i: word for row, words in enumerate(values) for i, word in enumerate(words)}
    )


@pytest.mark.parametrize("words", [*range(1, 13), 64, 101])
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_words_are_copied_and_fingerprinted(words: int, shift: int, pad: int, dtype: torch.dtype):
    rows, step = 3, words + pad
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(words)
    source = torch.randint(limits.min, limits.max, (rows, words + 1), generator=generator, dtype=dtype)
    flat, where = source.view(-1).numpy(), (rows, words, FIRST, FIRST_STEP)
    target = memory(rows * step, shift).view(-1).to(dtype) if dtype != torch.int64 else memory(rows * step, shift)
    words_read = source[:, :words]
    assert fingerprint_rows(flat, words + 1, *where) == expected(words_read.tolist())
    assert copy_rows(target.numpy(), step, flat, words + 1, *where) == expected(words_read.tolist())
    assert torch.equal(target.view(rows, step)[:, :words], words_read)
    assert (target.view(rows, step)[:, words:] == 0).all(), "nothing is written beside it"


@pytest.mark.parametrize("words", [*range(1, 10), 50, 4096, 4099])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_cast_fingerprints_what_it_wrote(words: int, shift: int):
    rows, step = 2, words + 4
    source = torch.randn(rows, words * 4, generator=torch.Generator().manual_seed(words))
    target = memory(rows * step, shift)
    bits = source.view(-1).view(torch.int32).numpy()
    fingerprint = cast_rows(target.numpy(), step, bits, words * 4, rows, words, FIRST, FIRST_STEP)
    target_rows = target.view(rows, step)
    assert torch.equal(target_rows[:, :words].contiguous().view(torch.bfloat16), source.bfloat16())
    assert fingerprint == expected(target_rows[:, :words].tolist())
    assert (target_rows[:, words:] == 0).all()


@pytest.mark.parametrize("rows", [1, 1 << 14])
def test_every_float_rounds_as_torch_rounds_it(rows: int):
    # Every upper half, infinities and NaNs among them, with the lower halves around a tie.
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    source = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    words = source.numel() // 4 // rows
    target = memory(words * rows, 0)
    cast_rows(target.numpy(), words, source.numpy(), 4 * words, rows, words, 0, 0)
    target_values, floats = target.view(torch.bfloat16), source.view(torch.float32)
    nan = floats.isnan()
    assert torch.equal(target_values.isnan(), nan)
    assert torch.equal(target_values[~nan].view(torch.int16), floats[~nan].bfloat16().view(torch.int16))


def test_no_rows_do_nothing():
    target, source = memory(8, 0), torch.ones(8, dtype=torch.int64).numpy()
    assert copy_rows(target.numpy(), 8, source, 8, 0, 8, 0, 0) == 0
    assert copy_rows(target.numpy(), 8, source, 8, 3, 0, 0, 0) == 0
    assert (target == 0).all()


@given(
    words=st.integers(0, 300),
    rows=st.integers(1, 3),
    pads=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    shifts=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    first=st.integers(0, 1 << 40),
    first_step=st.integers(0, 1 << 34),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_lines_and_the_words_around_them_make_one_fingerprint(words, rows, pads, shifts, first, first_step, seed):
    source_step, target_step = words + pads[0], words + pads[1]
    source, target = memory(rows * source_step, shifts[0]), memory(rows * target_step + 8, shifts[1])
    source.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(seed))
    expected_rows = [source[row * source_step :][:words] for row in range(rows)]
    sums = 0
    for row, row_words in enumerate(expected_rows):
        sums += formula({first + row * first_step + item: word for item, word in enumerate(row_words.tolist())})
    where = rows, words, first, first_step
    assert fingerprint_rows(source.numpy(), source_step, *where) == sums % (1 << 64)
    assert copy_rows(target.numpy(), target_step, source.numpy(), source_step, *where) == sums % (1 << 64)
    for row in range(rows):
        assert torch.equal(target[row * target_step :][:words], expected_rows[row])
        assert (target[row * target_step + words : (row + 1) * target_step] == 0).all()
    assert (target[rows * target_step :] == 0).all()


@given(
    words=st.integers(0, 100),
    pads=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 7)),
    first=st.integers(0, 1 << 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_floats_at_any_address_are_cast_and_fingerprinted(words, pads, shifts, first, seed):
    source_step, target_step = 4 * words + pads[0], words + pads[1]
    source = memory(source_step + 16, 0).view(torch.int32)[shifts[0] :][: 2 * source_step]
    source.random_(-(1 << 31), 1 << 31, generator=torch.Generator().manual_seed(seed))
    target = memory(2 * target_step + 8, shifts[1])
    fingerprint = cast_rows(target.numpy(), target_step, source.numpy(), source_step, 2, words, first, 12345)
    total = 0
    for row in range(2):
        row_words = target[row * target_step :][:words]
        floats = source[row * source_step :][: 4 * words].view(torch.float32)
        assert torch.equal(row_words.view(torch.bfloat16).isnan(), floats.isnan())
        numbers = ~floats.isnan()
        assert torch.equal(row_words.view(torch.int16)[numbers], floats.bfloat16().view(torch.int16)[numbers])
        total += formula({first + row * 12345 + item: word for item, word in enumerate(row_words.tolist())})
        assert (target[row * target_step + words : (row + 1) * target_step] == 0).all()
    assert fingerprint == total % (1 << 64)


def test_words_at_an_odd_address_are_copied_one_by_one():
    memories = [np.zeros(8 * 100 + 1, np.uint8)[1:].view(np.int64) for _ in range(2)]
    source, target = memories
    source[:] = np.arange(-50, 50) * 0x123456789ABCDE
    assert copy_rows(target, 100, source, 100, 1, 100, FIRST, 0) == expected([source.tolist()])
    assert (target == source).all()


@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_processors_without_avx_512_write_and_add_up_the_same(processor: str, tmp_path: Path):
    program = """
import numpy as np
from forge_rl.weights.kernels import cast_rows, copy_rows
words, floats = np.arange(500) * 0x123456789ABCDE, np.arange(2000, dtype=np.int32) * 0x12345
target = np.zeros(500, np.int64)
results = [copy_rows(target, 0, words, 0, 1, 500, 7, 0)]
assert (target == words).all()
results += [cast_rows(target, 0, floats, 0, 1, 500, 7, 0), *target]
print(*map(int, results))
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    output = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment)
    copied, cast, *written_words = map(int, output.split())
    words, floats = np.arange(500) * 0x123456789ABCDE, np.arange(2000, dtype=np.int32) * 0x12345
    expected_written = torch.from_numpy(floats).view(torch.float32).bfloat16().view(torch.int64).tolist()
    assert written_words == expected_written
    assert copied == formula({7 + item: word for item, word in enumerate(words.tolist())})
    assert cast == formula({7 + item: word for item, word in enumerate(written_words)})
