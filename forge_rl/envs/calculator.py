"""Calculator tool: arithmetic in Python notation, with a few functions and no other names."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_NAMES = ("sqrt", "floor", "ceil", "gcd", "lcm", "factorial", "log", "exp")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {name: getattr(math, name) for name in _NAMES} | {
    function.__name__: function for function in (abs, round, min, max)
}
_MOST_CHARS = 500
_MOST_BITS = 4096


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (3 + 4) * 5."""
    if len(expression) > _MOST_CHARS:
        raise ValueError(f"the expression has more than {_MOST_CHARS} characters")
    try:
        # Models write powers with ^, and products with the multiplication sign.
        tree = ast.parse(expression.strip().replace("^", "**").replace("\u00d7", "*"), mode="eval")
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    value = _value(tree.body)
    # Below 2**53, a float holds every integer exactly.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if is_whole else round(value, 10) if isinstance(value, float) else value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            # A bound before the computation: a huge power would take all time and memory.
            are_ints = isinstance(a, int) and isinstance(b, int)  # floats raise OverflowError themselves
            if isinstance(op, ast.Pow) and are_ints and abs(b) * int(a).bit_length() > _MOST_BITS:
                raise ValueError("the power is too large")
            return _bounded(_BINARY[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            values = [_value(argument) for argument in arguments]
            if name == "round" and any(abs(digits) > 400 for digits in values[1:]):
                raise ValueError("round takes up to 400 digits")
            # Bounded before the call, as powers are.
            if name in ("factorial", "lcm") and any(abs(value) > 400 for value in values):
                raise ValueError(f"{name} takes numbers up to 400")
            return _bounded(_FUNCTIONS[name](*values))
    raise ValueError(f"{ast.unparse(node)!r:.80} is not arithmetic")


def _bounded(value: Any) -> int | float:
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{value!r:.80} is not a finite number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the number is too large")
    return value
