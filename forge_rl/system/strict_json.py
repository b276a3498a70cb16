"""Parses JSON as RFC 8259 defines it, from sources that are not trusted."""

from __future__ import annotations

import json
import math


def parse_json(text: str | bytes) -> object:
    """Parse JSON without NaN and Infinity, which Python's own parser accepts, and without numbers that become infinite.

    parse_json('{"score": NaN}')  # ValueError

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    value: object = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    return value


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value
