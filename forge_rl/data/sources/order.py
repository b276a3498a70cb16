"""Keyed pseudo-random orders: a permutation computed element by element in constant memory, and small shuffles."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 4


def key_of(*parts: object) -> int:
    """Return a 64-bit hash of all parts, the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permuted(place: int, size: int, key: int) -> int:
    """Return the `place`-th number of a keyed permutation of 0 to size - 1, in constant time and memory.

        [permuted(place, 4, key) for place in range(4)]  # such as [2, 0, 3, 1]

    Uses a Feistel network over an even number of bits with cycle walking: it is applied again until the number is below
    size (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ key ^ (number << 40)) & mask)
        place = left << half | right
        if place < size:
            return place


def shuffled(size: int, key: int) -> npt.NDArray[np.int64]:
    """Return 0 to size - 1 in a keyed order, [size] int64, the same for all versions of Python and numpy."""
    numbers = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(numbers ^ (numbers >> np.uint64(31)), kind="stable")


def _mix(number: int) -> int:
    """Mix 64 bits with SplitMix64 (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)
