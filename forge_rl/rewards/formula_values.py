r"""Computes the values of formulas at points, within bounds on every value.

evaluate(read_formula(r"\frac{x+1}{2}"), {"x": Fraction(3)})  # mpf("2.0")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from forge_rl.rewards.formulas import Node

_MOST_BITS = 100_000
"""Maximum binary exponent of a value."""
_MOST_ANGLE_BITS = 64
_MOST_FACTORIAL = 500


def evaluate(node: Node, values: Mapping[str, Fraction]) -> Any:
    """Return the value of a formula as a number of mpmath, at its current precision.

    Raises:
        ValueError: a value is too large, is not finite, or an operand is out of bounds.
        ZeroDivisionError: the formula divides by 0.
    """
    import mpmath  # type: ignore[import-untyped]

    match node:
        case ("num", Fraction() as number):
            return _bounded(mpmath.mpf(number.numerator) / number.denominator)
        case ("name", str(name)):
            return mpmath.mpf(values[name].numerator) / values[name].denominator
        case ("const", str(name)):
            # mpmath's constants are lazy; the product evaluates them at the current precision.
            return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}[name] * mpmath.mpf(1)
        case ("neg", inner):
            return -evaluate(inner, values)
        case ("%", inner):
            return evaluate(inner, values) / 100
        case ("!", inner):
            return mpmath.factorial(_small_integer(evaluate(inner, values), _MOST_FACTORIAL))
        case ("binom", upper, lower):
            return mpmath.binomial(
                *(_small_integer(evaluate(part, values), _MOST_FACTORIAL) for part in (upper, lower))
            )
        case ("root", inner, degree):
            return _root(evaluate(inner, values), _small_integer(evaluate(degree, values), 100))
        case ("^", base, exponent):
            return _power(evaluate(base, values), evaluate(exponent, values))
        case ("call", str(name), inner):
            return _called(name, evaluate(inner, values))
        case (operator, left, right):
            return _bounded(_OPERATORS[operator](evaluate(left, values), evaluate(right, values)))
    raise ValueError(f"{node[0]!r} has no value")


def exact(node: Node) -> Fraction | None:
    """Return the value of a formula of rational numbers, without rounding; None for any other formula.

    Raises:
        ValueError: a value is too large.
        ZeroDivisionError: the formula divides by 0.
    """
    match node:
        case ("num", Fraction() as number):
            return _bounded_fraction(number)
        case ("neg", inner):
            value = exact(inner)
            return None if value is None else -value
        case ("%", inner):
            value = exact(inner)
            return None if value is None else value / 100
        case ("!", inner):
            value = exact(inner)
            if value is None:
                return None
            if value.denominator != 1 or not 0 <= value <= _MOST_FACTORIAL:
                raise ValueError("an operand is not a small integer")
            return Fraction(math.factorial(int(value)))
        case ("^", base, exponent):
            return _exact_power(exact(base), exact(exponent))
        case ("+" | "-" | "*" | "/" as operator, left, right):
            left_value, right_value = exact(left), exact(right)
            if left_value is None or right_value is None:
                return None
            return _bounded_fraction(_OPERATORS[operator](left_value, right_value))
    return None


def _exact_power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None or exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise ZeroDivisionError
    if _bits(base) * abs(exponent) > _MOST_BITS:
        raise ValueError("the power is too large")
    return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded_fraction(value: Fraction) -> Fraction:
    if _bits(value) > _MOST_BITS:
        raise ValueError("the value is too large")
    return value


def _root(value: Any, degree: int) -> Any:
    """Return the principal root, which is real for odd roots of negative numbers."""
    import mpmath

    if degree == 0:
        raise ZeroDivisionError
    # mpmath's principal cube root of -8 is complex; school mathematics means -2.
    if degree % 2 and mpmath.im(value) == 0 and mpmath.re(value) < 0:
        return -mpmath.root(-mpmath.re(value), degree)
    return mpmath.root(value, degree)


def _power(base: Any, exponent: Any) -> Any:
    import mpmath

    if base == 0 and mpmath.re(exponent) <= 0:
        raise ZeroDivisionError
    # mag is about log2 of the absolute value, so the product bounds the result's exponent before it is computed.
    size = max(1, abs(int(mpmath.mag(base)))) if base != 0 else 1
    if mpmath.mag(exponent) > 40 or size * abs(exponent) > _MOST_BITS:
        raise ValueError("the power is too large")
    return _bounded(mpmath.power(base, exponent))


def _called(name: str, value: Any) -> Any:
    import mpmath

    if name in ("floor", "ceil"):
        return getattr(mpmath, name)(value)
    if name in ("ln", "log"):
        if value == 0:
            raise ZeroDivisionError
        # log without a base is that of 10, which is another function than ln.
        return mpmath.log(value) if name == "ln" else mpmath.log10(value)
    # Reducing a huge angle needs as many more bits as it has, and exp of 2^16 is already near the bound on values.
    if name not in ("abs", "sqrt") and value != 0 and mpmath.mag(value) > (16 if name == "exp" else _MOST_ANGLE_BITS):
        raise ValueError("the argument is too large")
    if name in ("sinh", "cosh", "tanh") and mpmath.mag(value) > 16:
        raise ValueError("the argument is too large")
    return _bounded(abs(value) if name == "abs" else getattr(mpmath, name)(value))


def _small_integer(value: Any, limit: int) -> int:
    import mpmath

    if mpmath.im(value) != 0 or not 0 <= mpmath.re(value) <= limit or mpmath.re(value) != int(mpmath.re(value)):
        raise ValueError("an operand is not a small integer")
    return int(mpmath.re(value))


def _bounded(value: Any) -> Any:
    import mpmath

    if not mpmath.isfinite(value) or (value != 0 and abs(mpmath.mag(value)) > _MOST_BITS):
        raise ValueError("the value is too large")
    return value


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def points(names: set[str]) -> Iterator[dict[str, Fraction]]:
    """Yield points at which formulas of these variables are compared: fixed numbers of both signs, with no pattern."""
    sorted_names = sorted(names)
    # Six points, so that a few poles leave enough to compare; they are fixed, so that a score never depends on chance.
    for point in range(1, 7):
        yield {
            name: Fraction((-1) ** ((point + place) // 2) * (((point * 7919 + place * 104729) ** 2) % 9973 + 577), 4099)
            for place, name in enumerate(sorted_names)
        }
