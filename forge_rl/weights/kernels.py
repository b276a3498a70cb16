"""Compiled CPU loops that copy, cast and fingerprint rows of words in one pass, at memory speed.

Numba compiles them at first use and caches the result on disk. Rows are in a one-dimensional array with a stride of
`step` items; LLVM vectorises the plain stride-1 loops over each.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

KEY_LOW, KEY_HIGH, KEY_SHIFT = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0x27D4EB2F)
"""a, b and c of a fingerprint; see fingerprints.py."""

Words = np.ndarray[tuple[int], np.dtype[Any]]

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_CAST_WORDS = 4096  # stay in the L1 cache between cast and fingerprint
_COPY_WORDS = 128  # few, so that reading from memory and writing to it overlap


@numba.njit(nogil=True, cache=True)
def _fingerprint(words: Words, first: int) -> np.uint64:
    total = np.uint64(0)
    low, high = np.uint64(first) * KEY_LOW, np.uint64(first) * KEY_HIGH + KEY_SHIFT
    for item in range(words.size):
        word = np.uint64(words[item])
        total += ((word + low) & _MASK) * (((word >> _HALF) + high) & _MASK)
        low += KEY_LOW
        high += KEY_HIGH
    return total


@numba.njit(nogil=True, cache=True)
def fingerprint_rows(source: Words, step: int, rows: int, words: int, first: int, first_step: int) -> np.uint64:
    """Fingerprint of rows of words.

    Args:
        source: the words, any integer dtype.
        step: items from one row to the next.
        rows: number of rows.
        words: number of words in each.
        first: index, in the whole tensor, of the first word.
        first_step: words of the whole tensor from one row to the next.
    """
    total = np.uint64(0)
    for row in range(rows):
        total += _fingerprint(source[row * step : row * step + words], first + row * first_step)
    return total


@intrinsic
def _store_line(typing: Any, target: Any, source: Any) -> Any:
    """Copy a cache line of 8 words by a store that bypasses the cache, to an address aligned to 64.

    Like memcpy for large copies, this avoids reading the target's cache line first. Plain numba cannot express it: its
    loops took 1.2 times as long to copy and fingerprint 256 MiB on two threads, 1.4 times on one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        target_pointer, source_pointer = (builder.inttoptr(address, line) for address in arguments)
        stored = builder.store(builder.load(source_pointer, align=8), target_pointer, align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _fence(typing: Any) -> Any:
    """Complete all stores by `_store_line`, which are weakly ordered."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True, cache=True)
def copy_rows(
    target: Words, target_step: int, source: Words, step: int, rows: int, words: int, first: int, first_step: int
) -> np.uint64:
    """Copy rows of words, both arrays of one dtype; arguments and result as `fingerprint_rows`."""
    total = np.uint64(0)
    for row in range(rows):
        source_row = source[row * step : row * step + words]
        target_row = target[row * target_step : row * target_step + words]
        index = first + row * first_step
        num_streamed, target_address, source_address = (
            0,
            np.uint64(target_row.ctypes.data),
            np.uint64(source_row.ctypes.data),
        )
        if target_row.itemsize == 8 and target_address % 64 == 0:
            num_streamed = words // _COPY_WORDS * _COPY_WORDS
        for start in range(0, num_streamed, _COPY_WORDS):
            total += _fingerprint(source_row[start : start + _COPY_WORDS], index + start)
            for line in range(8 * start, 8 * (start + _COPY_WORDS), 64):
                _store_line(target_address + np.uint64(line), source_address + np.uint64(line))
        for item in range(num_streamed, words):
            target_row[item] = source_row[item]
        total += _fingerprint(source_row[num_streamed:], index + num_streamed)
    _fence()
    return total


@numba.njit(nogil=True, cache=True)
def cast_rows(
    target: Words, target_step: int, source: Words, step: int, rows: int, words: int, first: int, first_step: int
) -> np.uint64:
    """Write float32 as bfloat16, rounded to nearest even, and fingerprint the result; NaN stays NaN.

    `source` holds the floats' bits as int32, four per int64 word of `target`; otherwise as `copy_rows`.
    """
    total = np.uint64(0)
    for row in range(rows):
        for start in range(0, words, _CAST_WORDS):
            count = min(_CAST_WORDS, words - start)
            source_block = source[row * step + 4 * start : row * step + 4 * (start + count)].view(np.uint32)
            target_block = target[row * target_step + start : row * target_step + start + count]
            halves = target_block.view(np.uint16)
            for item in range(4 * count):
                bits = source_block[item]
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                halves[item] = np.uint16(np.uint32(0x7FC0) if nan else rounded)
            total += _fingerprint(target_block, first + row * first_step + start)
    return total
