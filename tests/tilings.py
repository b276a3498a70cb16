"""Random ways to cut a tensor into slices, for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from forge_rl.weights.slices import TensorSlice


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], *, step: int = 1) -> list[TensorSlice]:
    """Slices that together hold every element once, some of them perhaps empty.

    Args:
        draw: hypothesis's.
        shape: of the tensor.
        step: cuts in the last dim are multiples of it.
    """
    slices = [TensorSlice.whole(shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        tensor_slice = slices.pop(draw(st.integers(0, len(slices) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        unit = step if dim == len(shape) - 1 else 1
        offset = unit * draw(st.integers(0, tensor_slice.size[dim] // unit))
        slices += [
            replace(tensor_slice, size=_with(tensor_slice.size, dim, offset)),
            TensorSlice(
                start=_with(tensor_slice.start, dim, tensor_slice.start[dim] + offset),
                size=_with(tensor_slice.size, dim, tensor_slice.size[dim] - offset),
            ),
        ]
    return draw(st.permutations(slices))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
