"""Converts the options in a flag's text to the fields of the dataclass that the text names."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from forge_rl.errors import ForgeError
from forge_rl.flags.fields import default_of
from forge_rl.flags.texts import FlagText, suggest


def read_options(
    parsed: FlagText,
    kind: type[Any],
    *,
    filled_fields: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the values of a dataclass's fields, in their types, as named by the options of `parsed`.

        read_options(parse("length:tokens=200", "--reward"), Length)  # {"tokens": 200}

    A field of a field, which must be a dataclass, is named as FIELD.NAME; the others keep the values of the field's
    default. If this dataclass has `presets` by name, FIELD=PRESET sets all of its fields.

    Args:
        filled_fields: required fields that have a value already.
        defaults: defaults that replace the dataclass's own.

    Raises:
        ForgeError: a field is unknown, its value is invalid, or one without a default is missing.
    """
    field_values: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key in parsed.raw_params:
        outer, _, inner = key.partition(".")
        owner = _kinds(kind).get(outer) if inner else kind
        if not (isinstance(owner, type) and dataclasses.is_dataclass(owner)) or (inner or outer) not in _kinds(owner):
            field_names = [field.name for field in dataclasses.fields(kind) if field.init]
            raise parsed.wrong(f"{parsed.name} has no option {key!r}", suggest(key, field_names, "it has"), key=key)
        value = read_option(parsed, key, _kinds(owner)[inner or outer])
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            field_values[key] = value
    nested_fields = (field for field in dataclasses.fields(kind) if field.name in nested)
    base_values = {field.name: default_of(field) for field in nested_fields} | dict(defaults)
    for name, values in nested.items():
        try:
            field_values[name] = dataclasses.replace(field_values.get(name, base_values[name]), **values)
        except ForgeError as error:
            raise parsed.refused(error) from None
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.init
        and (field.default, field.default_factory) == unset
        and field.name not in {*field_values, *filled_fields}
    ]
    if missing:
        example = ",".join(f"{key}=..." for key in missing)
        raise parsed.wrong(f"{parsed.name} needs {' and '.join(missing)}", f"write {parsed.name}:{example}")
    return field_values


def _kinds(kind: type[Any]) -> dict[str, Any]:
    """Return the types of the fields that a constructor takes, by name."""
    types = typing.get_type_hints(kind)
    return {field.name: types[field.name] for field in dataclasses.fields(kind) if field.init}


def read_option(parsed: FlagText, key: str, kind: Any) -> Any:
    """Return one option's value, converted to a scalar, a Literal, a list such as [a,b], or a type with `presets`.

        read_option(parse("world:rooms=3", "--env"), "rooms", int | None)  # 3

    Raises:
        ForgeError: the value is not of this type; marks its place.
        TypeError: no text can be converted to this type.
    """
    import pydantic

    text = parsed.raw_params[key]
    value = parsed.params.get(key, text)
    presets = getattr(kind, "presets", None)
    if presets is not None and text in presets:
        return presets[text]
    if presets is not None:
        raise parsed.wrong(f"{key} is {text!r}", suggest(text, presets, "presets"), key=key)
    try:
        adapter = pydantic.TypeAdapter(kind)
    except pydantic.PydanticUserError as error:
        raise TypeError(f"no text can be converted to {kind}") from error
    try:
        if value is None and type(None) in typing.get_args(kind):
            return None
        # validate_strings takes no lists
        return adapter.validate_python(value) if isinstance(value, list) else adapter.validate_strings(text)
    except pydantic.ValidationError as error:
        hint = f"pass a value of type {kind.__name__}" if isinstance(kind, type) else "set a valid value"
        raise parsed.wrong(f"{key} is {text!r:.80}: {error.errors()[0]['msg']}", hint, key=key) from None
