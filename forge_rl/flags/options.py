"""Converts the options in a flag's text to the fields of the dataclass that the text names."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from forge_rl.flags.fields import default_of
from forge_rl.flags.texts import FlagText, suggest


def read_options(
    parsed: FlagText,
    kind: type[Any],
    *,
    given: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the values of a dataclass's fields, in their types, as named by the options of `parsed`.

        read_options(parse("length:tokens=200", "--reward"), Length)  # {"tokens": 200}

    A field of a field, which must be a dataclass, is named as FIELD.NAME; the others keep the values of the field's
    default. If this dataclass has `presets` by name, FIELD=PRESET sets all of its fields.

    Args:
        given: required fields that have a value already.
        defaults: defaults that replace the dataclass's own.

    Raises:
        ForgeError: there is no such field, its value is invalid, or one without a default is missing.
    """
    found: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key, text in parsed.written.items():
        outer, _, inner = key.partition(".")
        of = _kinds(kind).get(outer) if inner else kind
        if not (isinstance(of, type) and dataclasses.is_dataclass(of)) or (inner or outer) not in _kinds(of):
            known = [field.name for field in dataclasses.fields(kind) if field.init]
            raise parsed.wrong(f"{parsed.name} has no option {key!r}", suggest(key, known, "it has"), at=key)
        value = _read(parsed, key, text, _kinds(of)[inner or outer])
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            found[key] = value
    own = {field.name: default_of(field) for field in dataclasses.fields(kind) if field.name in nested} | dict(defaults)
    for name, values in nested.items():
        found[name] = dataclasses.replace(found.get(name, own[name]), **values)
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and (field.default, field.default_factory) == unset and field.name not in {*found, *given}
    ]
    if missing:
        wanted = ",".join(f"{key}=..." for key in missing)
        raise parsed.wrong(f"{parsed.name} needs {' and '.join(missing)}", f"write {parsed.name}:{wanted}")
    return found


def _kinds(kind: type[Any]) -> dict[str, Any]:
    """Return the types of the fields that a constructor takes, by name."""
    types = typing.get_type_hints(kind)
    return {field.name: types[field.name] for field in dataclasses.fields(kind) if field.init}


def _read(parsed: FlagText, key: str, text: str, kind: Any) -> Any:
    import pydantic

    presets = getattr(kind, "presets", None)
    if presets is not None and text in presets:
        return presets[text]
    if presets is not None:
        raise parsed.wrong(f"{key} is {text!r}", suggest(text, presets, "presets"), at=key)
    try:
        return pydantic.TypeAdapter(kind).validate_strings(text)
    except pydantic.ValidationError as error:
        raise parsed.wrong(f"{key} is {text!r}: {error.errors()[0]['msg']}", "set a valid value", at=key) from None
