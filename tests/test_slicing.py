"""What loaders copy out of published tensors, as it is seen without vLLM."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
import torch

from forge_rl.engines.vllm import slicing
from forge_rl.engines.vllm.slicing import SliceWatch, _slice_of
from forge_rl.weights.fingerprints import Move, fingerprint, move
from forge_rl.weights.manifest import TensorEntry
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.stacks import Stack

WHOLE = torch.arange(12 * 16, dtype=torch.float32).view(12, 16)
ROWS, COLUMNS = TensorSlice((4, 0), (4, 16)), TensorSlice((0, 8), (12, 8))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t, TensorSlice((0, 0, 0), (4, 6, 8))),
        (lambda t: t[1:3, :, 4:], TensorSlice((1, 0, 4), (2, 6, 4))),
        (lambda t: t[2], TensorSlice((2, 0, 0), (1, 6, 8))),
        (lambda t: t.transpose(0, 2)[1:2].narrow(2, 3, 1), TensorSlice((3, 0, 1), (1, 6, 1))),
        (lambda t: t.view(-1)[17:20], TensorSlice((0, 2, 1), (1, 1, 3))),
        (lambda t: t.view(-1)[:20], None),
        (lambda t: t[::2], None),
    ],
)
def test_the_block_that_a_view_is(view: Callable[[torch.Tensor], torch.Tensor], expected: TensorSlice | None) -> None:
    full_tensor = torch.empty(4, 6, 8)
    part = view(full_tensor)
    assert _slice_of(part, part.storage_offset(), full_tensor.shape, full_tensor.stride()) == expected


class Layers(torch.nn.Module):
    """Parameters as vLLM leaves them for a reload: on the meta device."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.empty(4, 16, device=device), requires_grad=False)
        self.columns = torch.nn.Parameter(torch.empty(12, 8, device=device), requires_grad=False)


def single(name: str, values: torch.Tensor) -> Stack:
    """A published tensor that is not in a stack with others."""
    entry = TensorEntry(name=name, shape=tuple(values.shape), dtype="float32", bucket="0/0", offset=0)
    return Stack((entry,), values[None])


def copy(model: Layers, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """As loaders of a column- and a row-parallel layer do."""
    model.rows.data.copy_(rows.narrow(0, 4, 4))
    model.columns.data.copy_(columns.narrow(1, 8, 8))


@pytest.mark.parametrize("is_held", [False, True], ids=["at-once", "in-a-later-bucket"])
def test_slices_are_fingerprinted_in_place_or_as_they_are_copied(is_held: bool) -> None:
    before = {"rows": torch.empty(4, 16), "columns": torch.empty(96)}  # columns are repacked
    model = Layers()
    watch = SliceWatch(model, before)
    bucket = [WHOLE.clone(), WHOLE.clone()]
    a, b = bucket
    with watch.reading([single("a", a), single("b", b)]):
        with watch:
            copy(model, a, b)
        if is_held:
            a, b = watch.keep(a), watch.keep(b)
        else:
            model.rows, model.columns = Layers("cpu").parameters()
            with watch:
                copy(model, a, b)
    if is_held:
        for tensor in bucket:
            tensor.fill_(-1)
        model.rows, model.columns = Layers("cpu").parameters()
        with watch:
            copy(model, a, b)
    assert torch.equal(model.rows, WHOLE[4:8])
    assert torch.equal(model.columns, WHOLE[:, 8:])

    def found() -> dict[str, tuple[TensorSlice, int]]:
        return {shard.name: (shard.tensor_slice, shard.fingerprint) for shard in watch.shards()}

    expected = {"a": (ROWS, fingerprint(WHOLE[4:8], (12, 16), ROWS))}
    expected["b"] = (COLUMNS, fingerprint(WHOLE[:, 8:], (12, 16), COLUMNS))
    assert found() == expected
    assert watch.repacked == ["b"]
    assert watch.bytes == 4 * (ROWS.numel + COLUMNS.numel)
    model.rows[0, 0], model.columns[0, 0] = -1, -1
    assert found()["a"] != expected["a"], "where the bytes stay, they are attested as they are"
    assert found()["b"] == expected["b"]
    del a, b
    gc.collect()
    assert not watch._memory


def test_bytes_that_are_read_in_another_way_than_a_copy_count_too() -> None:
    model = Layers()
    watch = SliceWatch(model, {})
    tensor = WHOLE.clone()
    with watch.reading([single("a", tensor)]), watch:
        assert tensor[4:8].contiguous().data_ptr() == tensor[4:8].data_ptr()  # nothing is read
        tensor[4:8].t().contiguous()
    (shard,) = watch.shards()
    assert (shard.tensor_slice, shard.fingerprint) == (ROWS, fingerprint(WHOLE[4:8], (12, 16), ROWS))
    assert watch.repacked == ["a"]


def test_slices_bound_for_a_device_are_fingerprinted_in_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def counted(moves: Sequence[Move]) -> list[int]:
        counts.append(len(moves))
        return move(moves)

    monkeypatch.setattr(slicing, "move", counted)
    watch = SliceWatch(Layers(), {})
    experts = {name: WHOLE.clone() for name in "abcd"}
    with watch.reading([single(name, tensor) for name, tensor in experts.items()]), watch:
        for tensor in experts.values():
            torch.empty(4, 16, dtype=torch.float64).copy_(tensor[4:8])  # any that no slice can be copied to as it is
    for tensor in experts.values():
        tensor.fill_(-1)
    shards = watch.shards()
    assert [shard.fingerprint for shard in shards] == [fingerprint(WHOLE[4:8], (12, 16), ROWS)] * 4
    assert counts[0] == 4
    assert not any(counts[1:])


@pytest.mark.parametrize("is_held", [False, True], ids=["at-once", "in-a-later-bucket"])
def test_square_matrices_that_a_loader_transposes_arrive_transposed(is_held: bool) -> None:
    """As experts of Llama 4 and gpt-oss are, whose files hold [inputs, outputs]."""
    square = WHOLE[:, :12].contiguous()
    model = torch.nn.Module()
    model.square = torch.nn.Parameter(torch.empty(12, 12, device="meta"), requires_grad=False)
    watch = SliceWatch(model, {"square": torch.empty(144)})
    tensor = square.clone()
    with watch.reading([single("a", tensor)]):
        view = tensor.t()
        with watch:
            model.square.data.copy_(view)
        if is_held:
            view = watch.keep(view)
            tensor.fill_(-1)
        model.square = torch.nn.Parameter(torch.empty(12, 12), requires_grad=False)
        with watch:
            model.square.data.copy_(view)
    assert torch.equal(model.square, square.t())
    full_slice = TensorSlice.whole((12, 12))
    assert [(shard.tensor_slice, shard.fingerprint) for shard in watch.shards()] == [
        (full_slice, fingerprint(square, (12, 12), full_slice))
    ]
    assert watch.repacked == ["a"]
