"""Parses [TITLE=]NAME[:KEY=VALUE,...][*WEIGHT], the form in which a flag names a source."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_rl.errors import TaskError
from forge_rl.flags.texts import split_commas

_FORM = "write name:key=value,key=value*weight"
_TITLE = re.compile(r"([A-Za-z_][\w-]*)=(?=.)", flags=re.DOTALL)
_KEY = re.compile(r":\s*[A-Za-z_][\w.]*\s*=")
_CODE = re.compile(r"(.+\.py:[A-Za-z_][\w.]*)(?::(.*))?", flags=re.DOTALL)
_IN_PATHS = re.compile(r"[/.]")
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Name of a source, its parameters, and its weight in the mixture."""

    name: str
    """Data set, path, pattern of paths, hub id, or FILE.py:NAME."""
    params: Mapping[str, object] = field(default_factory=dict)
    weight: float = 1.0
    title: str = ""
    """Name given by the user, or ""."""
    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Parameters as written."""

    @property
    def is_code(self) -> bool:
        """True if the name refers to a Python object."""
        return _CODE.fullmatch(self.name) is not None

    @property
    def label(self) -> str:
        """Name and parameters, to distinguish specs of the same name."""
        written = functools.partial(json.dumps, separators=(",", ":"), default=str)
        params = ",".join(f"{k}={v if isinstance(v, str) else written(v)}" for k, v in self.params.items())
        return f"{self.name}:{params}" if params else self.name


def parse_source(text: str) -> SourceSpec:
    """Parse `[title=]name[:key=value,...][*weight]`, without checking that the source exists.

        parse_source("chain_sum:min_terms=2,max_terms=3*0.5")
        parse_source("maths=data/*.jsonl:question=problem*0.5")

    Values are numbers, true, false, none, lists such as [+,-] or ["+","-"], and otherwise strings. The weight defaults
    to 1. A star in a path is a wildcard unless only a number follows it: write the pattern data/part*1 as
    data/part*1*1. A colon in a path is part of it unless a key and = follow. A path that begins like a title, such as
    day=1/a.jsonl, must be written ./day=1/a.jsonl. FILE.py:NAME is also a name.

    Raises:
        TaskError: the text does not have this form.
    """
    described, weight = _split_weight(text)
    found = _TITLE.match(described)
    title = found[1] if found else ""
    name, listed = _split_name(described[found.end() if found else 0 :])
    params: dict[str, object] = {}
    written: dict[str, str] = {}
    for part in split_commas(listed):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise TaskError(f"cannot read {part!r} in the tasks {text!r}", hint=_FORM)
        if key in params:
            raise TaskError(f"{key!r} is given twice in the tasks {text!r}", hint="give it once")
        params[key], written[key] = _value(value), value
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise TaskError(
            f"the weight {weight!r} of the tasks {text!r} is not a number of at least 0",
            hint=f"{_FORM}, with a weight such as 0.5",
        )
    if not name.strip():
        raise TaskError(f"the tasks {text!r} have no name", hint=_FORM)
    return SourceSpec(name=name.strip(), params=params, weight=number, title=title, written=written)


def _split_weight(text: str) -> tuple[str, str]:
    """Split off the weight after the last star, unless that star is part of a list or a path."""
    described, star, weight = text.rpartition("*")
    if not star or "]" in weight:
        return text, "1"
    try:
        float(weight)
    except ValueError:
        if _IN_PATHS.search(text):
            return text, "1"
    return described, weight


def _split_name(text: str) -> tuple[str, str]:
    """Split a name from its parameters."""
    if found := _CODE.fullmatch(text):
        return found[1], found[2] or ""
    if found := _KEY.search(text):
        return text[: found.start()], text[found.start() + 1 :]
    name, _, listed = text.partition(":")
    return (text, "") if _IN_PATHS.search(listed) else (name, listed)


def _value(text: str) -> object:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    if text.startswith("[") and text.endswith("]"):
        return [_value(part.strip()) for part in split_commas(text[1:-1])]
    return text
