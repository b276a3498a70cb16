"""Reads slices of MXFP4 weights: blocks of 32 four-bit floats that share an eight-bit exponent.

Open Compute Project, Microscaling Formats (MX) Specification 1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Value of each four-bit code: one sign, two exponent and one mantissa bit."""
_BLOCK = 32
_BIAS = 127


def shape_of(blocks: Any, scales: Any) -> tuple[int, ...]:
    """Return the shape of a weight, [experts, inputs, outputs]; the blocks' shape if it does not match the scales."""
    whole, rows = tuple(blocks.get_shape()), tuple(scales.get_shape())
    return (rows[0], rows[2] * _BLOCK, rows[1]) if len(rows) == 3 and whole == (*rows, _BLOCK // 2) else whole


def read_slice(blocks: Any, scales: Any, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Read a block of [experts, inputs, outputs] into bfloat16, which holds every value exactly.

    Args:
        blocks: safetensors slice of [experts, outputs, inputs / 32, 16] uint8, two values per byte, low bits first.
        scales: safetensors slice of [experts, outputs, inputs / 32] uint8, exponents of 2 with a bias of 127.
        start, size: block to read; only the parts of the files that it touches are read.
    """
    (expert, first, output), (experts, inputs, outputs) = start, size
    begin, end = first // _BLOCK, -(-(first + inputs) // _BLOCK)
    where = slice(expert, expert + experts), slice(output, output + outputs), slice(begin, end)
    packed = blocks[where]
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    exponents = scales[where].to(torch.int32)[..., None] - _BIAS
    values = torch.ldexp(_VALUES[nibbles.int()], exponents).to(torch.bfloat16).flatten(-2)
    skipped = first - begin * _BLOCK
    return values[..., skipped : skipped + inputs].transpose(-2, -1)
