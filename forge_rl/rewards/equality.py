r"""Compares mathematical answers part by part: brackets, order and relations literally, and formulas by value.

equal("(1,2)", "(1, \\frac{4}{2})")  # True; False for "\\{1,2\\}" and for "[1,2]"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from forge_rl.rewards.formula_values import evaluate, exact, points
from forge_rl.rewards.formulas import Node, read_formula, symbols_of
from forge_rl.rewards.quantities import plain, rounds

_DIGITS = 460
"""Decimal digits of the values that are compared."""
_EQUAL_DIGITS = 300
_ZERO_DIGITS = 400
_LEAST_POINTS = 3
_MOST_PARTS = 100
_MOST_DEPTH = 6
_OPEN, _CLOSE = ("(", "[", "{", "\\{", "\\langle"), (")", "]", "}", "\\}", "\\rangle")
_TOKEN = re.compile(r"\\[{}]|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "\\lt": "<", "\\gt": ">", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=",
    "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\ne": "!=", "\\neq": "!=", "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{GREATER-THAN OR EQUAL TO}": ">=", "\N{NOT EQUAL TO}": "!=", "\\in": "in", "\N{ELEMENT OF}": "in", ":": ":",
}  # fmt: skip
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
# \left, \right and \big change how brackets look, and nothing else.
_SIZES = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]ig+[lr]?(?![a-z])")
_OR = re.compile(
    r"\\(?:text|mathrm)\s*\{\s*(?:or|and)\s*\}|\\(?:lor|vee)(?![a-z])|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])"
)
_MATRIX = re.compile(r"\\begin\{([pbvVB]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_DECIMAL = re.compile(r"-?(\d*)\.(\d+)")
_DECIMAL_FORM = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+")


@dataclass(frozen=True)
class Structure:
    """An answer's parts: a formula, a collection, a relation, a union, a matrix, or alternatives in any order."""

    kind: str
    """ "value", "list", "any_order", "union", "relation", the brackets of a collection such as "()", or of a matrix."""
    parts: tuple[Structure, ...] = ()
    operators: tuple[str, ...] = ()
    """Operators between the sides of a relation; the width of a matrix."""
    tree: Node = ()
    source: str = ""
    """Text of a value, without blanks."""


def equal(true: str, answer: str) -> bool:
    """Return whether an answer is mathematically the true one.

    Raises:
        ValueError: the true answer is of no supported kind.
    """
    true_structure = read(true)
    try:
        return _same(true_structure, read(answer))
    except (ValueError, ArithmeticError, RecursionError):
        return False


def read(text: str, depth: int = 0) -> Structure:
    """Return the structure of an answer.

    Raises:
        ValueError: the text is not an answer of a supported kind, or is too large.
    """
    if depth > _MOST_DEPTH:
        raise ValueError("the answer is nested too deeply")
    text = _SIZES.sub("", plain(text)).strip()
    inner = lambda part: read(part, depth + 1)  # noqa: E731
    # From the loosest binding to the tightest: matrix, "or", union, bare list, relation, brackets, plus-minus, formula.
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[2].strip().removesuffix("\\\\"))]
        if len({len(row) for row in rows}) != 1:
            raise ValueError("a matrix has rows of different lengths")
        # Round, square and curly matrices are the same matrix; bars make a determinant or a norm.
        kind = "matrix" if matrix[1] in "pbB" else f"{matrix[1]}matrix"
        return Structure(kind, tuple(inner(cell) for row in rows for cell in row), (str(len(rows[0])),))
    if "\\begin" in text or not text:
        raise ValueError("the text is not a formula")
    if len(alternatives := _split(text, lambda token: False, _OR)) > 1:
        items = [item for part in alternatives for item in _split(part, lambda token: token == ",") if item.strip()]
        return Structure("any_order", tuple(map(inner, items)))
    if len(members := _split(text, lambda token: token in ("\\cup", "\N{UNION}"))) > 1:
        return Structure("union", tuple(map(inner, members)))
    operators: list[str] = []
    commas = _split(text, lambda token: token == ",")
    # A text such as "1,234" is one number with a thousands separator, not a list of two.
    is_list = len(commas) > 1 and not re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text)
    if is_list and not any(text.startswith(opening) and _encloses(text, opening) for opening in _OPEN):
        return Structure("list", tuple(map(inner, commas)))
    sides = _split(text, lambda token: token in _RELATIONS, operators=operators)
    if operators:
        if not all(side.strip() for side in sides):
            raise ValueError("a side of a relation is missing")
        return Structure("relation", tuple(map(inner, sides)), tuple(operators))
    for opening in _OPEN:
        if text.startswith(opening) and (closing := _encloses(text, opening)):
            contents = text[len(opening) : len(text) - len(closing)]
            items = _split(contents, lambda token: token == ",")
            # One item in brackets is a grouped formula, as in (x + 1); only braces make a set of one.
            if len(items) > 1 or (opening in ("\\{", "{") and opening + closing == "\\{\\}"):
                kind = (opening + closing).replace("\\{", "{").replace("\\}", "}")
                return Structure(kind, tuple(map(inner, items)) if contents.strip() else ())
    if "\\pm" in text or "\\mp" in text or "\N{PLUS-MINUS SIGN}" in text:
        # Both signs flip together: a \pm b \mp c stands for a + b - c and a - b + c, not for four values.
        text = text.replace("\N{PLUS-MINUS SIGN}", "\\pm ")
        signs = [text.replace("\\pm", a).replace("\\mp", b) for a, b in (("+", "-"), ("-", "+"))]
        return Structure("any_order", tuple(map(inner, signs)))
    return Structure("value", tree=read_formula(text), source=text.replace(" ", ""))


def _split(
    text: str,
    separates: Callable[[str], bool],
    pattern: re.Pattern[str] | None = None,
    operators: list[str] | None = None,
) -> list[str]:
    """Split a text at separators outside of all brackets."""
    parts, start, depth, place = [], 0, 0, 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        assert token is not None
        end, word = token.end(), token.group()
        if word in _OPEN:
            depth += 1
        elif word in _CLOSE:
            depth -= 1
        elif depth == 0 and pattern is not None and (separator := pattern.match(text, place)):
            parts.append(text[start:place])
            start = end = separator.end()
        elif depth == 0 and separates(word):
            parts.append(text[start:place])
            start = end
            if operators is not None:
                operators.append(_RELATIONS[word])
        place = end
    parts.append(text[start:])
    if len(parts) > _MOST_PARTS:
        raise ValueError("the answer has too many parts")
    return parts


def _encloses(text: str, opening: str) -> str:
    """Return the bracket that closes the opening one of a text, if it ends the text; "" if not."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token.group() in _OPEN) - (token.group() in _CLOSE)
        if depth == 0:
            return token.group() if token.end() == len(text) else ""
    return ""


def _same(true: Structure, answer: Structure) -> bool:
    true, answer = _without_name(true, answer), _without_name(answer, true)
    if true.kind == answer.kind == "value":
        return _same_value(true, answer)
    if true.kind == answer.kind == "relation":
        return _same_relation(true, answer)
    # Sets and alternatives have no order, and an answer may list their members without braces.
    loose = {"any_order", "{}"}
    if true.kind in loose and answer.kind in loose | {"list"}:
        return _same_in_any_order(true.parts, answer.parts)
    if true.kind == answer.kind == "union":
        return _same_in_any_order(true.parts, answer.parts)
    if true.kind != answer.kind and not (true.kind == "list" and answer.kind in loose):
        return False
    return (
        len(true.parts) == len(answer.parts)
        and true.operators == answer.operators
        and all(map(_same, true.parts, answer.parts))
    )


def _without_name(side: Structure, other: Structure) -> Structure:
    """Return the last side of "x = 2 + 3 = 5", or the set of "x in [0, 1]", unless `other` is a relation as well."""
    if side.kind != "relation" or other.kind == "relation":
        return side
    first, last = side.parts[0], side.parts[-1]
    names = symbols_of(first.tree) if first.kind == "value" else set()
    is_name = first.kind == "value" and (first.tree[0] == "name" or re.fullmatch(r"[A-Za-z]\([a-z]\)", first.source))
    is_named = is_name and not (last.kind == "value" and first.tree[0] == "name" and names & symbols_of(last.tree))
    is_computed = all(part.kind == "value" and not symbols_of(part.tree) for part in side.parts)
    if set(side.operators) == {"in"} and len(side.parts) == 2 and is_named:
        return last
    if set(side.operators) != {"="} or not (is_named or is_computed):
        return side
    # Every side of a chain must have the same value, so "x = 2 = 3" does not pass for 3.
    chain = side.parts[1:] if is_named else side.parts
    return last if all(_same(part, last) for part in chain[:-1]) else side


def _same_in_any_order(true: Sequence[Structure], answer: Sequence[Structure]) -> bool:
    # Each true part is used up by one match: {1, 1} is not {1, 2}, nor does {1} answer {1, 2}.
    unmatched = list(true)
    for part in answer:
        match = next((place for place, other in enumerate(unmatched) if _same(other, part)), None)
        if match is None:
            return False
        del unmatched[match]
    return not unmatched


def _same_relation(true: Structure, answer: Structure) -> bool:
    # Read from the right as well: 3 > x is x < 3.
    forms = [(answer.operators, answer.parts)]
    if all(operator in _FLIPPED for operator in answer.operators):
        forms.append((tuple(_FLIPPED[sign] for sign in answer.operators[::-1]), answer.parts[::-1]))
    if any(true.operators == operators and all(map(_same, true.parts, parts)) for operators, parts in forms):
        return True
    if len(true.operators) > 1 or len(answer.operators) > 1:
        return False
    operator, other = true.operators[0], answer.operators[0]
    if operator not in _FLIPPED or other not in _FLIPPED:
        return False
    sides = [*true.parts, *answer.parts]
    if any(side.kind != "value" for side in sides):
        return False
    # Two relations are the same if the differences of their sides have a constant ratio: 2x = 4 is x - 2 = 0. A
    # negative ratio turns an inequality around.
    ratio = _ratio(*(("-", left.tree, right.tree) for left, right in (sides[:2], sides[2:])))
    if ratio is None:
        return False
    return operator == (other if ratio > 0 else _FLIPPED[other])


def _same_value(true: Structure, answer: Structure) -> bool:
    import mpmath  # type: ignore[import-untyped]

    names = symbols_of(true.tree)
    # A variable that cancels out, as in x + y - y, is refused too: such an answer is not in its final form.
    if names != symbols_of(answer.tree):
        return False
    if not names:
        return _same_number(true, answer)
    num_points = 0
    with mpmath.workdps(_DIGITS):
        for values in points(names):
            try:
                # A pole of the true formula says nothing about the answer; enough other points have to agree.
                true_value = evaluate(true.tree, values)
            except ZeroDivisionError:
                continue
            if not _is_near(true_value, evaluate(answer.tree, values)):
                return False
            num_points += 1
    return num_points >= _LEAST_POINTS


def _same_number(true: Structure, answer: Structure) -> bool:
    """Compare numbers: rational ones exactly, others to hundreds of digits; a decimal answer may also be rounded."""
    import mpmath

    try:
        true_fraction = exact(true.tree)
        answer_fraction = exact(answer.tree)
        if true_fraction is not None and answer_fraction is not None:
            return true_fraction == answer_fraction or _is_rounded(answer.source, true_fraction)
        with mpmath.workdps(_DIGITS):
            true_value, answer_value = evaluate(true.tree, {}), evaluate(answer.tree, {})
            size = max(abs(true_value), abs(answer_value))
            # What is left of terms that cancel is far smaller than any number that is written.
            if size < mpmath.mpf(10) ** -_ZERO_DIGITS or abs(true_value - answer_value) <= size / 10**_EQUAL_DIGITS:
                return True
            # A decimal answer may round an irrational number, for which 40 decimals of it are enough.
            if mpmath.im(true_value) != 0 or abs(true_value) > 10**15:
                return False
            approximation = Fraction(int(mpmath.nint(mpmath.re(true_value) * 10**40)), 10**40)
    except ZeroDivisionError:
        return False
    return _is_rounded(answer.source, approximation)


def _ratio(true: Node, answer: Node) -> float | None:
    """Return the constant factor between two formulas that are not 0; None if there is none."""
    import mpmath

    names = symbols_of(true) | symbols_of(answer)
    factors = []
    with mpmath.workdps(_DIGITS):
        for values in points(names):
            true_value, answer_value = evaluate(true, values), evaluate(answer, values)
            if not names or abs(true_value) < 10**-_EQUAL_DIGITS or abs(answer_value) < 10**-_EQUAL_DIGITS:
                return None
            factors.append(answer_value / true_value)
        first = factors[0]
        if mpmath.im(first) != 0 or not all(_is_near(first, factor) for factor in factors):
            return None
        return 1.0 if mpmath.re(first) > 0 else -1.0


def _is_near(left: object, right: object) -> bool:
    import mpmath

    distance = abs(left - right)  # type: ignore[operator]
    return bool(distance <= mpmath.mpf(10) ** -_EQUAL_DIGITS * max(1, abs(left), abs(right)))  # type: ignore[arg-type]


def _is_rounded(number: str, value: Fraction) -> bool:
    """Return whether a decimal number rounds an exact value, as 1.414214 rounds the square root of 2."""
    if not _DECIMAL_FORM.fullmatch(number) or (decimals := _DECIMAL.fullmatch(number)) is None:
        return False
    digits = len((decimals[1] + decimals[2]).lstrip("0"))
    return rounds(len(decimals[2]), digits, Fraction(number), value)
