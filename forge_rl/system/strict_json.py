"""Parses JSON as RFC 8259 defines it, from sources that are not trusted."""

from __future__ import annotations

import json
import math

MAX_LEVELS = 64
"""Maximum nesting of JSON values from models that reach chat templates and recursive functions, which fail at some
depth."""


def parse_json(text: str | bytes) -> object:
    """Parse JSON without NaN and Infinity, which Python's own parser accepts, and without numbers that become infinite.

    parse_json('{"score": NaN}')  # ValueError

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    value: object = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    return value


def check_levels(value: object) -> None:
    """Check that JSON values are nested no deeper than `MAX_LEVELS`.

    Raises:
        ValueError: they are.
    """
    # Level by level, as deep data could exhaust recursion.
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_LEVELS):
        inner = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [entry for entries in inner for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return
    raise ValueError(f"it has more than {MAX_LEVELS} levels")


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value
