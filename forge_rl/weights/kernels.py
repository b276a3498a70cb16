"""Compiled loops over weights on CPU: copy, cast and fingerprint rows of words in one pass, at the speed of memory.

Numba compiles them at first use and keeps the result on disk. Rows lie in a one-dimensional array, `step` items from
the beginning of one to that of the next; a plain stride-1 loop over each is what LLVM vectorises.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

KEY_LOW, KEY_HIGH, KEY_SHIFT = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0x27D4EB2F)
"""a, b and c of a fingerprint; see fingerprints.py."""

Words = np.ndarray[tuple[int], np.dtype[Any]]

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_CHUNK_WORDS = 4096  # they stay in the first cache between being cast and being fingerprinted


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


@numba.njit(nogil=True, cache=True)
def copy_rows(
    target: Words, target_step: int, source: Words, step: int, rows: int, words: int, first: int, first_step: int
) -> np.uint64:
    """Copy rows of words, both arrays of one dtype; arguments and result as `fingerprint_rows`."""
    total = np.uint64(0)
    for row in range(rows):
        read = source[row * step : row * step + words]
        written = target[row * target_step : row * target_step + words]
        index = np.uint64(first + row * first_step)
        low, high = index * KEY_LOW, index * KEY_HIGH + KEY_SHIFT
        for item in range(words):
            written[item] = read[item]
            word = np.uint64(read[item])
            total += ((word + low) & _MASK) * (((word >> _HALF) + high) & _MASK)
            low += KEY_LOW
            high += KEY_HIGH
    return total


@numba.njit(nogil=True, cache=True)
def cast_rows(
    target: Words, target_step: int, source: Words, step: int, rows: int, words: int, first: int, first_step: int
) -> np.uint64:
    """Write float32 as bfloat16, rounded to nearest even, and fingerprint what was written; a NaN stays one.

    `source` holds the floats' bits as int32, four for each int64 word of `target`; the rest is as `copy_rows`.
    """
    total = np.uint64(0)
    for row in range(rows):
        for at in range(0, words, _CHUNK_WORDS):
            count = min(_CHUNK_WORDS, words - at)
            read = source[row * step + 4 * at : row * step + 4 * (at + count)].view(np.uint32)
            written = target[row * target_step + at : row * target_step + at + count]
            halves = written.view(np.uint16)
            for item in range(4 * count):
                bits = read[item]
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                halves[item] = np.uint16(np.uint32(0x7FC0) if nan else rounded)
            total += _fingerprint(written, first + row * first_step + at)
    return total
