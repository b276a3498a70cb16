"""LLVM code of the loops that copy, cast and fingerprint whole cache lines of 8 words; see kernels.py.

A fingerprint adds up (low + i a) * (high + i b + c) over words with the 32-bit halves low and high, each factor modulo
2**32. The 8 words of a line are 16 halves, whose keys (i a, i b + c) form a vector. One addition of 16 halves, a shift
and a product of 8 make the line's terms; one addition sums them, and one advances the keys. Numba's own loops, in which
both factors are whole words, take twice as many instructions and cannot write past the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

KEY_LOW, KEY_HIGH, KEY_SHIFT = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0x27D4EB2F)
"""a, b and c of a fingerprint; see fingerprints.py."""
LINE_WORDS = 8
TURN_WORDS = 4 * LINE_WORDS
"""Words per turn of the loops, which process whole turns of four independent lines."""

_PREFETCH_BYTES = 2048
"""Distance by which a copy prefetches its source. The processor's own prefetching stops at the end of a page; with
1,024 to 4,096 bytes, a copy of 1 GiB took a tenth less time. Prefetching slows down loops that only read."""
_BYTE, _HALF, _INT, _WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALVES, _WORDS = ir.VectorType(_INT, 2 * LINE_WORDS), ir.VectorType(_WORD, LINE_WORDS)
_LINES = TURN_WORDS // LINE_WORDS

Value = Any
"""A value of llvmlite, which has no type annotations."""


def _vector(kind: ir.VectorType, *values: int) -> Value:
    """A constant whose items repeat `values`."""
    mask = (1 << kind.element.width) - 1
    return ir.Constant(kind, [value & mask for value in values * (kind.count // len(values))])


def _splat(builder: Value, value: Value, kind: ir.VectorType) -> Value:
    """A vector with `value` in every item."""
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count))


def _load(builder: Value, address: Value, kind: ir.VectorType) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _prefetch(builder: Value, address: Value) -> None:
    signature = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", (_BYTE.as_pointer(),), signature)
    pointer = builder.inttoptr(builder.add(address, ir.Constant(_WORD, _PREFETCH_BYTES)), _BYTE.as_pointer())
    read, soon, data = (ir.Constant(_INT, value) for value in (0, 3, 1))
    builder.call(function, [pointer, read, soon, data])


def copied_line(builder: Value, address: Value) -> Value:
    """The line at an address, [8] int64."""
    _prefetch(builder, address)
    return _load(builder, address, _WORDS)


def cast_line(builder: Value, address: Value) -> Value:
    """The 32 float32 at an address as bfloat16, rounded to nearest even, [8] int64; a NaN is 0x7FC0."""
    halves = []
    for offset in (0, 64):
        half = builder.add(address, ir.Constant(_WORD, offset))
        _prefetch(builder, half)
        bits = _load(builder, half, _HALVES)
        odd = builder.and_(builder.lshr(bits, _vector(_HALVES, 16)), _vector(_HALVES, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, _vector(_HALVES, 0x7FFF)), odd), _vector(_HALVES, 16))
        magnitude = builder.and_(bits, _vector(_HALVES, 0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", magnitude, _vector(_HALVES, 0x7F800000))
        number = builder.select(is_nan, _vector(_HALVES, 0x7FC0), rounded)
        halves.append(builder.trunc(number, ir.VectorType(_HALF, 2 * LINE_WORDS)))
    order = ir.Constant(ir.VectorType(_INT, 4 * LINE_WORDS), list(range(4 * LINE_WORDS)))
    return builder.bitcast(builder.shuffle_vector(*halves, order), _WORDS)


def line_loop(
    read: Callable[[Value, Value], Value], *, line_bytes: int = 64, writes: bool = True, sums: bool = True
) -> Any:
    """Make an intrinsic `loop(target, source, words, first)` that returns the fingerprint of the words it writes.

    Args:
        read: makes the line, [8] int64, of the source at an address.
        line_bytes: bytes of the source in a line.
        writes: store the lines, past the cache. As in memcpy for large copies, this avoids reading the target's lines
            first; `kernels._fence` must follow.
        sums: compute the fingerprint; without it, which benchmarks compare with, the result is 0.

    Arguments of the loop, each uint64: the target's address, a multiple of 64; the source's address; the number of
    words, a multiple of TURN_WORDS above 0; and the index of the first in the whole tensor.
    """

    def generate(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        target, source, words, first = arguments
        a, b = int(KEY_LOW), int(KEY_HIGH)
        # Keys are taken modulo 2**32, so the index may be truncated before the product.
        index = _splat(builder, builder.trunc(first, _INT), _HALVES)
        base = builder.mul(index, _vector(_HALVES, a, b))
        keys = [
            builder.add(base, _vector(_HALVES, *(key for word in range(LINE_WORDS) for key in _keys(line, word))))
            for line in range(_LINES)
        ]
        # Each turn moves every key by the same amount, so no key is multiplied inside the loop.
        step = _vector(_HALVES, TURN_WORDS * a, TURN_WORDS * b)
        entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        turn = builder.phi(_WORD)
        turn.add_incoming(ir.Constant(_WORD, 0), entry)
        totals = []
        for start in keys:
            key, total = builder.phi(_HALVES), builder.phi(_WORDS)
            key.add_incoming(start, entry)
            total.add_incoming(_vector(_WORDS, 0), entry)
            totals.append((key, total))
        for line, (key, total) in enumerate(totals):
            number = builder.add(turn, ir.Constant(_WORD, line))
            values = read(builder, builder.add(source, builder.mul(number, ir.Constant(_WORD, line_bytes))))
            if writes:
                address = builder.add(target, builder.mul(number, ir.Constant(_WORD, 64)))
                stored = builder.store(values, builder.inttoptr(address, _WORDS.as_pointer()), align=64)
                # "nontemporal" is LLVM's name for stores past the cache.
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
            key.add_incoming(builder.add(key, step), loop)
            if not sums:
                total.add_incoming(total, loop)
                continue
            # One addition of 16 halves makes both factors of all 8 words; carries cannot cross from the low half to the
            # high one.
            factors = builder.bitcast(builder.add(builder.bitcast(values, _HALVES), key), _WORDS)
            low, high = builder.and_(factors, _vector(_WORDS, 0xFFFFFFFF)), builder.lshr(factors, _vector(_WORDS, 32))
            total.add_incoming(builder.add(total, builder.mul(low, high)), loop)
        following = builder.add(turn, ir.Constant(_WORD, _LINES))
        turn.add_incoming(following, loop)
        count = builder.udiv(words, ir.Constant(_WORD, LINE_WORDS))
        builder.cbranch(builder.icmp_unsigned("<", following, count), loop, end)
        builder.position_at_end(end)
        # The incoming value from the loop, not the phi, holds the sum including the last turn.
        line_sums = totals[0][1].incomings[1][0]
        for _, total in totals[1:]:
            line_sums = builder.add(line_sums, total.incomings[1][0])
        result = ir.Constant(_WORD, 0)
        for word in range(LINE_WORDS):
            result = builder.add(result, builder.extract_element(line_sums, ir.Constant(_INT, word)))
        return result

    def _keys(line: int, word: int) -> tuple[int, int]:
        index = LINE_WORDS * line + word
        return index * int(KEY_LOW), index * int(KEY_HIGH) + int(KEY_SHIFT)

    def loop(typing: Any, target: Any, source: Any, words: Any, first: Any) -> Any:
        return types.uint64(types.uint64, types.uint64, types.uint64, types.uint64), generate

    return intrinsic(loop)


fingerprint_lines = line_loop(lambda builder, address: _load(builder, address, _WORDS), writes=False)
copy_lines = line_loop(copied_line)
cast_lines = line_loop(cast_line, line_bytes=128)
