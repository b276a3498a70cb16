"""Compiled loops over weights on CPU: copy, cast and fingerprint in one pass at the speed of memory.

Numba compiles them at first use and keeps the result on disk. Stores bypass the cache where both sides are aligned, as
memcpy does for large copies: that saves reading the target's lines first.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge_rl.weights.fingerprints import KEY_HIGH, KEY_LOW, KEY_SHIFT

_LANES = 8
_VECTOR = ir.VectorType(ir.IntType(64), _LANES)
_MASK = 0xFFFFFFFF
_WRAP = 1 << 64


def _splat(value: int) -> Any:
    return ir.Constant(_VECTOR, [value % _WRAP] * _LANES)


def _spread(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_lanes32(), [0] * _LANES))


def _lanes32() -> Any:
    return ir.VectorType(ir.IntType(32), _LANES)


def _float_words(builder: Any, address: Any) -> Any:
    """Words of bfloat16 from four float32 each, rounded to nearest even; a NaN stays one."""
    wide = ir.VectorType(ir.IntType(32), 4 * _LANES)

    def constant(value: int) -> Any:
        return ir.Constant(wide, [value] * (4 * _LANES))

    bits = builder.load(builder.inttoptr(address, wide.as_pointer()), align=4)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
    nan = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), constant(0x7F800000))
    kept = builder.select(nan, constant(0x7FC0), rounded)
    halves = builder.trunc(kept, ir.VectorType(ir.IntType(16), 4 * _LANES))
    return builder.bitcast(halves, _VECTOR)


def _loop(*, store: bool, bypass: bool, cast: bool, attest: bool = True) -> Any:
    """An intrinsic (target, source, vectors, first word) -> fingerprint of `vectors` times _LANES words."""

    @intrinsic
    def loop(typing: Any, target: Any, source: Any, vectors: Any, first: Any) -> Any:
        signature = types.uint64(types.uint64, types.uint64, types.int64, types.uint64)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, source, vectors, first = arguments
            i64 = ir.IntType(64)
            before = builder.block
            head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
            keys = [
                builder.add(
                    _spread(builder, builder.mul(first, ir.Constant(i64, key))),
                    ir.Constant(_VECTOR, [(lane * key + shift) % _WRAP for lane in range(_LANES)]),
                )
                for key, shift in ((KEY_LOW, 0), (KEY_HIGH, KEY_SHIFT))
            ]
            builder.branch(head)
            builder.position_at_end(head)
            index = builder.phi(i64)
            total, low_key, high_key = (builder.phi(_VECTOR) for _ in range(3))
            for phi, value in (
                (index, ir.Constant(i64, 0)),
                (total, _splat(0)),
                (low_key, keys[0]),
                (high_key, keys[1]),
            ):
                phi.add_incoming(value, before)
            builder.cbranch(builder.icmp_signed("<", index, vectors), body, end)

            builder.position_at_end(body)
            at = builder.mul(index, ir.Constant(i64, 8 * _LANES))
            if cast:
                words = _float_words(builder, builder.add(source, builder.add(at, at)))
            else:
                words = builder.load(builder.inttoptr(builder.add(source, at), _VECTOR.as_pointer()), align=8)
            if store:
                place = builder.inttoptr(builder.add(target, at), _VECTOR.as_pointer())
                stored = builder.store(words, place, align=8 * _LANES if bypass else 8)
                if bypass:
                    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            mixed = total
            if attest:
                low = builder.and_(builder.add(words, low_key), _splat(_MASK))
                high = builder.and_(builder.add(builder.lshr(words, _splat(32)), high_key), _splat(_MASK))
                mixed = builder.add(total, builder.mul(low, high))
            for phi, value in (
                (index, builder.add(index, ir.Constant(i64, 1))),
                (total, mixed),
                (low_key, builder.add(low_key, _splat(KEY_LOW * _LANES))),
                (high_key, builder.add(high_key, _splat(KEY_HIGH * _LANES))),
            ):
                phi.add_incoming(value, builder.block)
            builder.branch(head)

            builder.position_at_end(end)
            if bypass:
                builder.fence("seq_cst")  # such stores are weakly ordered
            result = ir.Constant(i64, 0)
            for lane in range(_LANES):
                result = builder.add(result, builder.extract_element(total, ir.Constant(ir.IntType(32), lane)))
            return result

        return signature, generate

    return loop


_hash = _loop(store=False, bypass=False, cast=False)
_copy = _loop(store=True, bypass=False, cast=False)
_copy_bypass = _loop(store=True, bypass=True, cast=False)
_cast = _loop(store=True, bypass=False, cast=True)
_cast_bypass = _loop(store=True, bypass=True, cast=True)
_plain = _loop(store=True, bypass=False, cast=False, attest=False)
_plain_bypass = _loop(store=True, bypass=True, cast=False, attest=False)


def _pointer(kind: Any) -> Any:
    """An intrinsic address -> pointer."""

    @intrinsic
    def at(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uint64), generate

    return at


_words_at, _floats_at = _pointer(types.uint64), _pointer(types.uint32)
_uint8_at, _int16_at, _int32_at, _int64_at = map(_pointer, (types.uint8, types.int16, types.int32, types.int64))


@numba.njit("uint64(int64, uint64, uint64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def run_rows(
    mode: int,
    target: int,
    source: int,
    target_step: int,
    source_step: int,
    rows: int,
    words: int,
    first: int,
    first_step: int,
) -> int:
    """Do one thing (HASH, COPY, CAST, PLAIN) to rows of 8-byte words.

    Args:
        mode: what to do.
        target: address of the first word written; not used by HASH.
        source: address of the first word read; CAST reads four float32 for each.
        target_step: bytes from one of the target's rows to the next.
        source_step: of the source.
        rows: how many.
        words: in each, as written.
        first: index, in the whole tensor, of the first word.
        first_step: words of the whole tensor from one row to the next.

    Returns:
        The words' fingerprint, 0 with PLAIN.
    """
    total = numba.uint64(0)
    vectors = words // _LANES
    aligned = target % numba.uint64(8 * _LANES) == 0 and (rows == 1 or target_step % (8 * _LANES) == 0)
    for row in range(rows):
        to = target + numba.uint64(row * target_step)
        at = source + numba.uint64(row * source_step)
        index = numba.uint64(first + row * first_step)
        if mode == 0:
            total += _hash(to, at, vectors, index)
        elif mode == 1:
            total += _copy_bypass(to, at, vectors, index) if aligned else _copy(to, at, vectors, index)
        elif mode == 2:
            total += _cast_bypass(to, at, vectors, index) if aligned else _cast(to, at, vectors, index)
        else:
            total += _plain_bypass(to, at, vectors, index) if aligned else _plain(to, at, vectors, index)
        for word in range(_LANES * vectors, words):
            value = numba.uint64(0)
            if mode == 2:
                floats = numba.carray(_floats_at(at), 4 * words, numba.uint32)
                for part in range(4):
                    bits = numba.uint64(floats[4 * word + part])
                    if bits & numba.uint64(0x7FFFFFFF) > numba.uint64(0x7F800000):
                        bits = numba.uint64(0x7FC00000)
                    else:
                        bits += numba.uint64(0x7FFF) + ((bits >> numba.uint64(16)) & numba.uint64(1))
                    half = (bits >> numba.uint64(16)) & numba.uint64(0xFFFF)
                    value |= half << numba.uint64(16 * part)
            else:
                value = numba.carray(_words_at(at), words, numba.uint64)[word]
            if mode != 0:
                numba.carray(_words_at(to), words, numba.uint64)[word] = value
            if mode != 3:
                place = index + numba.uint64(word)
                low = (value + place * numba.uint64(KEY_LOW)) & numba.uint64(0xFFFFFFFF)
                high = (value >> numba.uint64(32)) + place * numba.uint64(KEY_HIGH) + numba.uint64(KEY_SHIFT)
                total += low * (high & numba.uint64(0xFFFFFFFF))
    return total


@numba.njit("uint64(int64, uint64, int64, uint64)", nogil=True, cache=True)
def hash_elements(size: int, source: int, count: int, first: int) -> int:
    """Fingerprint of adjacent words of one element each.

    Args:
        size: bytes of an element.
        source: address of the first.
        count: how many.
        first: index of the first in the whole tensor.
    """
    total = numba.uint64(0)
    for item in range(count):
        if size == 2:
            value = numba.uint64(numba.int64(numba.carray(_int16_at(source), count, numba.int16)[item]))
        elif size == 4:
            value = numba.uint64(numba.int64(numba.carray(_int32_at(source), count, numba.int32)[item]))
        elif size == 8:
            value = numba.uint64(numba.carray(_int64_at(source), count, numba.int64)[item])
        else:
            value = numba.uint64(numba.carray(_uint8_at(source), count, numba.uint8)[item])
        place = first + numba.uint64(item)
        low = (value + place * numba.uint64(KEY_LOW)) & numba.uint64(0xFFFFFFFF)
        high = (value >> numba.uint64(32)) + place * numba.uint64(KEY_HIGH) + numba.uint64(KEY_SHIFT)
        total += low * (high & numba.uint64(0xFFFFFFFF))
    return total
