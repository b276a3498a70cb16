"""A config as a TOML file: every flag, nested as its dataclasses are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from forge_rl.errors import ConfigError
from forge_rl.flags.fields import Flag, default_of, flags_of, usable_flags
from forge_rl.flags.retired import current_path, retired_default
from forge_rl.flags.texts import suggest, written

C = TypeVar("C")


def dump(config: object) -> str:
    """Return a config as TOML, with each field's docstring as a comment. `read` restores it."""
    lines: list[str] = []
    # The keys of a table stand together, those without a table first, in the order of the fields.
    flags = sorted(usable_flags(type(config), config), key=lambda flag: flag.path[:-1])
    for table, inside in itertools.groupby(flags, key=lambda flag: flag.path[:-1]):
        if table:
            lines += ["", f"[{'.'.join(table)}]"]
        for flag in inside:
            lines += textwrap.wrap(flag.text, 118, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"{flag.path[-1]} = {_toml(flag.value)}")
    return "\n".join(lines) + "\n"


def read(path: Path, kind: type[C]) -> C:
    """Read a config from a file, which may set any part of it; the rest has its default.

    Returns:
        A config on which `__post_init__` has not run: flags of the command line may still replace values.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or has a value of another type.
    """
    try:
        text = path.read_text()
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}", hint="name an existing file") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or too deep
        raise ConfigError(f"--config {path} is not TOML: {error}", hint="fix it; --dump-config shows one") from None
    return _FlagFile(path, text, tuple(flags_of(kind))).filled(kind, None, table, ())


@dataclasses.dataclass(frozen=True)
class _FlagFile:
    path: Path
    text: str
    flags: tuple[Flag, ...]

    def filled(self, kind: type[C], default: object, table: Mapping[str, Any], place: tuple[str, ...]) -> C:
        fields = {field.name: field for field in dataclasses.fields(cast(Any, kind)) if field.init}
        # A flag must not be set by both its old and its new name.
        for key in table.keys() - fields.keys():
            if current_path(key) in table.keys() - {key}:
                new_name = ".".join((*place, current_path(key)))
                raise self.wrong((*place, key), f"is the old name of {new_name}, which is set too", "leave one out")
        table = {key if key in fields else current_path(key): value for key, value in table.items()}
        # A retired flag may have the value of its constant; any other unknown key is an error.
        for key in table:
            if key not in fields and (constant := retired_default(".".join((*place, key)))) is not None:
                if table[key] != constant:
                    raise self.wrong((*place, key), "is no longer a flag", f"leave it out: it is always {constant}")
            elif key not in fields:
                # The key may belong to another table.
                homes = [flag.dotted for flag in self.flags if flag.path[-1] == key]
                suggestion = f"did you mean {' or '.join(homes[:3])}?"
                hint = suggestion if homes else suggest(key, fields, "keys here")
                raise self.wrong((*place, key), "is unknown", hint)
        # Without `__init__`, and so without checks: flags of the command line may still replace values.
        config = object.__new__(kind)
        hints = {flag.path: flag.hint for flag in self.flags}
        for name, field in fields.items():
            field_path = (*place, name)
            value = default_of(field) if default is None else getattr(default, name)
            if name in table and field_path in hints:
                value = self.value(field_path, hints[field_path], _as_text(hints[field_path], table[name]))
            elif name in table:
                if not isinstance(table[name], dict):
                    raise self.wrong(
                        field_path, f"is {table[name]!r:.80}", f"write it as a table, [{'.'.join(field_path)}]"
                    )
                value = self.filled(type(value), value, table[name], field_path)
            object.__setattr__(config, name, value)
        return config

    def value(self, place: tuple[str, ...], hint: Any, raw_value: object) -> object:
        import pydantic

        adapter = pydantic.TypeAdapter[object](hint, config=pydantic.ConfigDict(strict=True))
        try:
            # TOML has no null, so the file says "None", as the command line does.
            if raw_value == "None":
                return adapter.validate_python(None)
            # Strict validation accepts a list for a tuple only from JSON, not from Python objects.
            return adapter.validate_json(json.dumps(raw_value, default=str))
        except pydantic.ValidationError as error:
            raise self.wrong(place, f"is {raw_value!r:.80}", error.errors()[0]["msg"].lower()) from None

    def wrong(self, place: tuple[str, ...], problem: str, hint: str) -> ConfigError:
        line = self.line(place)
        location = f"{self.path}:{line}" if line else str(self.path)
        return ConfigError(f"--config {location}: {'.'.join(place)} {problem}", hint=hint)

    def line(self, place: tuple[str, ...]) -> int:
        """Return the line that sets a key; 0 if it is not found."""
        table: list[str] = []
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[([\w.\s-]+)\]", line):
                table = re.split(r"\s*\.\s*", header[1].strip())
                key = table
            elif pair := re.match(r"\s*([\w.-]+)\s*=", line):
                key = [*table, *pair[1].split(".")]
            else:
                continue
            if tuple(key) == place:
                return number
        return 0


def _as_text(hint: Any, raw_value: object) -> object:
    """Return a table with a `kind`, given for a flag that is one text, as KIND:KEY=VALUE,...; other values as given."""
    if hint is str and isinstance(raw_value, dict) and isinstance(raw_value.get("kind"), str):
        return written(raw_value["kind"], {key: value for key, value in raw_value.items() if key != "kind"})
    return raw_value


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # None as on the command line
