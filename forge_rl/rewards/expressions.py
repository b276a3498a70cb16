"""Parses numbers, lists and formulas that a model wrote, node by node of Python's syntax tree, without evaluation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_MOST_CHARS = 20_000
_MOST_NODES = 5_000
_MOST_DEPTH = 100
_MOST_BITS = 4096
"""Maximum bits of a number, and of a power of numbers."""
_MOST_EXPONENT = 1000
_FUNCTIONS = frozenset(
    (
        *("sqrt", "cbrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot"),
        *("asec", "acsc", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "Abs", "erf"),
    )
)
"""Functions allowed in a formula, by their sympy names."""
_CONSTANTS = frozenset(("E", "pi", "I"))


def literal(text: str) -> Any:
    """Parse a list, tuple, string or number in Python's notation.

    Raises:
        ValueError: the text is not a literal, or is too long.
    """
    if len(text) > _MOST_CHARS:
        raise ValueError("the text is too long")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a literal: {type(error).__name__}") from None


def arithmetic(text: str) -> Fraction:
    """Compute an expression of numbers with + - * / and ** exactly, such as (3 + 4) * 5 / 2.

    Raises:
        ValueError: the expression contains anything else, or is too large.
        ZeroDivisionError: the expression divides by 0.
    """
    return _fraction(_tree(text))


def formula(text: str, symbols: Mapping[str, Any]) -> Any:
    """Build the sympy expression of a formula in Python's notation, like sympy's `parse_expr`, which executes the text.

        formula("2*x**2/3 + sin(x)", {"x": sympy.Symbol("x")})

    Functions and E, pi and I are sympy's; any name that sympy does not define is a symbol.

    Args:
        symbols: values by name.

    Raises:
        ValueError: the formula contains anything except numbers, names, + - * / ** and the allowed functions, or is
            too large.
    """
    return _sympy(_tree(text), symbols)


def _tree(text: str) -> ast.expr:
    """Parse an expression of bounded size and depth."""
    if len(text) > _MOST_CHARS:
        raise ValueError("the text is too long")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {type(error).__name__}") from None
    # Level by level, not recursively: the bound on depth must hold before any recursive reader sees the tree.
    level: list[ast.AST] = [body]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > _MOST_NODES or depth > _MOST_DEPTH:
            raise ValueError("the expression is too large")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return body


def _fraction(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            # repr gives the shortest decimal that the text could have meant: 0.1 is 1/10, not the double nearest to it.
            return _bounded(Fraction(repr(value)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_fraction(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _fraction(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            # Checked before it is computed: 9**9**9 would take all memory.
            base, exponent = _fraction(left), _fraction(right)
            _check_power(base, exponent)
            if exponent.denominator != 1:
                raise ValueError("roots are not supported")
            return base ** int(exponent)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_fraction(left), _fraction(right)))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _sympy(node: ast.expr, symbols: Mapping[str, Any]) -> Any:
    import sympy  # type: ignore[import-untyped]

    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return sympy.Integer(int(_bounded(Fraction(value))))
        case ast.Constant(value=float() as value):
            return sympy.Float(repr(value))
        case ast.Name(id=name):
            if name in symbols:
                return symbols[name]
            if name in _CONSTANTS:
                return getattr(sympy, name)
            # Names such as `solve` or `S` are sympy's own objects; as symbols they would mean something else than for
            # `parse_expr`.
            if hasattr(sympy, name):
                raise ValueError(f"{name!r:.40} is not a symbol")
            return sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_sympy(operand, symbols)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _sympy(operand, symbols)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _sympy(left, symbols), _sympy(right, symbols)
            if exponent.is_Number:
                rational = Fraction(int(base.p), int(base.q)) if base.is_Rational else Fraction(1)
                _check_power(rational, Fraction(float(exponent)))
            return base**exponent
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_sympy(left, symbols), _sympy(right, symbols))
        case ast.Call(func=ast.Name(id="log" | "ln" as name), args=[number, base], keywords=[]):
            return getattr(sympy, name)(_sympy(number, symbols), _sympy(base, symbols))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS | {"abs"}:
            return getattr(sympy, "Abs" if name == "abs" else name)(_sympy(argument, symbols))
    raise ValueError(f"{type(node).__name__} is not allowed in a formula")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ValueError("the number is too large")
    return value


def _check_power(base: Fraction, exponent: Fraction) -> None:
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if abs(exponent) > _MOST_EXPONENT or bits * abs(exponent) > _MOST_BITS:
        raise ValueError("the power is too large")


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
