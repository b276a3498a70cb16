"""The compiled loops, against Python's integers and torch's cast, at any alignment."""

import pytest
import torch

from forge_rl.weights.kernels import cast_rows, copy_rows, fingerprint_rows
from tests.test_fingerprints import formula

FIRST, FIRST_STEP = 1000, 7777


def memory(words: int, shift: int) -> torch.Tensor:
    """Zeros whose address is `shift` words past a multiple of 64 bytes."""
    found = torch.zeros(words + 16, dtype=torch.int64)
    skip = -found.data_ptr() // 8 % 8 + shift
    return found[skip : skip + words]


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
    wanted = source[:, :words]
    assert fingerprint_rows(flat, words + 1, *where) == expected(wanted.tolist())
    assert copy_rows(target.numpy(), step, flat, words + 1, *where) == expected(wanted.tolist())
    assert torch.equal(target.view(rows, step)[:, :words], wanted)
    assert (target.view(rows, step)[:, words:] == 0).all(), "nothing is written beside it"


@pytest.mark.parametrize("words", [*range(1, 10), 50, 4096, 4099])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_cast_fingerprints_what_it_wrote(words: int, shift: int):
    rows, step = 2, words + 4
    source = torch.randn(rows, words * 4, generator=torch.Generator().manual_seed(words))
    target = memory(rows * step, shift)
    bits = source.view(-1).view(torch.int32).numpy()
    found = cast_rows(target.numpy(), step, bits, words * 4, rows, words, FIRST, FIRST_STEP)
    written = target.view(rows, step)
    assert torch.equal(written[:, :words].contiguous().view(torch.bfloat16), source.bfloat16())
    assert found == expected(written[:, :words].tolist())
    assert (written[:, words:] == 0).all()


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
    found, floats = target.view(torch.bfloat16), source.view(torch.float32)
    nan = floats.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), floats[~nan].bfloat16().view(torch.int16))


def test_no_rows_do_nothing():
    target, source = memory(8, 0), torch.ones(8, dtype=torch.int64).numpy()
    assert copy_rows(target.numpy(), 8, source, 8, 0, 8, 0, 0) == 0
    assert copy_rows(target.numpy(), 8, source, 8, 3, 0, 0, 0) == 0
    assert (target == 0).all()
