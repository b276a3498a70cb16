r"""Reads a formula in LaTeX or plain notation as a tree of bounded size.

read_formula(r"\frac{x}{2}")  # ("/", ("name", "x"), ("num", Fraction(2)))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

_MOST_CHARS = 2000
_MOST_NODES = 400
_MOST_DEPTH = 40

# Applied in this order: one spelling for signs that mean the same, and none for those that change only the looks.
_REPLACED = (
    (re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]ig+[lr]?(?![a-z])|\\displaystyle"), ""),
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\[,;:! ]|~|\\q?quad(?![a-z])|\\limits"), " "),
    (re.compile(r"\\(?:cdot|times|ast)(?![a-z])|[\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}\N{DOT OPERATOR}]"), "*"),
    (re.compile(r"\\div(?![a-z])|\N{DIVISION SIGN}"), "/"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"[\N{MINUS SIGN}\N{EN DASH}]"), "-"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\N{DEGREE SIGN}"), r"\\degree "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[lr]vert(?![a-z])|\\[lr]?mid(?![a-z])"), "|"),
    (re.compile(r"\N{GREEK SMALL LETTER PI}"), r"\\pi "),
    (re.compile(r"\N{INFINITY}"), r"\\infty "),
    (re.compile(r"\N{SQUARE ROOT}"), r"\\sqrt "),
    (re.compile(r"\N{SUPERSCRIPT TWO}"), "^2"),
    (re.compile(r"\N{SUPERSCRIPT THREE}"), "^3"),
    (re.compile(r"\{,\}"), ","),
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_NAMED = re.compile(r"\\(?:text|mathrm|operatorname|mathbf|mathit)\s*\{\s*([A-Za-z]+)\s*\}")
_WORD = re.compile(r"[A-Za-z]+")
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{\s*([A-Za-z0-9]+)\s*\}|([A-Za-z0-9]))")
_FUNCTIONS: Mapping[str, str] = {
    name: name.replace("arc", "a")
    for name in (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "exp", "ln", "log", "sqrt", "abs"),
    )
}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_GREEK = frozenset(_GREEK_NAMES.split())
_LONGEST_PRODUCT = 3
"""Maximum letters in a row that are a product of variables; more are a word."""

Node = tuple[Any, ...]
"""An operation and its operands: ("num", Fraction), ("name", text), ("+", left, right), ("call", name, argument)."""


def normalised_notation(text: str) -> str:
    """Return a formula's text in one notation, without sizes, gaps and other signs that change no meaning."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    # TeX takes one character as an argument: \frac12 is \frac{1}{2}, x^2 is x^{2}.
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"([\^_])\s*(\w)(?!\w)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)(?!\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=[A-Za-z\d])\s+(?=[A-Za-z\d])", "\0", text)  # between words and digits, and behind a command
    return re.sub(r"\s+", "", text).replace("\0", " ")


def read_formula(text: str) -> Node:
    """Return the tree of a formula.

    Raises:
        ValueError: the text is not a formula of the supported kind, or is too large.
    """
    if len(text) > _MOST_CHARS:
        raise ValueError("the formula is too long")
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    reader = _FormulaReader(text.strip())
    tree = reader.sum()
    if reader.place < len(reader.text):
        raise ValueError(f"{reader.text[reader.place :]!r:.20} is left over")
    return tree


def symbols_of(node: Node) -> set[str]:
    """Return the names of a formula's variables."""
    if node[0] == "name":
        return {node[1]}
    return {name for part in node[1:] if isinstance(part, tuple) for name in symbols_of(part)}


@dataclass(eq=False)
# Recursive descent: sum, product, power, atom, each of which reads from `place` on. Each node is counted, as a short
# text can nest deeply, and a model chooses the text.
class _FormulaReader:
    text: str
    place: int = 0
    _nodes: int = field(default=0, init=False)
    _depth: int = field(default=0, init=False)
    _bars: int = field(default=0, init=False)
    """Number of open absolute values."""

    def sum(self) -> Node:
        self._depth += 1
        self._nodes += 1
        if self._depth > _MOST_DEPTH or self._nodes > _MOST_NODES:
            raise ValueError("the formula is too large")
        sign = self._take("+-")
        node = self.product()
        node = ("neg", node) if sign == "-" else node
        while operator := self._take("+-"):
            node = self._made(operator, node, self.product())
        self._depth -= 1
        return node

    def product(self) -> Node:
        node = self.power()
        while True:
            if operator := self._take("*/"):
                sign = self._take("+-")
                factor = self.power()
                node = self._made(operator, node, ("neg", factor) if sign == "-" else factor)
            elif self._begins_factor():
                # Factors side by side multiply. A digit does not: "2 3" is more likely two numbers than 6.
                is_number, begins_digit = node[0] == "num", self._peek().isdigit() or self._peek() == "."
                if begins_digit:
                    raise ValueError("a number follows without an operator")
                is_fraction = self.text.startswith("\\frac", self.place)
                factor = self.power()
                # 2\frac{1}{2} is a mixed number, two and a half; 2\frac{x}{2} is a product.
                is_mixed = is_number and is_fraction and factor[0] == "/" and {factor[1][0], factor[2][0]} == {"num"}
                node = self._made("+" if is_mixed else "*", node, factor)
            else:
                return node

    def power(self) -> Node:
        node = self.atom()
        while postfix := self._take("!%"):
            node = self._made(postfix, node)
        # A degree is a variable like any unit, so that 30 degrees equal neither 30 nor 30 radians.
        if self.text.startswith("\\degree", self.place):
            self.place += len("\\degree")
            return self._made("*", node, ("name", "degree"))
        if self._take("^"):
            sign = self._take("+-")
            # Powers associate to the right: 2^3^2 is 2^9. Braces end the exponent.
            exponent = self.power() if self._peek() != "{" else self.atom()
            node = self._made("^", node, ("neg", exponent) if sign == "-" else exponent)
            while postfix := self._take("!%"):
                node = self._made(postfix, node)
        return node

    def atom(self) -> Node:
        # Counts an atom too: a sum of many numbers has no other node for each.
        self._made("", ())
        letter = self._peek()
        if number := _NUMBER.match(self.text, self.place):
            self.place = number.end()
            return ("num", Fraction(number.group().replace(",", "")))
        if letter in "([{":
            return self._enclosed(letter)
        if letter == "|":
            self.place += 1
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._expect("|")
            return ("call", "abs", node)
        if wrapped_name := _NAMED.match(self.text, self.place):
            self.place = wrapped_name.end()
            return (
                self._function(wrapped_name[1])
                if wrapped_name[1] in _FUNCTIONS
                else ("name", self._subscripted(wrapped_name[1]))
            )
        if command := _COMMAND.match(self.text, self.place):
            self.place = command.end()
            return self._command(command[1])
        if word := _WORD.match(self.text, self.place):
            return self._named(word.group())
        raise ValueError(f"{self.text[self.place :]!r:.20} is not a formula")

    def _named(self, word: str) -> Node:
        # The longest name first, of up to six letters as in "arcsin": "sinh" is not sin times h.
        for length in range(min(len(word), 6), 1, -1):
            name = word[:length]
            if name in _FUNCTIONS:
                self.place += length
                return self._function(name)
            if name in ("pi",) or (name in _GREEK and length == len(word)):
                self.place += length
                return ("const", "pi") if name == "pi" else ("name", self._subscripted(name))
        if len(word) > _LONGEST_PRODUCT and not any(name in word for name in ("pi", *_FUNCTIONS)):
            raise ValueError(f"{word!r:.20} is a word")
        self.place += 1
        # A letter alone is a variable, except Euler's number and the imaginary unit; e_1 is a variable again.
        if word[0] in "ei" and not _SUBSCRIPT.match(self.text, self.place):
            return ("const", word[0])
        return ("name", self._subscripted(word[0]))

    def _command(self, name: str) -> Node:
        if name == "frac":
            return self._made("/", self._argument(), self._argument())
        if name == "sqrt":
            if self._peek() == "[":
                degree = self._enclosed("[")
                return self._made("root", self._argument(), degree)
            return ("call", "sqrt", self._argument())
        if name in ("binom", "dbinom", "tbinom"):
            return self._made("binom", self._argument(), self._argument())
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("lfloor", "lceil"):
            node = self.sum()
            self._peek()
            closing = f"\\r{name[1:]}"
            if not self.text.startswith(closing, self.place):
                raise ValueError(f"{closing} is missing")
            self.place += len(closing)
            return self._made("call", name[1:], node)
        if name == "pi":
            return ("const", "pi")
        if name == "infty":
            return ("name", "infinity")
        if name in _GREEK:
            return ("name", self._subscripted(name))
        raise ValueError(f"\\{name:.20} is not supported")

    def _function(self, name: str) -> Node:
        # The order is that of \log_{2}^{3}(x): base, exponent of the whole call, argument.
        base: Node | None = None
        if name == "log" and (subscript := _SUBSCRIPT.match(self.text, self.place)):
            self.place = subscript.end()
            base = read_formula(subscript[1] or subscript[2])
        exponent: Node | None = None
        if name != "sqrt" and self._take("^"):
            sign = self._take("+-")
            exponent = self.atom()
            exponent = ("neg", exponent) if sign == "-" else exponent
        if self._peek() in ("(", "{", "[", "|"):
            argument = self.atom()
        else:
            argument = self.power()
            # Without brackets, the argument is a product up to the next function, in any notation: sin 2x is sin(2x),
            # but sin x cos x is sin(x) cos(x).
            while name != "sqrt" and self._begins_factor() and self._peek() not in ("(", "[", "{"):
                function = self._next_function()
                # A root goes on with a number, as in cos 2\sqrt{3}x. After a variable it is a factor of its own, as in
                # cos x \sqrt{x}.
                if function and (function not in ("sqrt", "abs") or symbols_of(argument)):
                    break
                if self._peek().isdigit():
                    raise ValueError("a number follows without an operator")
                argument = self._made("*", argument, self.power())
        node = self._made("call", _FUNCTIONS[name], argument)
        if base is not None:
            node = self._made("/", ("call", "ln", argument), ("call", "ln", base))
        return node if exponent is None else self._made("^", node, exponent)

    def _argument(self) -> Node:
        """Read the argument of a command: a group, or else one digit, letter or command."""
        letter = self._peek()
        if letter.isdigit():
            self.place += 1
            return ("num", Fraction(letter))
        if letter.isalpha():
            self.place += 1
            return ("const", letter) if letter in "ei" else ("name", letter)
        return self.atom()

    def _enclosed(self, opening: str) -> Node:
        self._expect(opening)
        # In brackets, a bar opens an absolute value again, however many are open outside.
        bars, self._bars = self._bars, 0
        node = self.sum()
        self._bars = bars
        self._expect({"(": ")", "[": "]", "{": "}"}[opening])
        return node

    def _subscripted(self, name: str) -> str:
        if subscript := _SUBSCRIPT.match(self.text, self.place):
            self.place = subscript.end()
            name = f"{name}_{subscript[1] or subscript[2]}"
        while self._take("'"):
            name += "'"
        return name

    def _begins_factor(self) -> bool:
        letter = self._peek()
        if letter == "|":
            # With one open, a bar closes it: |x| y is a product, but in |x y| the second bar ends the value.
            return self._bars == 0
        if self.text.startswith(("\\rfloor", "\\rceil"), self.place):
            return False
        return bool(letter) and (letter.isalnum() or letter in "([{\\.")

    def _next_function(self) -> str:
        """Return the function that begins here, with or without a backslash; "" if none does."""
        if wrapped_name := _NAMED.match(self.text, self.place):
            return wrapped_name[1] if wrapped_name[1] in _FUNCTIONS else ""
        start = self.place + self.text.startswith("\\", self.place)
        return next((name for name in _FUNCTIONS if self.text.startswith(name, start)), "")

    def _peek(self) -> str:
        while self.place < len(self.text) and self.text[self.place].isspace():
            self.place += 1
        return self.text[self.place : self.place + 1]

    def _take(self, letters: str) -> str:
        letter = self._peek()
        if letter and letter in letters:
            self.place += 1
            return letter
        return ""

    def _expect(self, letter: str) -> None:
        if not self._take(letter):
            raise ValueError(f"{letter!r} is missing")

    def _made(self, *node: Any) -> Node:
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise ValueError("the formula is too large")
        return node
