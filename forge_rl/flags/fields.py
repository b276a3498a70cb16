"""The flags of a config: one for each field of its nested dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tyro

from forge_rl.errors import ConfigError
from forge_rl.flags.categories import Category


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag, such as --trainer.optimizer.lr."""

    path: tuple[str, ...]
    """Names of the fields that lead to it, such as ("trainer", "optimizer", "lr")."""
    name: str
    """Name on the command line; without dashes if it is a positional argument."""
    hint: Any
    """Type of its value."""
    value: object
    """Default or current value; tyro.MISSING if it must be given."""
    owner: type
    """Class that has the field."""
    category: Category = Category.DEFINING

    @property
    def dotted(self) -> str:
        """Path as one string, such as trainer.optimizer.lr."""
        return ".".join(self.path)

    @property
    def text(self) -> str:
        """Docstring of the field, or else the help that comes with its type."""
        return docs_of(self.owner).get(self.path[-1], "") or _argument(self.owner, self.path[-1]).help or ""


def flags_of(
    kind: type,
    config: object = None,
    path: tuple[str, ...] = (),
    prefix: str = "--",
    category: Category = Category.DEFINING,
) -> Iterator[Flag]:
    """Yield the flags of a config class in the order of its fields.

    Args:
        config: instance that provides the values; by default they are the class's defaults.
        path, prefix, category: place of a nested config in the whole, and category of the field that holds it.
    """
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint, marks = _hint(kind, field.name)
        if tyro.conf.Suppress in marks:
            continue  # other flags set it
        value = default_of(field) if config is None else getattr(config, field.name)
        # The class of the value itself, which may be a subclass of the annotated one.
        inner = type(value) if dataclasses.is_dataclass(value) else hint
        field_path = (*path, field.name)
        field_category = _category(kind, field.name) or category
        name = (_argument(kind, field.name).name or field.name).replace("_", "-")
        if dataclasses.is_dataclass(inner):
            nested_config = None if value is tyro.MISSING else value
            inside = prefix if tyro.conf.OmitArgPrefixes in marks else f"{prefix}{name}."
            yield from flags_of(typing.cast(type, inner), nested_config, field_path, inside, field_category)
        else:
            flag_name = field.name if tyro.conf.Positional in marks else f"{prefix}{name}"
            yield Flag(path=field_path, name=flag_name, hint=hint, value=value, owner=kind, category=field_category)


def usable_flags(kind: type, config: object = None) -> list[Flag]:
    """Return the flags of a config class except for the fields in its UNUSED."""
    unused: Collection[str] = getattr(kind, "UNUSED", ())
    return [flag for flag in flags_of(kind, config) if not {flag.path[0], flag.dotted} & {*unused}]


def changes_of(config: object) -> list[Flag]:
    """Return the flags of a config that differ from the defaults; a recipe's own defaults do not count as changed."""
    kind = type(config)
    defaults = {flag.dotted: flag.value for flag in flags_of(kind)}
    return [flag for flag in flags_of(kind, config) if flag.value != defaults.get(flag.dotted, flag.value)]


def names_in(flags: Iterable[Flag], groups: Collection[str]) -> list[str]:
    """Return the names of the flags in any of these groups, such as "schedule" or "trainer.optimizer"."""
    return [flag.name for flag in flags if any(f"{flag.dotted}.".startswith(f"{group}.") for group in groups)]


def changed_flags(config: object, groups: Collection[str]) -> list[str]:
    """Return the names of a config's flags in these groups that differ from their defaults."""
    return names_in(changes_of(config), groups)


def check_idle(config: object, idle_groups: Mapping[str, Collection[str]], *, exempt: Collection[str] = ()) -> None:
    """Refuse changed flags that cannot act.

    Args:
        idle_groups: flags and groups of flags by the reason why they have no effect.
        exempt: names of flags that act nevertheless, such as "--generator.max-num-seqs".

    Raises:
        ConfigError: names the first of them.
    """
    for reason, groups in idle_groups.items():
        for name in changed_flags(config, groups):
            if name not in exempt:
                raise ConfigError(f"{name} has no effect: {reason}", hint=f"leave out {name}")


def categories_of(config: object) -> dict[str, Category]:
    """Return the category of each flag of a config by its path, such as "trainer.ranks"."""
    return {flag.dotted: flag.category for flag in flags_of(type(config), config)}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default; tyro.MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


@functools.cache
def docs_of(kind: type) -> dict[str, str]:
    """Return the docstrings under a dataclass's fields, inherited ones included, each on one line."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # typed at a prompt
            continue
        assert isinstance(tree, ast.ClassDef)
        # A string that follows an annotated field is that field's docstring.
        for field, text in itertools.pairwise(tree.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _hint(kind: type, name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a field's type and its annotations for tyro."""
    hint = _hints(kind)[name]
    if typing.get_origin(hint) is typing.Annotated:
        return typing.get_args(hint)[0], hint.__metadata__
    return hint, ()


@functools.cache
def _category(kind: type, name: str) -> Category | None:
    """Return the category of a field by its annotation in the class or its bases, or else by the class's CATEGORY."""
    bases = (base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
    marks = (mark for base in bases for mark in _hint(base, name)[1] if isinstance(mark, Category))
    return next(marks, getattr(kind, "CATEGORY", None))


_PLAIN = tyro.conf.arg()


@functools.cache
def _argument(kind: type, name: str) -> Any:
    """Return the `tyro.conf.arg` of a field's type."""
    return next((mark for mark in _hint(kind, name)[1] if isinstance(mark, type(_PLAIN))), _PLAIN)
