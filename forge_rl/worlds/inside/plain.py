"""Converts plain data to text and back, as it crosses between the sessions of a solution and of its tests.

Plain are None, bool, int, float except NaN, complex, str, bytes, list, tuple, set, frozenset, dict and range. Instances
of their subclasses become the base class, and iterators become iterators over their items. Nothing else crosses, so
that no method written by a model, such as an `__eq__`, is ever called by a test.
"""

from __future__ import annotations

import collections.abc
import json
from typing import Any

_DEPTH = 50
_MOST_ITEMS = 100_000
_EXACT = 1 << 53


class NotPlainError(TypeError):
    """A value that cannot cross."""


def encode(value: object) -> str:
    """Return plain data as JSON.

    Raises:
        NotPlainError: it is not plain, deeper than 50 levels, or has more than 100,000 items.
    """
    return json.dumps(_packed(value, _DEPTH, [_MOST_ITEMS]), allow_nan=False)


def decode(text: str) -> Any:
    """Return the value that `encode` was given.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: the text is not from `encode`.
    """
    return _unpacked(json.loads(text, parse_constant=_refused))


def _refused(name: str) -> object:
    raise ValueError(f"{name} is not plain data")


def _packed(value: Any, depth: int, items_left: list[int]) -> object:
    items_left[0] -= 1
    if depth == 0 or items_left[0] < 0:
        raise NotPlainError("the data is too deep or too long")
    if value is None or isinstance(value, bool):
        return value
    # Methods of the base class: a subclass may override its own with code of the model.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -_EXACT < value < _EXACT else ["int", hex(value)]
    if isinstance(value, float):
        value = float.__float__(value)
        if value != value:
            raise NotPlainError("NaN equals nothing")
        # False for infinities, as inf - inf is NaN.
        return value if value - value == 0 else ["float", repr(value)]
    if isinstance(value, complex):
        return ["complex", _packed(value.real, depth, items_left), _packed(value.imag, depth, items_left)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, range):
        return ["range", *(_packed(item, depth, items_left) for item in (value.start, value.stop, value.step))]
    if isinstance(value, dict):
        pairs = [item for pair in dict.items(value) for item in pair]
        return ["dict", *(_packed(item, depth - 1, items_left) for item in pairs)]
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return [kind.__name__, *(_packed(item, depth - 1, items_left) for item in kind.__iter__(value))]
    if isinstance(value, collections.abc.Iterator | collections.abc.KeysView | collections.abc.ValuesView):
        return ["iterator", *(_packed(item, depth - 1, items_left) for item in value)]
    raise NotPlainError(f"{type(value).__name__} is not plain data")


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, list):
        if packed is None or isinstance(packed, bool | int | float | str):
            return packed
        raise TypeError("an object")
    # Every list that `encode` writes begins with its kind.
    kind, *items = packed
    match kind:
        case "int":
            return int(items[0], 16)
        case "float":
            return {"inf": float("inf"), "-inf": -float("inf")}[items[0]]
        case "bytes":
            return bytes.fromhex(items[0])
    values = [_unpacked(item) for item in items]
    match kind:
        case "complex":
            real, imaginary = values
            return complex(real, imaginary)
        case "range":
            start, stop, step = values
            return range(start, stop, step)
        case "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        case "iterator":
            return iter(values)
    factory: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return factory(values)
