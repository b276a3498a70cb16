"""Extracts the final answer from a completion's text, and the true answers from a task."""

from __future__ import annotations

import math
import re
from typing import Literal

from forge_rl.errors import TaskError
from forge_rl.rewards.quantities import is_measure, plain, read_quantity
from forge_rl.types import Task

Extract = Literal["auto", "tagged", "boxed", "last_number", "whole"]
"""Methods of extracting an answer, see `extract`."""

_OPEN, _CLOSE, _BOXED = "<answer>", "</answer>", "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|[{}]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A sign belongs to the number unless it follows an operand: 10-3 ends with 3, but "= -3" and "3*-2" with a negative.
_NUMBER = re.compile(rf"(?:(?<![\w)\]])[-+])?(?:{_DIGITS})(?:[eE][-+]?\d+\b)?")
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-"})
_STATED = re.compile(
    r"(?:\banswer(?:\*\*)?[ \t]+(?:is|are|must be|would be)\b(?:\*\*)?[ \t]*:?|\banswer(?:\*\*)?[ \t]*[:=]|####)"
    r"(?:\*\*)?",
    re.IGNORECASE,
)
# A full stop ends a clause only before a blank or the end, so decimals stay whole; a comma only before a word, so lists
# of numbers do.
_CLAUSE_END = re.compile(r"[.;!](?=\s|$)|,(?=\s+[^\W\d])|\s(?:because|since|as|but)\s")
_WRITTEN = re.compile(
    r"(?P<sign>[-+])?\\?\$?(?:"
    r"(?:\d+\s*)?\\[dt]?frac(?:\{\d+\}\{\d+\}|\s*\d\s*\d(?!\d))"
    r"|(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    r"(?:\s*(?:\\times|\\cdot|\N{MULTIPLICATION SIGN})\s*10\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+)|[eE][-+]?\d+\b)?"
    r"(?:\s*/\s*\d+|\^(?:\{-?\d+\}|-?\d+))?"
    r"|\.\d+)"
)
"""A number as prose has it, with fractions, powers and scientific notation."""
_SIGNS = r"*/^_\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MIDDLE DOT}"
# Signs before a number that make it the operand of an expression, and not the answer.
_OPERATOR = re.compile(rf"(?:[-+{_SIGNS}]|\\(?:times|cdot|div|pm))\s*$")
_OPERAND_AFTER = re.compile(rf"\s*(?:[!(\\{_SIGNS}]\s*[\w\\({{]|[-+]\s*[\w\\({{])|\s*(?:plus|minus|times|divided)\b")
_LIST_GAP = re.compile(r"\s*(?:,|,?\s*(?:and|or|to|not|but not|nor))\s*")
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_LONGEST = 20_000
"""Maximum characters at the end of a text in which an answer is looked for that no mark encloses."""


def extract(method: Extract, text: str, gold: str | None = None) -> str | None:
    """Return the final answer in a text, after its thoughts, or None if there is none.

        extract("boxed", r"so it is \\boxed{5}")  # "5"

    Args:
        method: "tagged" takes the last <answer>...</answer>, "boxed" the last \\boxed{...}, "last_number" the last
            number, "whole" the whole text. "auto" takes the tagged answer, else the boxed one, else the whole text; if
            the true answer is a number, it takes the number that this says, see `final_number`.
        gold: the true answer; only "auto" uses it, and only to see if it is a number.
    """
    match method:
        case "tagged":
            return tagged(text)
        case "boxed":
            return boxed(text)
        case "last_number":
            return last_number(text)
        case "whole":
            return text.strip()
        case "auto":
            answer = marked(text)
            answer = text.strip() if answer is None else answer
            if gold is None or not is_number(gold):
                return answer
            number = answered_number(text)
            quantity = read_quantity(number) if number is not None else None
            return quantity.number if quantity is not None else None


def marked(text: str) -> str | None:
    """Return the tagged answer, else the boxed one, else None."""
    answer = tagged(text)
    return boxed(text) if answer is None else answer


def tagged(text: str) -> str | None:
    """Return the contents of the last <answer>...</answer>."""
    answer: str | None = None
    end = 0
    while (start := text.find(_OPEN, end)) >= 0 and (close_index := text.find(_CLOSE, start)) >= 0:
        answer, end = text[start + len(_OPEN) : close_index], close_index + len(_CLOSE)
    return None if answer is None else answer.strip()


def boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...} with balanced braces, including nested braces."""
    start = end = -1
    box_starts: list[int] = []
    # Start of the contents of each open box; -1 for other braces.
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            box_starts.append(brace.end() if brace.group() == _BOXED else -1)
        elif box_starts and (contents_start := box_starts.pop()) > start:
            start, end = contents_start, brace.start()
    return text[start:end].strip() if start >= 0 else None


def stated(text: str) -> str | None:
    """Return the clause after the last "answer is", "Answer:" or ####; None without such a mark, and "" if it is a
    negation."""
    statements = list(_STATED.finditer(text[-_LONGEST:]))
    if not statements:
        return None
    rest = text[-_LONGEST:][statements[-1].end() :].strip(" \t*:")
    line = next((line for line in rest.split("\n") if line.strip()), "")
    clause = _CLAUSE_END.split(line, maxsplit=1)[0].strip().strip("*").strip()
    return "" if clause.lower().startswith("not ") else clause


def in_mathematics(text: str) -> str | None:
    r"""Return the last formula in dollar signs, \(...\) or \[...\] of a text."""
    formulas = list(_MATH.finditer(text[-_LONGEST:]))
    return next(part for part in formulas[-1].groups() if part is not None).strip() if formulas else None


def answered_number(text: str) -> str | None:
    """Return the number that a completion answers with, as written, with its unit; None for an expression or a list."""
    answer = marked(text)
    return number_in(text if answer is None else answer)


def number_in(answer: str) -> str | None:
    """Return the number that an answer is or, in prose or behind an equals sign, ends with, as written."""
    if read_quantity(answer) is not None:
        return answer
    # Prose has a word of two letters or more outside of formulas; LaTeX commands are not prose.
    words = answer.replace(in_mathematics(answer) or "\0", "")
    is_prose = re.search(r"[^\W\d_]{2}", words) is not None and not re.search(r"\\[a-zA-Z]", words)
    is_garbled = len(words.split()) <= 2 and re.match(r"\W*\d", words) is not None  # a number with a broken unit
    if (is_prose and not is_garbled) or stated(answer) is not None:
        return final_number(answer)
    # An equation answers with its right side. If its left side is a number too, both must agree: "2 = 3" is no answer.
    left, equals, right = plain(answer).rpartition("=")
    other, quantity = read_quantity(left.rpartition("=")[2]), read_quantity(right)
    if not equals or quantity is None or not re.search(r"\w", left):
        return None
    return right.strip() if other is None or other.value == quantity.value else None


def final_number(text: str) -> str | None:
    """Return the number that a text without marks ends with, as written; None if it ends with an expression or a list.

    final_number("2 + 3 = 5, so 5 apples")  # "5"; None for "2 + 3" and for "1, 2, 3"
    """
    text = text[-_LONGEST:].translate(_MINUS)
    clause = stated(text)
    if clause == "":
        return None
    # The stated clause decides, if it has a number at all; "the answer is below: ... 5" goes on with the whole text.
    if clause is not None and any(map(str.isdigit, clause)):
        text = clause
    formula = in_mathematics(text)
    if formula is not None and any(map(str.isdigit, formula)) and not re.search(r"\d", text.rpartition(formula)[2]):
        return number_in(formula)
    # The last number of the prose is a candidate. Each check below refuses one that is a part of something larger.
    numbers = [match for match in _WRITTEN.finditer(text) if not _is_inside_word(text, match.start())]
    if not numbers:
        return None
    last, before, after = numbers[-1], text[: numbers[-1].start()], text[numbers[-1].end() :]
    number = last.group()
    if operator := _OPERATOR.search(before):
        left_side = before[: operator.start()].rstrip()
        # An operand on the left: the text ends with an expression such as 2 + 3.
        if left_side[-1:].isalnum() or left_side[-1:] in (")", "]", "}"):
            return None
        # A minus after an equals sign or colon is the number's sign, even with a blank between.
        if left_side.endswith(("=", ":")) and operator.group().strip() == "-":
            number = f"-{number}"
    elif last["sign"] and before and (before[-1].isalnum() or before[-1] in ")]}"):
        return None
    # Two numbers joined by a comma, "and" or "or" are a list, or an answer that hedges.
    if len(numbers) > 1 and _LIST_GAP.fullmatch(text[numbers[-2].end() : last.start()]):
        return None
    if _OPERAND_AFTER.match(after) or before.endswith(("{", "_", "\\")) or re.search(r"[\w}]\($", before):
        return None
    word = re.match(r"\s*(?:\\?%|[^\W\d_]+(?:\^\{?\d\}?)?)", after)
    if word is None:
        return number
    quantity = read_quantity(number + word.group())
    if quantity is None:
        is_variable = not word.group()[0].isspace() or (
            len(word.group().strip()) == 1 and word.group().strip() not in "aI"
        )
        return None if is_variable else number  # 5x, 3rd, 2 y
    # "in" is more often a preposition than inches: "5 in total".
    return number + word.group() if is_measure(quantity) and word.group().strip() != "in" else number


def last_number(text: str) -> str | None:
    """Return the last integer or decimal number, without thousands separators."""
    numbers = _NUMBER.findall(text.translate(_MINUS))
    return numbers[-1].replace(",", "") if numbers else None


def is_number(text: str) -> bool:
    """Return True if a text is one number and nothing else."""
    return _NUMBER.fullmatch(text.translate(_MINUS).strip()) is not None


def true_answers(task: Task, key: str, reward: str) -> list[str]:
    """Return the true answers: `task.truth[key]`, or each of its items if it is a list.

    If a solution ends with `#### 72`, as in GSM8K, only the text after the mark is the answer.

    Args:
        reward: name of the reward, for errors.

    Raises:
        TaskError: the task has no such entry, or it is not a string, number, bool or list of these, or it is empty.
    """
    truth = task.truth.get(key)
    answers = truth if isinstance(truth, list | tuple) else [truth]
    if not answers or not all(map(_is_answer, answers)):
        description = (
            f"{truth!r:.80}" if key in task.truth else f"missing; it has {', '.join(sorted(task.truth)) or 'nothing'}"
        )
        raise TaskError(
            f"--reward {reward}: the truth of task {task.id!r} of {task.source!r} has no answer to compare with: "
            f"{key!r} is {description}",
            hint=f"set the column of the answers with --tasks FILE:answer=COLUMN, the entry of the truth with --reward "
            f"{reward}:key=NAME, or write your own reward for --reward FILE.py:FUNCTION",
        )
    return [str(answer).rpartition("#### ")[2].strip() for answer in answers]


def _is_answer(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.rpartition("#### ")[2].strip())
    return isinstance(value, int | float) and math.isfinite(value)


def _is_inside_word(text: str, start: int) -> bool:
    """Return whether a number is a part of a name, or the exponent of a unit or variable."""
    return start > 0 and (text[start - 1].isalnum() or text[start - 1] in "_.^" or text.endswith("^{", 0, start))
