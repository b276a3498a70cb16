"""Command lines: flags, a config file, and help."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import tyro

from forge_rl.errors import ConfigError
from forge_rl.flags.config_file import dump, read
from forge_rl.flags.fields import Flag, usable_flags
from forge_rl.flags.given import flags_in, giving
from forge_rl.flags.retired import current_path, retired_default
from forge_rl.flags.texts import suggest

C = TypeVar("C")

_NEGATION = re.compile(r"(?<![^.])no_(?=\w+$)")
"""Prefix that turns a flag off, as in trainer.no_enable_cpu_offload."""


def parse(kind: type[C], prog: str, args: Sequence[str] | None = None) -> C:
    """Parse a command line into a config.

        config = parse(Config, "python -m recipes.grpo", ["--config", "run.toml", "--steps", "20"])

    Besides the config's flags there are --config FILE, whose values the other flags override; --dump-config, which
    prints the config as such a file and exits; --help, which lists the flags that are used most (those in the class's
    USED and its own top-level ones), --help GROUP and --help-all. None of them shows flags in the class's UNUSED.

    Raises:
        ConfigError: values contradict each other, or the file is wrong.
        SystemExit: a flag is wrong, or help was printed.
    """
    # An iterator, so that a flag can take the next word as its value.
    words = itertools.chain(sys.argv[1:] if args is None else args)
    rest: list[str] = []
    given_flags: set[str] = set()
    spellings: dict[str, str] = {}
    default: C | None = None
    dumps = False
    # Takes out what tyro does not know; `rest` becomes its command line.
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("-h", "--help"):
            print_help(kind, prog, value if equals else next(words, ""))
        elif word == "--help-all":
            print_help(kind, prog, "", shows_all=True)
        elif name == "--config":
            path = Path(value if equals else next(words, ""))
            if default is not None:
                raise ConfigError(f"--config is given twice, the second time with {path}", hint="join the files")
            default = read(path, kind)
            given_flags.update(map(current_path, flags_in(tomllib.loads(path.read_text()))))
        elif word == "--dump-config":
            dumps = True
        elif name.startswith("--") and (constant := retired_default(name[2:].replace("-", "_"))) is not None:
            raise ConfigError(f"{name} is no longer a flag", hint=f"leave it out: it is always {constant}")
        else:
            if name.startswith("--"):
                flag = name.removeprefix("--").replace("-", "_")
                # tyro knows only the new name.
                if (new_flag := current_path(flag)) != flag:
                    flag, word = new_flag, f"--{new_flag.replace('_', '-')}{equals}{value}"
                if (spelling := spellings.setdefault(flag, name.replace("_", "-"))) != name.replace("_", "-"):
                    raise ConfigError(f"{spelling} and {name} are one flag by its old and its new name", hint="set one")
                # A flag that turns another one off sets that one.
                given_flags |= {flag, _NEGATION.sub("", flag)}
            rest.append(word)
    # Configs check themselves while tyro builds them, and may ask which flags the user has set.
    with giving(given_flags):
        config = tyro.cli(kind, prog=prog, args=rest, default=default, description=kind.__doc__)
    assert config is not None
    if dumps:
        print(f'# {prog} --config FILE reads this; "None" stands for no value.\n\n{dump(config)}', end="")
        sys.exit(0)
    return config


def print_help(kind: type, prog: str, group_name: str, *, shows_all: bool = False) -> NoReturn:
    """Print the flags used most, a group's flags (trainer.optimizer), or all, and exit.

    Raises:
        ConfigError: no group has this name.
    """
    shared_kind = next((base for base in reversed(kind.__mro__) if "USED" in vars(base)), None)
    run = {field.name for field in dataclasses.fields(shared_kind)} if shared_kind is not None else set()
    used: Collection[str] = getattr(kind, "USED", ())
    flags = usable_flags(kind)

    def group_of(flag: Flag) -> str:
        return flag.path[0] if len(flag.path) > 1 else "run" if flag.path[0] in run else "flags"

    groups: dict[str, list[Flag]] = {"flags": [], "run": []}
    for flag in flags:
        groups.setdefault(group_of(flag), []).append(flag)
    # The word after --help may be the next flag.
    group_name = "" if group_name.startswith("-") else group_name
    # A group by its title, or a nested config by its path.
    if group_name in groups:
        groups = {group_name: groups[group_name]}
    elif group_name:
        groups = {group_name: [flag for flag in flags if f"{flag.dotted}.".startswith(f"{group_name}.")]}
        names = dict.fromkeys(name for flag in flags for name in (group_of(flag), ".".join(flag.path[:-1])) if name)
        if not groups[group_name]:
            raise ConfigError(f"there is no group of flags {group_name!r}", hint=suggest(group_name, names, "groups"))
    is_short = not group_name and not shows_all
    usage = " ".join([prog, *(_argument(flag) for flag in flags if not flag.name.startswith("-")), "[FLAGS]"])
    # Only formats the help; tyro parses.
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=None if group_name else kind.__doc__,
        epilog=_more(groups, used) if is_short else None,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    for title, inside in groups.items():
        visible_flags = [flag for flag in inside if not is_short or flag.dotted in used or title == "flags"]
        section = parser.add_argument_group(title if visible_flags else None)
        for flag in visible_flags:
            # argparse formats help texts with %.
            text = _described(flag, is_short).replace("%", "%%")
            if flag.hint is bool:
                section.add_argument(_switch(flag), action="store_true", help=text)
            else:
                positional = not flag.name.startswith("-")
                section.add_argument(
                    flag.name, metavar=_argument(flag) if positional else _metavar(flag.hint), help=text
                )
    parser.print_help()
    sys.exit(0)


def _more(groups: dict[str, list[Flag]], used: Collection[str]) -> str:
    counts = {title: sum(flag.dotted not in used for flag in inside) for title, inside in groups.items()}
    more = ", ".join(f"{title} ({count})" for title, count in counts.items() if count and title != "flags")
    return (
        f"--help GROUP shows all flags of a group: {more or 'flags'}; --help-all shows everything. "
        "--config FILE.toml reads flags from a file, which --dump-config prints; the command line overrides it."
    )


def _described(flag: Flag, is_short: bool) -> str:
    text = flag.text
    if is_short and typing.get_origin(flag.hint) is not Literal:
        text = text.partition(". ")[0].removesuffix(".") + "."
    if flag.value is tyro.MISSING:
        return f"{text} (required)"
    default = " ".join(map(str, flag.value)) if isinstance(flag.value, tuple) else str(flag.value)
    if flag.hint is bool or default in ("", "None"):
        return text
    return f"{text} (default: {default if len(default) <= 60 else f'{default[:57]}...'})"


def _switch(flag: Flag) -> str:
    """Return the flag that changes a bool from its default."""
    head, dot, leaf = flag.name.removeprefix("--").rpartition(".")
    return f"--{head}{dot}no-{leaf}" if flag.value is True else flag.name


def _argument(flag: Flag) -> str:
    return f"{flag.name.upper()} ..." if typing.get_origin(flag.hint) is tuple else flag.name.upper()


def _metavar(hint: Any) -> str:
    return "|".join(_names(hint))


def _names(hint: Any) -> Iterator[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        yield from map(str, inner)
    elif origin in (types.UnionType, typing.Union):
        yield from (name for member in inner if member is not type(None) for name in _names(member))
    elif origin is tuple:
        yield f"[{_metavar(inner[0])} ...]"
    else:
        yield getattr(hint, "__name__", str(hint)).upper()
