"""Text that can be encoded: JSON escapes and names of files can bring halves of surrogate pairs into a string."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")


def encodable(value: T) -> T:
    """Replace lone surrogates in a text, or in all texts and keys of JSON values, by question marks.

    encodable({"file": "a\\udcff.txt"})  # {"file": "a?.txt"}

    Lone surrogates stand for no character: they cannot be tokenized, sent, or stored. A value without any is returned
    itself, not a copy.
    """
    return _replaced(value) if _has_lone_surrogate(value) else value


def _has_lone_surrogate(value: object) -> bool:
    if isinstance(value, str):
        # Fast for most texts: a string knows whether it is ASCII.
        return not value.isascii() and _LONE_SURROGATE.search(value) is not None
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, value)) or any(map(_has_lone_surrogate, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_lone_surrogate, value))


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("?", value)
    if isinstance(value, Mapping):
        return {_replaced(key): _replaced(inner) for key, inner in value.items()}
    return type(value)(map(_replaced, value)) if isinstance(value, list | tuple) else value
