"""Fingerprints: a value worked by hand, additivity over every split by rows, and what they notice."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.weights.fingerprint import combine, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]


def signed(value: int) -> int:
    """Two's complement of 64 bits."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def reference(words: list[int]) -> int:
    """The formula in Python's integers: sum of mix(word xor index * golden ratio)."""
    total = 0
    for index, word in enumerate(words):
        mixed = signed(index * 0x9E3779B97F4A7C15) ^ word
        mixed = signed((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9)
        total += mixed ^ (mixed >> 27)
    return total % (1 << 64)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All bit patterns, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def test_a_value_worked_by_hand():
    # 1 xor 0 = 1; 1 >> 30 = 0; 1 * mix = mix; mix xor (mix >> 27), whose shift copies the sign: mix is negative.
    assert fingerprint(torch.tensor([1]), (1,)) == 0xBF58476D1CE4E5B9 ^ 0xFFFFFFF7EB08EDA3 == 0x40A7B89AF7EC081A


def test_words_of_eight_bytes_follow_the_formula():
    words = [3, -5, 1 << 62, 0, -1]
    assert fingerprint(torch.tensor(words), (5,)) == reference(words)


def test_rows_that_are_no_whole_words_are_taken_by_element():
    values = random_tensor((4, 3), torch.bfloat16, 0)
    assert fingerprint(values, (4, 3)) == reference(values.view(-1).view(torch.int16).tolist())


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_fingerprints_of_any_split_by_rows_add_up(shape: tuple[int, ...], dtype: torch.dtype, seed: int, data):
    whole = random_tensor(shape, dtype, seed)
    cuts = data.draw(st.lists(st.integers(0, shape[0]), max_size=4).map(sorted))
    row = math.prod(shape[1:])
    parts = [
        fingerprint(whole[a:b], shape, start=a * row)
        for a, b in zip([0, *cuts], [*cuts, shape[0]], strict=True)  # empty runs among them
    ]
    assert combine(parts) == fingerprint(whole, shape)


def test_long_runs_are_worked_on_in_chunks():
    whole = random_tensor((300_000,), torch.int64, 1)
    parts = [fingerprint(whole[:150_001], (300_000,)), fingerprint(whole[150_001:], (300_000,), start=150_001)]
    assert combine(parts) == fingerprint(whole, (300_000,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (7, 3)])
def test_a_changed_element_is_noticed(dtype: torch.dtype, shape: tuple[int, ...]):
    whole = random_tensor(shape, dtype, 2)
    changed = whole.clone()
    changed.view(-1).view(torch.uint8)[17] ^= 1
    assert fingerprint(changed, shape) != fingerprint(whole, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (7, 3)])
def test_swapped_rows_and_a_shift_are_noticed(dtype: torch.dtype, shape: tuple[int, ...]):
    whole = random_tensor(shape, dtype, 3)
    seen = {fingerprint(whole, shape), fingerprint(whole.roll(1, 0), shape)}
    seen |= {fingerprint(whole[[1, 0, *range(2, shape[0])]], shape)}
    seen |= {fingerprint(whole.view(-1).roll(1).view(shape), shape)}
    assert len(seen) == 4


def test_the_same_run_elsewhere_has_another_fingerprint():
    run = torch.zeros(4, 2)
    assert fingerprint(run, (8, 2)) != fingerprint(run, (8, 2), start=8)


def test_a_missing_run_is_noticed_even_of_zeros():
    whole = torch.zeros(8, 2)
    assert fingerprint(whole[:4], (8, 2)) != fingerprint(whole, (8, 2))


def test_nothing_adds_nothing():
    assert fingerprint(torch.empty(0, 3), (5, 3)) == 0
    assert combine([]) == 0


def test_the_sum_stays_within_64_bits():
    assert combine([(1 << 64) - 1, 2]) == 1
