"""Parses the texts by which flags name tasks, rewards, environments and a user's code.

[TITLE=]NAME[:KEY=VALUE,...][*WEIGHT], or NAME=WEIGHT without options. A NAME is bundled, a path, or a user's
MODULE:NAME or FILE.py:NAME; options may follow that after a comma, too.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from forge_rl.errors import ConfigError, ForgeError

_TITLE = re.compile(r"\s*([A-Za-z_][\w-]*)=(?=.)", flags=re.DOTALL)
_CODE = re.compile(r"\s*((?:.+\.py|[\w.]+):[A-Za-z_][\w.]*)(?=[:,]|\s*$)", flags=re.DOTALL)
_OPTION = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=(.*)", flags=re.DOTALL)
_FIRST_KEY = re.compile(r":\s*[A-Za-z_][\w.]*\s*=")
_IN_PATHS = re.compile(r"[/.]")
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_FORM = "write NAME:KEY=VALUE,KEY=VALUE*WEIGHT"


@dataclass(frozen=True, kw_only=True)
class FlagText:
    """What a text names, with its options and its weight."""

    name: str
    """Bundled name, path, pattern of paths, hub id, MODULE:NAME or FILE.py:NAME."""
    params: Mapping[str, object] = field(default_factory=dict)
    """Values of the options: numbers, true, false, none, lists such as [+,-] or ["+","-"], and otherwise strings."""
    weight: float = 1.0
    title: str = ""
    """Name given by the user, or ""."""
    argument: str = ""
    """The first option if it has no key, or ""."""
    is_code: bool = False
    """True if the name refers to a Python object of the user's."""
    raw_params: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The options' values as written, without the quotes around them."""
    flag: str = field(default="", compare=False, repr=False)
    text: str = field(default="", compare=False, repr=False)
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """First column and length of the name, the weight and the options, by "name", "weight" and key."""
    error: type[ForgeError] = field(default=ConfigError, compare=False, repr=False)

    def wrong(self, problem: str, hint: str, key: str = "name") -> ForgeError:
        """Return an error that marks a place in the text: the name, the weight, or the option of a key."""
        column, length = self.places.get(key, (0, 1))
        mark = f"{' ' * column}{'^' * max(1, length)}"
        return self.error(f"{self.flag}: {problem}\n  {self.text}\n  {mark}", hint=hint)

    def refused(self, cause: ForgeError) -> ForgeError:
        """Turn an error of the named class, such as "CLASS(KEY=...): KEY is -1", into one that marks the option."""
        if cause.message.startswith(f"{self.flag}:"):  # it already marks its place
            return cause
        keys = (key for key in self.raw_params if re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", cause.message))
        return self.wrong(re.sub(r"^\w+\(\w+=\.\.\.\): ", "", cause.message), cause.hint, key=next(keys, "name"))


def parse(
    text: str,
    flag: str,
    *,
    bundled: Collection[str] | None = None,
    takes_argument: bool = False,
    takes_weight: bool = True,
    error: type[ForgeError] = ConfigError,
) -> FlagText:
    """Parse a flag's text; the thing it names need not exist.

        parse("maths=data/*.jsonl:question=problem*0.5", "--tasks")
        parse("mine.py:score=2", "--reward", bundled=REWARDS)

    A star in a value or a path is a part of it unless only a number follows: write the pattern data/part*1 as
    data/part*1*1. A colon in a path is part of it unless a key and = follow. A path that begins like a title, such as
    day=1/a.jsonl, must be written ./day=1/a.jsonl. Values that contain a comma must be quoted.

    Args:
        flag: the flag, for errors.
        bundled: bundled names, which no module has; None if names may be paths, in which case MODULE:NAME is not code.
        takes_argument: whether the first option of a bundled name may lack a key.
        takes_weight: whether a weight may follow.
        error: class of the errors.

    Raises:
        ForgeError: the text does not have this form; marks the place.
    """
    # From the outside in: the title, the weight, the name, and the options in what is left.
    blank = FlagText(name="", flag=flag, text=text, error=error)
    match = _TITLE.match(text)
    # NAME=NUMBER is a name with its weight, not a title.
    title = match if match and not _is_number(text[match.end() :]) else None
    start, end, weight = title.end() if title else 0, len(text), 1.0
    places: dict[str, tuple[int, int]] = {}
    if takes_weight and (weight_column := _weight_at(text[start:], bundled)) is not None:
        end = start + weight_column
        written_weight = text[end + 1 :]
        places["weight"] = end + 1, len(written_weight)
        weight = float(written_weight) if _is_number(written_weight) else math.nan
        if not math.isfinite(weight):
            problem = f"the weight {written_weight!r} is not a finite number"
            raise replace(blank, places=places).wrong(problem, _FORM, "weight")
    length, options_at, is_code = _name(text[start:end], bundled)
    name = text[start : start + length].strip()
    places["name"] = start, length
    if not name:
        raise replace(blank, places=places).wrong("there is no name", _FORM)
    argument, raw_values, at_keys = _options(blank, start + options_at, end, takes_argument and not is_code)
    return replace(
        blank,
        name=name,
        params={key: option_value(value) for key, value in raw_values.items()},
        weight=weight,
        title=title[1] if title else "",
        argument=argument,
        is_code=is_code,
        raw_params={key: _unquoted(value) for key, value in raw_values.items()},
        places=places | at_keys,
    )


def _options(
    blank: FlagText, start: int, end: int, takes_argument: bool
) -> tuple[str, dict[str, str], dict[str, tuple[int, int]]]:
    """Read the options between two columns of the text.

    Returns:
        The first option if it has no key, or ""; the others' values as written, and their places, by key.
    """
    argument, raw_values, places = "", dict[str, str](), dict[str, tuple[int, int]]()
    for number, (column, part) in enumerate(_split_commas(blank.text[start:end])):
        spec_at_option = replace(blank, places={"name": (start + column, len(part))})
        option = _OPTION.fullmatch(part)
        if option is None and number == 0 and takes_argument:
            argument = part.strip()
        elif option is None:
            raise spec_at_option.wrong(f"{part.strip()!r} is not KEY=VALUE", _FORM)
        elif option[1] in raw_values:
            raise spec_at_option.wrong(f"{option[1]!r} is given twice", _FORM)
        else:
            raw_values[option[1]] = option[2].strip()
            places[option[1]] = start + column, len(part)
    return argument, raw_values, places


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def written(name: str, options: Mapping[str, object]) -> str:
    """Write a text that `parse` reads: `written("slurm", {"nodes": 2})` is "slurm:nodes=2".

    Raises:
        ConfigError: a value has quotes of both kinds, and so no form.
    """
    return name + ":" * bool(options) + ",".join(f"{key}={_quoted(key, value)}" for key, value in options.items())


def _quoted(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return json.dumps(list(value))
    text = str(value)
    quote = "'" if '"' in text else '"'
    if quote in text:
        raise ConfigError(f"{key} is {text!r:.80}, with both kinds of quotes", hint="leave one kind out")
    return f"{quote}{text}{quote}" if isinstance(value, str) else text


def names_code(text: str) -> bool:
    """Return True if a text has the form MODULE:NAME or FILE.py:NAME, as opposed to the name of something bundled."""
    match = _CODE.match(text)
    return match is not None and match.end() == len(text)


def suggest(wrong: str, names: Collection[str], label: str) -> str:
    """Return a hint for an unknown name: similar names, and all valid ones."""
    close = difflib.get_close_matches(wrong, names, n=2)
    suggestion = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{suggestion}{label}: {', '.join(sorted(names)) or 'none'}"


def _weight_at(text: str, bundled: Collection[str] | None) -> int | None:
    """Return the index of the sign before the weight; None if there is none."""
    name, star, weight = text.rpartition("*")
    if star and (_is_number(weight) or name.isidentifier() or _is_code(name, bundled)):
        return len(name)
    # NAME=WEIGHT, as in mine.py:score=2.
    name, equals, weight = text.rpartition("=")
    if equals and _is_code(name, bundled) and (_is_number(weight) or ".py:" in name):
        return len(name)
    return len(name) if equals and name.isidentifier() and _is_number(weight) else None


def _is_code(text: str, bundled: Collection[str] | None) -> bool:
    place = text.partition(":")[0].strip()
    return names_code(text) and (place.endswith(".py") if bundled is None else place not in bundled)


def _name(text: str, bundled: Collection[str] | None) -> tuple[int, int, bool]:
    """Return the length of the name at the beginning, where its options begin, and whether it is code."""
    head, colon, rest = text.partition(":")
    is_bundled = bundled is not None and head.strip() in bundled
    # MODULE:NAME or FILE.py:NAME: the colon belongs to the name.
    if not is_bundled and (code := _CODE.match(text)) and _is_code(code[1], bundled):
        return code.end(), code.end() + 1, True
    # A path: a colon belongs to it unless a key follows.
    if bundled is None and (key := _FIRST_KEY.search(text)):
        return key.start(), key.start() + 1, False
    if not colon or (bundled is None and _IN_PATHS.search(rest)):
        return len(text), len(text), False
    return len(head), len(head) + 1, False


def _split_commas(text: str) -> Iterator[tuple[int, str]]:
    """Split at commas outside brackets and quotes; yield index and text of each part that is not empty."""
    start, depth, quote = 0, 0, ""
    # The added comma ends the last part, even inside a quote that is not closed.
    for index, char in enumerate(f"{text},"):
        if quote and index < len(text):
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif index == len(text) or (char == "," and depth == 0):
            if text[start:index].strip():
                yield start, text[start:index]
            start = index + 1


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def option_value(text: str) -> object:
    """Return the value that an option's text stands for: a number, true, false, none, a list, or else the text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for reader in (json.loads, ast.literal_eval):
        try:
            return reader(text)
        except (ValueError, SyntaxError, TypeError):
            continue
    if text.startswith("[") and text.endswith("]"):
        return [option_value(part.strip()) for _, part in _split_commas(text[1:-1])]
    return text
