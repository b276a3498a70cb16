"""Reads a number in an answer, exactly: sign, digits, fraction or power, and its unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 400
"""Maximum characters of a quantity."""
_MOST_EXPONENT = 400
_MOST_BITS = 4096
_LEAST_DIGITS = 6
"""Minimum significant digits of a decimal number that may stand for a number that it rounds."""
_DOUBLE_DIGITS = 15
"""Digits from which a decimal number is taken for a printed double."""

_INTEGER = r"(?:0|[1-9]\d*)"
_GAPS = (r",", r"\{,\}", r"\\,", r"\\!", r",\\!", r"\\ ", "\N{THIN SPACE}", "\N{NARROW NO-BREAK SPACE}", " ")
_THOUSANDS = "|".join(rf"[1-9]\d{{0,2}}(?:{gap}\d{{3}})+(?!\d)" for gap in _GAPS)
_PADDED = r"0\d{1,2}(?![\d.])"
"""Up to three digits with leading zeros, as in the answers of AIME; longer ones are codes."""
_DECIMAL = rf"(?:(?P<whole>{_THOUSANDS}|{_PADDED}|{_INTEGER})(?P<decimals>\.\d+)?|(?P<point>\.\d+))"
_TEN = r"(?:\\times|\\cdot|\N{MULTIPLICATION SIGN}|\*|x)\s*10\s*\^\s*"
_EXPONENT = (
    rf"(?:[eE](?P<e>[-+]?\d{{1,4}})|\s*{_TEN}(?:\{{\s*(?P<ten>[-+]?\d{{1,4}})\s*\}}|(?P<bare_ten>[-+]?\d{{1,4}})))"
)
_FRACTION = (
    rf"(?:(?P<mixed>{_INTEGER})\s*)?\\[dt]?frac\s*"
    rf"(?:\{{\s*(?P<fs>[-+]?)(?P<n>{_INTEGER})\s*\}}\s*\{{\s*(?P<d>{_INTEGER})\s*\}}"
    r"|(?P<n1>\d)\s*(?:\{\s*(?P<db>[1-9]\d*)\s*\}|(?P<d1>\d)(?!\d)))"
)
_SLASH = rf"(?:(?P<mixed_slash>{_INTEGER})(?:\s+|-))?(?P<over>{_INTEGER})\s*/\s*(?P<under>{_INTEGER})"
_POWER = (
    rf"(?P<base>{_INTEGER})\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<power>-?\d{{1,4}})\s*\}}|(?P<bare_power>-?\d{{1,4}}))(?!\d)"
)
# The order of the alternatives matters: a regular expression takes the first that matches, and a power, fraction or
# slash begins with what would be a decimal number on its own.
_QUANTITY = re.compile(
    r"(?P<sign>[-+])?\s*(?P<currency>\\?\$|[\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}])?\s*(?P<late_sign>-)?"
    rf"(?:{_POWER}|{_FRACTION}|{_SLASH}|{_DECIMAL}{_EXPONENT}?)"
)
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{NO-BREAK SPACE}": " "})
_DELIMITERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"))
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|textit|mathrm|mathbf)\{([^{}]*)\}")
_EXPONENTS = str.maketrans({"\N{SUPERSCRIPT TWO}": "^2", "\N{SUPERSCRIPT THREE}": "^3"})
_PERCENT = re.compile(r"\s*(?:\\?%|per\s?cent)")
_DEGREE = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\N{DEGREE SIGN}|degrees?)\s*([CF]?)")
_UNIT = re.compile(r"[^\W\d_]+(?:\^-?\d)?(?:(?:\s*/\s*|[ -])[^\W\d_]+(?:\^-?\d)?){0,4}")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNIT_WORDS = (
    "or and not no to than less more plus minus times divided over half halves quarter third thirds hundred dozen pi "
    "sqrt squared cubed factorial choose mod modulo power if for where when is are with as but"
)
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split())
"""Words after a number that change it, or begin another part of the answer."""
_LETTERS = frozenset("mgshL")
"""Units of one letter; any other letter is a variable."""
_ATTACHED_UNITS = "mm cm km dm kg mg mL ml cL km/h m/s mph ms kWh kW Hz kHz MHz GHz GB MB kB cm^2 cm^3 km^2"
_ATTACHED = frozenset(_ATTACHED_UNITS.split())
"""Units that follow a number without a blank; m^2 and other letters could be variables."""
_SAME_UNITS = {
    name: names.split()[0]
    for names in (
        "$ dollar usd",
        "\N{EURO SIGN} euro eur",
        "\N{POUND SIGN} gbp",
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "g gram gramme",
        "kg kilogram kilo",
        "s second sec",
        "min minute",
        "h hour hr",
        "l liter litre",
        "ml milliliter millilitre",
        "ft foot feet",
        "in inch inche",
        "mi mile",
        "lb pound",
        "degree deg",
    )
    for name in names.split()
}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number with its unit."""

    value: Fraction
    unit: str = ""
    """Canonical name of the unit, "%" included; "" for none."""
    decimals: int | None = None
    """Number of decimals of a decimal number; None for fractions and powers."""
    digits: int = 0
    """Number of significant digits of a decimal number."""
    number: str = ""
    """The number without currency, unit and thousands separators."""

    def __str__(self) -> str:
        return canonical(self.value)


def read_quantity(text: str) -> Quantity | None:
    """Read a text that is one number, with or without a unit, and nothing else; None for any other text.

    read_quantity(r"-\\frac{1}{2}\\text{ cm}")  # Quantity(value=Fraction(-1, 2), unit="cm")

    Sums, products, roots, several numbers and variables are not numbers, nor are codes such as 0101.
    """
    text = plain(text)
    if not text or len(text) > _LONGEST:
        return None
    match = _QUANTITY.match(text)
    # The sign stands before or after the currency, as in -$5 and $-5, but not both.
    if match is None or (match["sign"] and match["late_sign"]):
        return None
    value = _value(match)
    if value is None:
        return None
    unit = _read_unit(text[match.end() :], match["currency"] or "")
    if unit is None:
        return None
    scale, name = unit
    decimals = match["decimals"] or match["point"]
    is_decimal = match["whole"] is not None or match["point"] is not None
    integer = re.sub(r"\D", "", match["whole"] or "")
    negative = match["sign"] == "-" or bool(match["late_sign"])
    # The number as it was written, without sign, currency, unit and thousands separators.
    signs = text[match.end("late_sign") if match["late_sign"] else _start(match) : match.end()]
    if match["whole"]:
        signs = signs.replace(match["whole"], integer, 1)
    return Quantity(
        value=(-value if negative else value) * scale,
        unit=name,
        decimals=len(decimals or ".") - 1 if is_decimal and scale == 1 and not _exponent(match) else None,
        digits=len((integer + (decimals or "").lstrip(".")).lstrip("0")),
        number=("-" if negative else "") + (signs.strip() if scale == 1 else canonical(value * scale)),
    )


def is_measure(quantity: Quantity) -> bool:
    """Return whether a quantity's unit is one of the known ones, and not just a word after the number."""
    measures = {"%", "degree", "degreeC", "degreeF", *_SAME_UNITS.values(), *_ATTACHED}
    return quantity.unit.partition("^")[0] in measures or not quantity.unit


def same_quantity(true: Quantity, answer: Quantity, *, percent_is_unit: bool = True) -> bool:
    """Return whether an answer is the true quantity.

    Values are equal exactly, except that a decimal number of at least 6 significant digits may round the other one. A
    true number without a unit accepts any unit; a unit that the truth has may be left out, but not be another one. Of
    percentages, 50% equals 0.5 and, as an answer only and if `percent_is_unit`, a true 50; but 0.5% is never 0.5.
    """
    hundredths = Fraction(1, 100)
    match true.unit == "%", answer.unit == "%":
        case True, True:
            return _same_value(true, answer)
        case True, False:
            return not answer.unit and true.value * hundredths == answer.value
        case False, True:
            if true.unit:
                return False
            # Only above 1 may a percent sign be a mere unit: 50% may answer a true 50, but 0.5% must not answer 0.5.
            may_be_unit = percent_is_unit and true.decimals is not None and abs(true.value) > 1
            return answer.value * hundredths == true.value or (may_be_unit and _same_value(true, answer))
    return (not true.unit or not answer.unit or true.unit == answer.unit) and _same_value(true, answer)


def rounds(decimals: int | None, digits: int, rounded: Fraction, exact: Fraction) -> bool:
    """Return whether a decimal number of enough digits is the nearest one of its length to an exact number."""
    if decimals is None or digits < _LEAST_DIGITS or (rounded.denominator == exact.denominator == 1):
        return False
    # At most half a unit of the last decimal: 2 |r - x| 10^d <= 1, in exact arithmetic.
    return bool(2 * abs(rounded - exact) * 10**decimals <= 1)


def canonical(value: Fraction) -> str:
    """Return a number as a decimal if that ends, else as a fraction."""
    # A fraction ends as a decimal exactly if its denominator has no prime factor but 2 and 5.
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0 and rest > 1:
            rest //= prime
    if rest != 1 or value.denominator.bit_length() > 50:
        return str(value)
    places = 0
    while (10**places) % value.denominator:
        places += 1
    digits = f"{abs(value.numerator) * (10**places // value.denominator):0{places + 1}d}"
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else f"{sign}{digits}"


def plain(text: str) -> str:
    r"""Strip marks without meaning around an answer: blanks, dollar signs, bold, \boxed, \text and a full stop."""
    # Marks nest in any order, as in **$\boxed{5}$.**, so they are stripped until nothing changes.
    text = text[: 50 * _LONGEST].translate(_MINUS).strip()
    while True:
        before = text
        # The full stop of a sentence, but not the last dot of initials such as "U.S.".
        if text.endswith(".") and not re.search(r"\.\w?\.$", text):
            text = text[:-1].rstrip()
        for opening, closing in _DELIMITERS:
            contents = text[len(opening) : -len(closing)]
            is_enclosed = len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing)
            # Two formulas such as $a$ or $b$ begin and end with a mark without being one whole.
            if is_enclosed and opening not in contents:
                text = contents.strip()
        if wrapper := _WRAPPED.fullmatch(text):
            text = wrapper[1].strip()
        elif text.startswith("\\boxed{") and text.endswith("}") and _is_balanced(text[7:-1]):
            text = text[7:-1].strip()
        if text == before:
            return text


def _is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return False
    return depth == 0


def _start(match: re.Match[str]) -> int:
    return max(match.start(), match.end("sign"), match.end("currency"))


def _exponent(match: re.Match[str]) -> str | None:
    return match["e"] or match["ten"] or match["bare_ten"]


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the unsigned value; None for one that is too large or divides by zero."""
    if match["base"] is not None:
        base, power = int(match["base"]), int(match["power"] or match["bare_power"])
        if base.bit_length() * abs(power) > _MOST_BITS or (base == 0 and power <= 0):
            return None
        return Fraction(base) ** power
    numerator = match["n"] or match["n1"] or match["over"]
    if numerator is not None:
        denominator = int(match["d"] or match["db"] or match["d1"] or match["under"])
        mixed = match["mixed"] or match["mixed_slash"]
        if denominator == 0 or (mixed is not None and (match["fs"] or int(numerator) >= denominator)):
            return None
        value = Fraction(int(numerator), denominator)
        return (-value if match["fs"] == "-" else value) + int(mixed or 0)
    integer = re.sub(r"\D", "", match["whole"] or "0")
    value = Fraction(integer + (match["decimals"] or match["point"] or ""))
    exponent = int(_exponent(match) or 0)
    return value * Fraction(10) ** exponent if abs(exponent) <= _MOST_EXPONENT else None


def _read_unit(rest: str, currency: str) -> tuple[int, str] | None:
    """Return the factor and the name of the unit in the text after a number; None if it is not a unit."""
    currency = currency.removeprefix("\\")
    if not rest.strip():
        return 1, currency
    if _PERCENT.fullmatch(rest):
        return None if currency else (1, "%")
    if degree := _DEGREE.fullmatch(rest):
        return None if currency else (1, "degree" + degree[1])
    # A letter right after a number is more likely a variable: 5m is five times m, "5 m" is five metres.
    is_apart = rest[0].isspace() or rest.startswith(("\\text", "\\mathrm", "\\,", "\\ ", "~"))
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r" \1", rest.translate(_EXPONENTS))
    text = re.sub(r"\\[,;: ]|~", " ", text).replace("{", "").replace("}", "").strip()
    text = re.sub(r"\s*\^\s*", "^", text).removesuffix(".")
    if not is_apart and text not in _ATTACHED:
        return None
    # Words such as "million" multiply the number and may be followed by a unit.
    scale, first, after = 1, *text.partition(" ")[::2]
    if first.lower() in _SCALES:
        scale, text = _SCALES[first.lower()], after.strip()
        if not text:
            return scale, currency
    if not _UNIT.fullmatch(text):
        return None
    words = re.split(r"[\s/-]+", text)
    if any(word.lower() in _NO_UNITS for word in words[:1]) or {"or", "and", "not", "plus", "minus"} & set(words):
        return None
    if any(len(word.partition("^")[0]) == 1 and word.partition("^")[0] not in _LETTERS for word in words[:1]):
        return None
    name = _unit_name(text)
    # "$5 dollars" names its unit twice; "$5 metres" is not a quantity.
    return (scale, name) if currency in ("", name) else None


def _unit_name(text: str) -> str:
    """Return one name for a unit's abbreviation, singular and plural."""
    text = re.sub(r"(?i)\b(?:square|sq)\s+(\w+)", r"\1^2", text)
    text = re.sub(r"(?i)\b(?:cubic|cu)\s+(\w+)", r"\1^3", text)
    text = re.sub(r"(?i)(\w+)\s+squared\b", r"\1^2", text)
    text = re.sub(r"(?i)(\w+)\s+cubed\b", r"\1^3", text)
    text = re.sub(r"\s+per\s+|\s*/\s*", "/", text)

    def single(word: re.Match[str]) -> str:
        name = word.group().lower()
        short = name[:-1] if len(name) > 2 and name.endswith("s") and not name.endswith("ss") else name
        return _SAME_UNITS.get(name) or _SAME_UNITS.get(short) or short

    return re.sub(r"[^\W\d_]+", single, text)


def _same_value(true: Quantity, answer: Quantity) -> bool:
    if true.value == answer.value:
        return True
    if true.value.denominator == answer.value.denominator == 1:
        return False  # integers are exact, however long
    if true.decimals is not None and answer.decimals is not None:
        # Two decimals: the shorter one may round the longer one, in either direction only if that is a printed double.
        if answer.decimals < true.decimals:
            return rounds(answer.decimals, answer.digits, answer.value, true.value)
        return min(true.digits, answer.digits) >= _DOUBLE_DIGITS and _same_double(true.value, answer.value)
    if true.decimals is None and answer.decimals is not None:
        return rounds(answer.decimals, answer.digits, answer.value, true.value)
    if true.decimals is not None and answer.decimals is None and true.value.denominator > 1:
        return rounds(true.decimals, true.digits, true.value, answer.value)
    return False


def _same_double(true: Fraction, answer: Fraction) -> bool:
    """Return whether two numbers round to the same double; those beyond the largest double have none."""
    try:
        return float(true) == float(answer)
    except OverflowError:
        return False
