"""Extracts the final answer from a completion's text."""

from __future__ import annotations

import re
from typing import Literal

Extract = Literal["auto", "tagged", "boxed", "last_number", "whole"]
"""Methods of extracting an answer, see `extract`."""

_OPEN, _CLOSE, _BOXED = "<answer>", "</answer>", "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|[{}]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A sign belongs to the number unless it follows an operand: 10-3 ends with 3, but "= -3" and "3*-2" with a negative.
_NUMBER = re.compile(rf"(?:(?<![\w)\]])[-+])?(?:{_DIGITS})(?:[eE][-+]?\d+\b)?")
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-"})


def extract(how: Extract, text: str, gold: str | None = None) -> str | None:
    """Return the final answer in a text, or None if there is none.

        extract("boxed", r"so it is \\boxed{5}")  # "5"

    Args:
        how: "tagged" takes the last <answer>...</answer>, "boxed" the last \\boxed{...}, "last_number" the last
            number, "whole" the whole text. "auto" takes the tagged answer, else the boxed one, else the whole text; if
            the true answer is a number, it takes the last number of that.
        gold: the true answer; only "auto" uses it, and only to see if it is a number.
    """
    match how:
        case "tagged":
            return tagged(text)
        case "boxed":
            return boxed(text)
        case "last_number":
            return last_number(text)
        case "whole":
            return text.strip()
        case "auto":
            found = next((part for part in (tagged(text), boxed(text)) if part is not None), text.strip())
            return last_number(found) if gold is not None and is_number(gold) else found


def tagged(text: str) -> str | None:
    """Return the contents of the last <answer>...</answer>."""
    found: str | None = None
    end = 0
    while (start := text.find(_OPEN, end)) >= 0 and (close := text.find(_CLOSE, start)) >= 0:
        found, end = text[start + len(_OPEN) : close], close + len(_CLOSE)
    return None if found is None else found.strip()


def boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...} with balanced braces, including nested braces."""
    start = end = -1
    opened: list[int] = []
    # Start of the contents of each open box; -1 for other braces.
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            opened.append(brace.end() if brace.group() == _BOXED else -1)
        elif opened and (inside := opened.pop()) > start:
            start, end = inside, brace.start()
    return text[start:end].strip() if start >= 0 else None


def last_number(text: str) -> str | None:
    """Return the last integer or decimal number, without thousands separators."""
    found = _NUMBER.findall(text.translate(_MINUS))
    return found[-1].replace(",", "") if found else None


def is_number(text: str) -> bool:
    """Return True if a text is one number and nothing else."""
    return _NUMBER.fullmatch(text.translate(_MINUS).strip()) is not None
