"""Compiled CPU loops that copy, cast and fingerprint rows of words in one pass, at memory bandwidth.

Numba compiles them at first use and caches the result on disk. Rows lie in a one-dimensional array, `step` items apart.
Whole cache lines of 8-byte words are left to line_loops.py; LLVM vectorises the plain loops here for the rest and for
smaller words.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from forge_rl.weights.line_loops import (
    KEY_HIGH,
    KEY_LOW,
    KEY_SHIFT,
    TURN_WORDS,
    cast_lines,
    copy_lines,
    fingerprint_lines,
)

Words = np.ndarray[tuple[int], np.dtype[Any]]

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@numba.njit(nogil=True, cache=True)
def _fingerprint(words: Words, first: int) -> np.uint64:
    """Fingerprint words of any size, one by one."""
    total = np.uint64(0)
    low, high = np.uint64(first) * KEY_LOW, np.uint64(first) * KEY_HIGH + KEY_SHIFT
    for item in range(words.size):
        word = np.uint64(words[item])
        total += ((word + low) & _MASK) * (((word >> _HALF) + high) & _MASK)
        low += KEY_LOW
        high += KEY_HIGH
    return total


@numba.njit(nogil=True, cache=True)
def _lines(address: np.uint64, words: int) -> tuple[int, int]:
    """Return the number of words before the first whole cache line, and of words in the whole turns after it.

    If no word begins a line, all words come before.
    """
    # A target whose address is not a multiple of 8 never reaches the start of a cache line in whole words.
    if address % np.uint64(8):
        return words, 0
    before = min(words, int((np.uint64(0) - address) % np.uint64(64) // np.uint64(8)))
    return before, (words - before) // TURN_WORDS * TURN_WORDS


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
        values, index = source[row * step : row * step + words], first + row * first_step
        # Reading needs no alignment, so that whole turns can begin with the first word.
        count = words // TURN_WORDS * TURN_WORDS if values.itemsize == 8 else 0
        if count:
            total += fingerprint_lines(np.uint64(0), np.uint64(values.ctypes.data), np.uint64(count), np.uint64(index))
        total += _fingerprint(values[count:], index + count)
    return total


@intrinsic
def _fence(typing: Any) -> Any:
    """Wait for all stores past the cache, which are weakly ordered."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True, cache=True)
def _copy_words(target: Words, source: Words, first: int) -> np.uint64:
    for item in range(source.size):
        target[item] = source[item]
    total: np.uint64 = _fingerprint(source, first)
    return total


@numba.njit(nogil=True, cache=True)
def _cast_words(target: Words, source: Words, first: int) -> np.uint64:
    floats, halves = source.view(np.uint32), target.view(np.uint16)
    for item in range(floats.size):
        bits = floats[item]
        # Round to nearest even: add just under half a unit of bfloat16, and the missing bit if the kept part is odd.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # Adding to a NaN's bits could overflow into the sign, or lose the payload and leave an infinity.
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        halves[item] = np.uint16(np.uint32(0x7FC0) if nan else rounded)
    total: np.uint64 = _fingerprint(target, first)
    return total


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
        # Stores past the cache need whole, aligned lines of the target: words before the first one are copied
        # separately.
        before, count = _lines(np.uint64(target_row.ctypes.data), words) if target_row.itemsize == 8 else (words, 0)
        if count:
            total += copy_lines(
                np.uint64(target_row[before:].ctypes.data),
                np.uint64(source_row[before:].ctypes.data),
                np.uint64(count),
                np.uint64(index + before),
            )
        total += _copy_words(target_row[:before], source_row[:before], index)
        after = before + count
        total += _copy_words(target_row[after:], source_row[after:], index + after)
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
        source_row = source[row * step : row * step + 4 * words]
        target_row = target[row * target_step : row * target_step + words]
        index = first + row * first_step
        before, count = _lines(np.uint64(target_row.ctypes.data), words)
        if count:
            total += cast_lines(
                np.uint64(target_row[before:].ctypes.data),
                np.uint64(source_row[4 * before :].ctypes.data),
                np.uint64(count),
                np.uint64(index + before),
            )
        total += _cast_words(target_row[:before], source_row[: 4 * before], index)
        after = before + count
        total += _cast_words(target_row[after:], source_row[4 * after :], index + after)
    _fence()
    return total
