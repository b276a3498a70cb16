"""Slices: against sets of indices, and tilings that miss, double or overreach."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.weights.slices import TensorSlice, tiling_error
from tests.tilings import tilings

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def slices_in(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorSlice:
    """Any slice of a tensor, perhaps empty."""
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return TensorSlice(
        start=start, size=tuple(draw(st.integers(0, n - offset)) for n, offset in zip(shape, start, strict=True))
    )


def indices(tensor_slice: TensorSlice) -> set[tuple[int, ...]]:
    return set(
        itertools.product(
            *(range(offset, offset + n) for offset, n in zip(tensor_slice.start, tensor_slice.size, strict=True))
        )
    )


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(max(1, torch.Size(shape).numel())).view(shape)


@given(shape=SHAPES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_two_boxes_share_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject):
    tensor_slice, other = data.draw(slices_in(shape)), data.draw(slices_in(shape))
    shared = tensor_slice.intersect(other)
    assert indices(shared) == indices(tensor_slice) & indices(other)
    assert shared.numel == len(indices(shared))
    assert indices(other.intersect(tensor_slice)) == indices(shared)


@given(shape=SHAPES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_slice_is_a_view_of_its_elements(shape: tuple[int, ...], data: st.DataObject):
    full_tensor, tensor_slice = numbered(shape), data.draw(slices_in(shape))
    view = tensor_slice.of(full_tensor)
    assert view.flatten().tolist() == sorted(int(full_tensor[index]) for index in indices(tensor_slice))
    assert tuple(view.shape) == tensor_slice.size
    view.fill_(-1)
    assert int((full_tensor == -1).sum()) == tensor_slice.numel


def test_a_tensor_without_dims_is_one_slice():
    tensor_slice = TensorSlice.whole(())
    assert tensor_slice.numel == 1
    assert tiling_error((), [tensor_slice]) is None
    assert tiling_error((), []) == "they hold 0 of 1 elements"
    assert "overlaps" in str(tiling_error((), [tensor_slice, tensor_slice]))


@given(shape=SHAPES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_cut_of_a_tensor_is_a_tiling(shape: tuple[int, ...], data: st.DataObject):
    slices = data.draw(tilings(shape))
    assert tiling_error(shape, slices) is None
    nonempty = [tensor_slice for tensor_slice in slices if tensor_slice.numel]
    assert tiling_error(shape, nonempty) is None
    missing = data.draw(st.sampled_from(nonempty))
    total = TensorSlice.whole(shape).numel
    left = [tensor_slice for tensor_slice in nonempty if tensor_slice != missing]
    assert tiling_error(shape, left) == f"they hold {total - missing.numel} of {total} elements"
    assert tiling_error(shape, [*nonempty, missing]) == f"{missing} overlaps {missing}"


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([TensorSlice((0, 0), (2, 3)), TensorSlice((3, 0), (1, 3))], "they hold 9 of 12 elements"),
        ([TensorSlice((0, 0), (3, 3)), TensorSlice((2, 0), (2, 3))], "overlaps"),
        ([TensorSlice((0, 0), (4, 2)), TensorSlice((0, 2), (4, 2))], "reaches outside of shape (4, 3)"),
        ([TensorSlice((-1, 0), (5, 3))], "reaches outside of shape (4, 3)"),
        # As many elements as there are, but not all of them.
        ([TensorSlice((0, 0), (4, 2)), TensorSlice((0, 1), (4, 1))], "overlaps"),
        ([], "they hold 0 of 12 elements"),
    ],
)
def test_a_tiling_that_misses_doubles_or_overreaches_is_told(slices: list[TensorSlice], message: str):
    assert message in str(tiling_error((4, 3), slices))
