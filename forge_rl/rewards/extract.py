"""Extracts the final answer from a completion's text, and the true answers from a task."""

from __future__ import annotations

import re
from typing import Literal

from forge_rl.errors import TaskError
from forge_rl.types import Task

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


def true_answers(task: Task, key: str, reward: str) -> list[str]:
    """Return the true answers: `task.truth[key]`, or each of its items if it is a list.

    If a solution ends with `#### 72`, as in GSM8K, only the text after the mark is the answer.

    Args:
        reward: name of the reward, for errors.

    Raises:
        TaskError: the task has no such entry, or it is not a string, number, bool or list of these.
    """
    found = task.truth.get(key)
    several = found if isinstance(found, list | tuple) else [found]
    if not several or not all(isinstance(each, str | int | float) for each in several):
        seen = (
            f"{found!r:.80}" if key in task.truth else f"missing; it has {', '.join(sorted(task.truth)) or 'nothing'}"
        )
        raise TaskError(
            f"--reward {reward}: the truth of task {task.id!r} of {task.source!r} has no answer to compare with: "
            f"{key!r} is {seen}",
            hint=f"set the column of the answers with --tasks FILE:answer=COLUMN, the entry of the truth with --reward "
            f"{reward}:key=NAME, or write your own reward for --reward FILE.py:FUNCTION",
        )
    return [str(each).rpartition("#### ")[2].strip() for each in several]
