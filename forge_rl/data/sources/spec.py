"""Reads NAME[:KEY=VALUE,...][*WEIGHT], the text by which a flag names a source."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_rl.errors import TaskError

_FORM = "write name:key=value,key=value*weight"
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Name of a source, its parameters, and its weight in a mixture."""

    name: str
    params: Mapping[str, object] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def label(self) -> str:
        """Name and parameters, to tell apart specs of the same name."""
        written = functools.partial(json.dumps, separators=(",", ":"), default=str)
        params = ",".join(f"{k}={v if isinstance(v, str) else written(v)}" for k, v in self.params.items())
        return f"{self.name}:{params}" if params else self.name


def parse_source(text: str) -> SourceSpec:
    """Read `name[:key=value,...][*weight]`; whether there is such a source is seen when it is made.

        parse_source("chain_sum:min_terms=2,max_terms=3*0.5")

    Values are numbers, true, false, none, lists such as [+,-] or ["+","-"], and otherwise text. The weight is 1 by
    default.

    Raises:
        TaskError: the text is not of this form.
    """
    match = re.fullmatch(r"(.*?)(?:\*([^*\]]*))?", text, flags=re.DOTALL)  # a star before a ] is an operator in a list
    assert match is not None
    described, weight = match.groups(default="1")
    name, _, listed = described.partition(":")
    params: dict[str, object] = {}
    for part in _split_commas(listed):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise TaskError(f"cannot read {part!r} in the tasks {text!r}", hint=_FORM)
        params[key] = _value(value)
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise TaskError(
            f"the weight {weight!r} of the tasks {text!r} is not a number from 0 up",
            hint=f"{_FORM}, with a weight such as 0.5",
        )
    return SourceSpec(name=name.strip(), params=params, weight=number)


def _split_commas(text: str) -> list[str]:
    """Split at the commas that are outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


def _value(text: str) -> object:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    if text.startswith("[") and text.endswith("]"):
        return [_value(part.strip()) for part in _split_commas(text[1:-1])]
    return text
