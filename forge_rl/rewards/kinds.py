"""Kind of a true answer, which decides the rule by which answers are compared with it."""

from __future__ import annotations

import re
from typing import Literal

from forge_rl.rewards.choice import letter_of
from forge_rl.rewards.equality import read
from forge_rl.rewards.formulas import normalised_notation
from forge_rl.rewards.quantities import plain, read_quantity
from forge_rl.types import Task

Kind = Literal["choice", "number", "expression", "text"]

_COMMAND = re.compile(
    r"\\(?!text|mathrm|mbox|textbf|\$|%)[a-zA-Z]+|[\^\N{SQUARE ROOT}\N{GREEK SMALL LETTER PI}\N{INFINITY}]"
)
_OPERATOR = re.compile(
    r"[-+*/=<>|!,:]|\\[{}]|[\N{LESS-THAN OR EQUAL TO}\N{GREATER-THAN OR EQUAL TO}\N{NOT EQUAL TO}\N{UNION}"
    r"\N{ELEMENT OF}\N{PLUS-MINUS SIGN}\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MIDDLE DOT}]"
)
_RUN = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = frozenset(("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "sqrt", "pi", "or", "and"))
_CODE = re.compile(r"\d+(?:\s*[-/.]\s*\d+)+|\d{1,2}:\d{2}(?::\d{2})?")
"""Dates, times, versions and telephone numbers."""
_LEADING_ZERO = re.compile(r"(?<![\d.])0\d")
_MOST_CHARS = 2000


def kind_of(truth: str) -> Kind:
    r"""Return the kind of a true answer.

    kind_of("(B)"), kind_of("-1/2"), kind_of("x^2 + 1"), kind_of("12:30")  # choice, number, expression, text
    """
    text = plain(truth)
    if letter_of(text):
        return "choice"
    if read_quantity(text) is not None:
        return "number"
    # Dates, versions and codes look like arithmetic but must match as they are: 12/03 is not 4, and 007 is not 7.
    if len(text) > _MOST_CHARS or _CODE.fullmatch(text) or _LEADING_ZERO.search(text):
        return "text"
    if _COMMAND.search(text):
        return "expression"
    # Words, as opposed to products of variables: more than three letters in a row, apart from functions.
    runs = [run for run in _RUN.findall(text) if run.lower() not in _FUNCTIONS]
    if not _OPERATOR.search(text) or not re.search(r"[A-Za-z\d]", text) or any(len(run) > 3 for run in runs):
        return "text"
    # Such as "yes/no": an operator between words, with neither a digit nor an equals sign.
    if runs and not re.search(r"\d|=", text):
        return "text"
    try:
        read(text)
    except (ValueError, RecursionError):
        return "text"
    return "expression"


def is_copy(answer: str, truth: str, task: Task) -> bool:
    """Return whether an answer with an operator repeats an expression of the question, and is not written as the truth.

    is_copy("123*456", "56088", task)  # True if task.prompt is "What is 123 * 456?"
    """
    copied = notation(answer)
    # Only an expression can be copied without work; a single number in the question may well be the answer.
    if not task.messages or not re.search(r"[-+*/^!\\(]", copied[1:]) or copied == notation(truth):
        return False
    question = normalised_notation(task.prompt[:20_000]).replace("\\$", "").replace("$", "")
    # The copy must end where the question's expression ends: 12+3 is not a copy of 12+34.
    before = r"(?<![\w.])" if copied[0].isalnum() else ""
    after = r"(?!\w|\.\d)" if copied[-1].isalnum() else ""
    return re.search(f"{before}{re.escape(copied)}{after}", question) is not None


def notation(text: str) -> str:
    """Return an answer in one notation, without enclosing marks such as dollar signs."""
    return normalised_notation(plain(text[:20_000]))
