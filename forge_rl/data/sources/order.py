"""Keyed pseudo-random orders: a permutation computed element by element in constant memory."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 4
_AT_ONCE = 1024
"""Number of elements computed together, which takes about as long as computing a few."""


def key_of(*parts: object) -> int:
    """Return a 64-bit hash of all parts, the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permuted(place: int, size: int, key: int) -> int:
    """Return the `place`-th number of a keyed permutation of 0 to size - 1, in constant time and memory.

        [permuted(place, 4, key) for place in range(4)]  # such as [2, 0, 3, 1]

    Uses a Feistel network over an even number of bits with cycle walking: it is applied again until the number is below
    size (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    return _permuted(place // _AT_ONCE, size, key)[place % _AT_ONCE]


@functools.lru_cache(maxsize=64)
def _permuted(chunk: int, size: int, key: int) -> list[int]:
    """Return the `chunk`-th _AT_ONCE numbers of a permutation; fewer at its end."""
    # The network permutes 2 half bits, at most four times the size, so numbers are walked fewer than four times on
    # average.
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    numbers = np.arange(chunk * _AT_ONCE, min((chunk + 1) * _AT_ONCE, size), dtype=np.uint64)
    pending = np.arange(len(numbers))
    # Cycle walking: numbers at or above size are permuted again. The cycle returns to the range, as it began in it.
    while len(pending):
        left, right = numbers[pending] >> half, numbers[pending] & mask
        for number in range(_ROUNDS):
            # One Feistel round: (L, R) becomes (R, L xor F(R, key, round)), which is invertible for any F.
            left, right = right, left ^ (_mix(right ^ np.uint64(key ^ number << 40)) & mask)
        numbers[pending] = left << half | right
        pending = pending[numbers[pending] >= size]
    permutation: list[int] = numbers.tolist()
    return permutation


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64 bits with SplitMix64 (Steele, Lea and Flood, 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
