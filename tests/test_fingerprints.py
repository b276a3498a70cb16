"""Fingerprints: the documented formula in Python's integers, additivity over every tiling, and what they notice."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forge_rl.errors import WeightsError
from forge_rl.weights import fingerprints
from forge_rl.weights import fingerprints as module
from forge_rl.weights.fingerprints import Move, _by_torch, combine, fingerprint, move
from forge_rl.weights.slices import TensorSlice
from tests.tilings import tilings

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]
PUBLISHED = [torch.float32, torch.bfloat16]


def formula(words: dict[int, int]) -> int:
    """Keys of words by their index in the whole tensor."""
    total = 0
    for index, word in words.items():
        low, high = word % (1 << 32), (word >> 32) % (1 << 32)
        total += ((low + index * 0x9E3779B1) % (1 << 32)) * ((high + index * 0x85EBCA77 + 0x27D4EB2F) % (1 << 32))
    return total % (1 << 64)


def reference(values: torch.Tensor, shape: tuple[int, ...], tensor_slice: TensorSlice) -> int:
    """Fingerprint of a block, word by word."""
    size = values.dtype.itemsize
    word = 8 if len(shape) > 1 and shape[-1] * size % 64 == 0 else size
    raw = bytes(values.detach().contiguous().view(-1).view(torch.uint8).tolist())
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    row = (tensor_slice.size[-1] if tensor_slice.size else 1) * size
    words, position = {}, 0
    for index in itertools.product(*(range(n) for n in tensor_slice.size[:-1])):
        first = (
            sum((i + a) * step for i, a, step in zip((*index, 0), tensor_slice.start, strides, strict=True))
            if shape
            else 0
        )
        for offset in range(0, row, word):
            assert (first * size + offset) % word == 0
            number = int.from_bytes(raw[position : position + word], "little", signed=values.dtype != torch.uint8)
            words[(first * size + offset) // word] = number
            position += word
    return formula(words)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All bit patterns, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Draws shapes with rows of whole words, and with others."""
    last = draw(st.sampled_from([8, 16, 32, 64, 96, 1, 3, 33]))
    return (*draw(st.lists(st.integers(1, 5), max_size=2)), last)


def step_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Slices begin and end at multiples of so many elements in the last dim."""
    return max(1, 8 // dtype.itemsize) if len(shape) > 1 and shape[-1] * dtype.itemsize % 64 == 0 else 1


def test_a_value_worked_by_hand():
    # One word, 1 + 2 * 2**32, at index 0: low is 1, high is 2 + 0x27D4EB2F.
    assert fingerprint(torch.tensor([1 + (2 << 32)]), (1,)) == 0x27D4EB31
    # The same at index 1: (1 + 0x9E3779B1) * (2 + 0x85EBCA77 + 0x27D4EB2F), no factor passes 2**32.
    assert fingerprint(torch.tensor([1 + (2 << 32)]), (3,), TensorSlice((1,), (1,))) == 0x9E3779B2 * 0xADC0B5A8 % (
        1 << 64
    )


def test_a_tensor_without_dims_has_a_fingerprint():
    assert fingerprint(torch.tensor(1.5), ()) == formula({0: 0x3FC00000})


@given(shape=shapes(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=150, deadline=None)
def test_fingerprints_follow_the_formula_and_add_up_over_any_tiling(shape, dtype, seed, data):
    full_tensor = random_tensor(shape, dtype, seed)
    slices = data.draw(tilings(shape, step=step_of(shape, dtype)))
    parts = []
    for tensor_slice in slices:
        values = tensor_slice.of(full_tensor)
        parts.append(fingerprint(values, shape, tensor_slice))
        assert (
            parts[-1]
            == reference(values, shape, tensor_slice)
            == int(_by_torch([values], shape, tensor_slice)) % (1 << 64)
        )
    assert combine(parts) == fingerprint(full_tensor, shape)


def test_the_torch_loop_goes_on_where_its_last_chunk_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprints, "CHUNK_WORDS", 100)
    shape, tensor_slice = (9, 7, 64), TensorSlice((2, 1, 16), (6, 5, 32))
    values = tensor_slice.of(random_tensor(shape, torch.float32, 0))
    expected = reference(values, shape, tensor_slice)
    assert int(fingerprints._by_torch([values], shape, tensor_slice)) % (1 << 64) == expected


@pytest.mark.parametrize("dtype", PUBLISHED)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_blocks_are_shared_out_among_threads(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch):
    source = torch.randn(96, 352)
    shape, tensor_slice = (120, 416), TensorSlice((7, 16), (96, 352))
    target = torch.zeros(shape, dtype=dtype)
    expected = reference(source.to(dtype), shape, tensor_slice)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for words in (1 << 19, 1000, 100, 1):  # all at once, several rows a turn, one row, and several turns a row
        monkeypatch.setattr(module, "_TASK_WORDS", max(words, 4))
        target.zero_()
        assert move([Move(tensor_slice.of(target), source, shape, tensor_slice)]) == [expected]
        assert torch.equal(tensor_slice.of(target), source.to(dtype))
        assert fingerprint(tensor_slice.of(target), shape, tensor_slice) == expected


@given(
    shape=shapes(),
    published=st.sampled_from(DTYPES[:4]),
    dtype=st.sampled_from(DTYPES[:4]),
    pad=st.integers(0, 3),
    shift=st.integers(0, 3),
    transposed=st.booleans(),
    task_words=st.sampled_from([4, 16, 1 << 19]),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_blocks_of_any_layout_are_copied_cast_and_fingerprinted(
    shape, published, dtype, pad, shift, transposed, task_words, data
):
    slices = data.draw(tilings(shape, step=step_of(shape, published)))
    full_tensor = torch.randn(shape).to(dtype)
    target = torch.full(shape, -7.0).to(published)
    moves = []
    for tensor_slice in slices:
        # The source lies in a larger tensor, at an odd place, perhaps the other way round.
        sizes = tensor_slice.size[::-1] if transposed else tensor_slice.size
        around = torch.zeros([n + pad for n in sizes], dtype=dtype).flatten()
        around = torch.cat([torch.zeros(shift, dtype=dtype), around])[shift:].view([n + pad for n in sizes])
        source = TensorSlice((0,) * len(sizes), sizes).of(around)
        source = source.permute(*reversed(range(len(sizes)))) if transposed else source
        source.copy_(tensor_slice.of(full_tensor))
        moves.append(Move(tensor_slice.of(target), source, shape, tensor_slice))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TASK_WORDS", task_words)
        patch.setattr(torch, "get_num_threads", lambda: 2)
        fingerprints = move(moves)
    assert torch.equal(target, full_tensor.to(published))
    assert fingerprints == [reference(tensor_slice.of(target), shape, tensor_slice) for tensor_slice in slices]
    assert combine(fingerprints) == fingerprint(target, shape)


@pytest.mark.parametrize("published", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("pad", [0, 4])
def test_blocks_of_experts_are_moved_from_any_stride(published, dtype, order: tuple[int, ...], pad: int):
    shape, tensor_slice = (4, 6, 96), TensorSlice((1, 2, 32), (3, 4, 48))
    memory = torch.randn([tensor_slice.size[dim] + pad for dim in order]).to(dtype)
    source = TensorSlice((0, 0, 0), tuple(tensor_slice.size[dim] for dim in order)).of(memory)
    source = source.permute(*(order.index(dim) for dim in range(3)))
    target = torch.zeros(shape, dtype=published)
    assert move([Move(tensor_slice.of(target), source, shape, tensor_slice)]) == [
        reference(source.to(published), shape, tensor_slice)
    ]
    assert torch.equal(tensor_slice.of(target), source.to(published))


@pytest.mark.parametrize("published", PUBLISHED)
@pytest.mark.parametrize("shape", [(6, 64), (6, 33)])
def test_nothing_is_written_beside_a_block(published: torch.dtype, shape: tuple[int, int]):
    target = torch.full(shape, -7.0).to(published)
    tensor_slice = TensorSlice((1, 8), (3, 16))
    move([Move(tensor_slice.of(target), torch.zeros(tensor_slice.size), shape, tensor_slice)])
    assert int((target == 0).sum()) == tensor_slice.numel
    assert int((target == -7).sum()) == target.numel() - tensor_slice.numel


@pytest.mark.parametrize("shape", [(2, 64), (2, 33)])
def test_special_values_are_cast_as_torch_casts_them(shape: tuple[int, int]):
    values = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-40, -1e-45, 0.0, -0.0, 1.0])
    source = values.repeat(13)[: math.prod(shape)].view(shape)
    target = torch.zeros(shape, dtype=torch.bfloat16)
    (digest,) = move([Move(target, source, shape, TensorSlice.whole(shape))])
    assert torch.equal(target.isnan(), source.isnan())
    assert torch.equal(target.nan_to_num(7).view(torch.int16), source.bfloat16().nan_to_num(7).view(torch.int16))
    assert digest == reference(target, shape, TensorSlice.whole(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_needs_a_gradient_or_is_expanded_is_moved_too(dtype: torch.dtype):
    shape = (4, 32)
    weight = torch.nn.Parameter(torch.randn(1, 32).to(dtype))
    target = torch.zeros(shape, dtype=torch.bfloat16)
    (digest,) = move([Move(target, weight.detach().expand(4, 32), shape, TensorSlice.whole(shape))])
    assert torch.equal(target, weight.detach().bfloat16().expand(4, 32))
    assert digest == fingerprint(target, shape)
    assert fingerprint(weight, (1, 32)) == fingerprint(weight.detach(), (1, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64), (7, 3), (100,)])
def test_any_changed_byte_is_noticed(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = random_tensor(shape, dtype, 2)
    before = fingerprint(tensor, shape)
    raw = tensor.view(-1).view(torch.uint8)
    for offset in range(0, len(raw), 7):
        raw[offset] ^= 1 << offset % 8
        assert fingerprint(tensor, shape) != before
        raw[offset] ^= 1 << offset % 8
    assert fingerprint(tensor, shape) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64), (7, 3)])
def test_swapped_and_shifted_values_are_noticed(dtype: torch.dtype, shape: tuple[int, int]):
    tensor = random_tensor(shape, dtype, 3)
    rows = [1, 0, *range(2, shape[0])]
    flat = tensor.view(-1)
    variants = [
        tensor,
        tensor.roll(1, 0),
        tensor[rows],
        flat.roll(1).view(shape),
        flat.roll(16).view(shape),
        tensor.flip(1),
    ]
    assert len({fingerprint(values, shape) for values in variants}) == len(variants)


@pytest.mark.parametrize("shape", [(8, 64), (7, 3)])
def test_missing_and_misplaced_zeros_are_noticed(shape: tuple[int, int]):
    zeros, half = torch.zeros(shape), TensorSlice((0, 0), (4, shape[1]))
    assert fingerprint(half.of(zeros), shape, half) != fingerprint(zeros, shape)
    elsewhere = TensorSlice((1, 0), (4, shape[1]))
    assert fingerprint(half.of(zeros), shape, half) != fingerprint(half.of(zeros), shape, elsewhere)


@pytest.mark.parametrize(
    "tensor_slice", [TensorSlice((0, 2), (2, 28)), TensorSlice((0, 0), (2, 2)), TensorSlice((0, 1), (2, 5))]
)
def test_a_block_that_begins_or_ends_within_a_word_is_refused(tensor_slice: TensorSlice):
    values = torch.zeros(tensor_slice.size, dtype=torch.bfloat16)
    with pytest.raises(WeightsError, match=r"shape \(2, 32\) begins or ends within 8 bytes") as caught:
        fingerprint(values, (2, 32), tensor_slice)
    assert "tensor-parallel size" in caught.value.hint
    with pytest.raises(WeightsError, match="begins or ends within 8 bytes"):
        fingerprint(values.to("meta"), (2, 32), tensor_slice)
    with pytest.raises(WeightsError, match="begins or ends within 8 bytes"):
        move([Move(values.clone(), torch.zeros(tensor_slice.size), (2, 32), tensor_slice)])


def test_a_target_on_another_device_is_written_by_torch():
    values, full_slice = torch.randn(64, 32).bfloat16(), TensorSlice.whole((64, 32))
    target = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")  # has no address: the kernels would crash
    assert move([Move(target, values, (64, 32), full_slice)]) == [fingerprint(values, (64, 32))]


class _Operations(TorchDispatchMode):
    """Counts operations that compute, which are launches on a device; views and copies to targets aside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func is not torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def operations(blocks: int, shape: tuple[int, ...]) -> int:
    """Operations that fingerprint experts of one shape on their way to a device."""
    sources = [torch.randn(shape).bfloat16() for _ in range(blocks)]
    expected = [fingerprint(source, shape) for source in sources]
    targets = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in sources]
    moves = [Move(*pair, shape, TensorSlice.whole(shape)) for pair in zip(targets, sources, strict=True)]
    with _Operations() as operations:
        assert move(moves) == expected
    return operations.count


def test_blocks_of_one_shape_share_a_devices_launches(monkeypatch: pytest.MonkeyPatch):
    alone, few, many = (operations(count, (24, 32)) for count in (1, 2, 64))
    assert alone + 1 >= few == many, "two blocks take an operation more than one, which joins them"
    words = 24 * 32 * 2 // 8
    monkeypatch.setattr(fingerprints, "CHUNK_WORDS", 16 * words)
    assert 3 * few < operations(64, (24, 32)) < 5 * few, "four batches"
    monkeypatch.setattr(fingerprints, "CHUNK_WORDS", words // 2)
    assert operations(3, (24, 32)) > 3 * alone, "each alone, in two parts"


def test_nothing_adds_nothing():
    assert fingerprint(torch.empty(0, 3), (5, 3), TensorSlice((5, 0), (0, 3))) == 0
    assert fingerprint(torch.empty(0, 32), (5, 32), TensorSlice((5, 0), (0, 32))) == 0
    assert combine([]) == 0
    assert move([]) == []


def test_the_sum_stays_within_64_bits():
    assert combine([(1 << 64) - 1, 2]) == 1


def test_parameters_of_inference_are_written_from_every_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    sources = [torch.randn(33, 9) for _ in range(200)]
    with torch.inference_mode():
        targets = [torch.zeros(9, 33).t() for _ in sources]  # not in the source's order, so that torch copies
        moves = [Move(*pair, (33, 9), TensorSlice.whole((33, 9))) for pair in zip(targets, sources, strict=True)]
        assert move(moves) == [fingerprint(source, (33, 9)) for source in sources]
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
