"""Compiled CPU loops that copy, cast and fingerprint rows of words in one pass, at memory speed.

Numba compiles them at first use and caches the result on disk. Rows are in a one-dimensional array with a stride of
`step` items; LLVM vectorises the plain stride-1 loop over each.
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
_CHUNK_WORDS = 4096  # stay in the L1 cache between cast and fingerprint


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


_LANES = 8


@intrinsic
def _stream(typing: Any, target: Any, source: Any, vectors: Any, first: Any) -> Any:
    """Copy and fingerprint `vectors` times _LANES words by stores that bypass the cache, to an address aligned to 64.

    Like memcpy for large copies, this avoids reading the target's cache lines first, a quarter of the time. Plain numba
    loops cannot express it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, vectors, first = arguments
        i32, i64 = ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(i64, _LANES)

        def constant(*values: int) -> Any:
            return ir.Constant(vector, [value % (1 << 64) for value in values * (_LANES // len(values))])

        def spread(scalar: Any) -> Any:
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(i32, 0))
            lanes = ir.Constant(ir.VectorType(i32, _LANES), [0] * _LANES)
            return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)

        keys = (int(KEY_LOW), 0), (int(KEY_HIGH), int(KEY_SHIFT))
        starts = [
            builder.add(
                spread(builder.mul(first, ir.Constant(i64, key))),
                constant(*(lane * key + shift for lane in range(_LANES))),
            )
            for key, shift in keys
        ]
        before = builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        index, total, low, high = builder.phi(i64), builder.phi(vector), builder.phi(vector), builder.phi(vector)
        for phi, value in zip((index, total, low, high), (ir.Constant(i64, 0), constant(0), *starts), strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, vectors), body, end)

        builder.position_at_end(body)
        at = builder.mul(index, ir.Constant(i64, 8 * _LANES))
        words = builder.load(builder.inttoptr(builder.add(source, at), vector.as_pointer()), align=8)
        stored = builder.store(words, builder.inttoptr(builder.add(target, at), vector.as_pointer()), align=8 * _LANES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(i32, 1)]))
        mask = constant(int(_MASK))
        product = builder.mul(
            builder.and_(builder.add(words, low), mask),
            builder.and_(builder.add(builder.lshr(words, constant(32)), high), mask),
        )
        index.add_incoming(builder.add(index, ir.Constant(i64, 1)), body)
        total.add_incoming(builder.add(total, product), body)
        low.add_incoming(builder.add(low, constant(keys[0][0] * _LANES)), body)
        high.add_incoming(builder.add(high, constant(keys[1][0] * _LANES)), body)
        builder.branch(head)

        builder.position_at_end(end)
        builder.fence("seq_cst")  # such stores are weakly ordered
        result = ir.Constant(i64, 0)
        for lane in range(_LANES):
            result = builder.add(result, builder.extract_element(total, ir.Constant(i32, lane)))
        return result

    return types.uint64(types.uint64, types.uint64, types.int64, types.uint64), generate


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
        done = 0
        if written.itemsize == 8 and written.ctypes.data % 64 == 0:
            done = words // _LANES * _LANES
            to, of = np.uint64(written.ctypes.data), np.uint64(read.ctypes.data)
            total += _stream(to, of, words // _LANES, index)
            index += np.uint64(done)
        low, high = index * KEY_LOW, index * KEY_HIGH + KEY_SHIFT
        for item in range(done, words):
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
    """Write float32 as bfloat16, rounded to nearest even, and fingerprint the result; NaN stays NaN.

    `source` holds the floats' bits as int32, four per int64 word of `target`; otherwise as `copy_rows`.
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
