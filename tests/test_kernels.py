"""The compiled loops, against Python's integers and torch's cast, at any alignment."""

import pytest
import torch

from forge_rl.weights.fingerprints import CAST, COPY, HASH, PLAIN
from forge_rl.weights.kernels import run_rows
from tests.test_fingerprints import formula

FIRST, FIRST_STEP = 1000, 777


def aligned(words: int, shift: int) -> torch.Tensor:
    """Memory for so many words, whose address is `shift` words past a multiple of 64."""
    memory = torch.zeros(words + 16, dtype=torch.int64)
    skip = -memory.data_ptr() // 8 % 8 + shift
    return memory[skip : skip + words]


def run(mode: int, target: torch.Tensor, source: torch.Tensor, rows: int, words: int, steps: tuple[int, int]) -> int:
    """Rows from the tensors' beginnings; steps are bytes from a row to the next, in the target and the source."""
    return int(run_rows(mode, target.data_ptr(), source.data_ptr(), *steps, rows, words, FIRST, FIRST_STEP))


def expected(values: list[list[int]]) -> int:
    return formula(
        {FIRST + row * FIRST_STEP + i: word for row, words in enumerate(values) for i, word in enumerate(words)}
    )


@pytest.mark.parametrize("words", [*range(1, 13), 64, 101])
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("pad", [0, 1, 4])
def test_words_are_copied_and_fingerprinted(words: int, shift: int, pad: int):
    rows, step = 3, words + pad
    generator = torch.Generator().manual_seed(words)
    source = torch.randint(-(1 << 63), (1 << 63) - 1, (rows, words + 1), generator=generator)
    wanted = source[:, :words]
    fingerprint = expected(wanted.tolist())
    for mode in (HASH, COPY, PLAIN):
        memory = aligned(rows * step, shift)
        target = memory.view(rows, step)
        found = run(mode, target, source, rows, words, (step * 8, (words + 1) * 8))
        assert found == (0 if mode == PLAIN else fingerprint)
        assert torch.equal(target[:, :words], torch.zeros_like(wanted) if mode == HASH else wanted)
        assert (target[:, words:] == 0).all(), "nothing is written beside it"


@pytest.mark.parametrize("words", [*range(1, 10), 50])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_cast_fingerprints_what_it_wrote(words: int, shift: int):
    rows = 2
    source = torch.randn(rows, words * 4, generator=torch.Generator().manual_seed(words))
    target = aligned(rows * (words + 4), shift).view(rows, words + 4)
    found = run(CAST, target, source, rows, words, ((words + 4) * 8, words * 16))
    assert torch.equal(target[:, :words].contiguous().view(torch.bfloat16), source.bfloat16())
    assert found == expected(target[:, :words].tolist())
    assert (target[:, words:] == 0).all()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_float_rounds_as_torch_rounds_it(shift: int, one_by_one: bool):
    # Every upper half, infinities and NaNs among them, with the lower halves around a tie.
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    source = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    words = source.numel() // 4
    target = aligned(words, shift)
    if one_by_one:  # each word a row of its own: the loop for what is left of a row
        run(CAST, target, source, words, 1, (8, 16))
    else:
        run(CAST, target, source, 1, words, (0, 0))
    found = target.view(torch.bfloat16)
    nan = source.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), source[~nan].bfloat16().view(torch.int16))


def test_no_rows_do_nothing():
    memory = aligned(8, 0)
    assert run(COPY, memory, torch.ones(8, dtype=torch.int64), 0, 8, (64, 64)) == 0
    assert run(COPY, memory, torch.ones(8, dtype=torch.int64), 3, 0, (64, 64)) == 0
    assert (memory == 0).all()
