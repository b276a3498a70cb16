"""Reads the options in a flag's text for the class or function that the text names: the only reader of KEY=VALUE."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from forge_rl.errors import ForgeError
from forge_rl.flags.fields import default_of
from forge_rl.flags.texts import FlagText, suggest

_BY_KEY = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SETTINGS = "settings"
"""Parameter whose fields, if it is a dataclass, are options of their own."""


def build(parsed: FlagText, make: Callable[..., Any], *arguments: object) -> Any:
    """Call a class or function with the options of a flag's text, and return the result.

        build(parse("length:tokens=200", "--reward"), Length)  # Length(tokens=200)

    Args:
        arguments: positional arguments that come before the options.

    Raises:
        ForgeError: an option is unknown, invalid or missing, of the class that `parsed.error` names; or as `make` does.
    """
    if not callable(make):
        problem = f"{parsed.name} is {make!r:.80}, from which nothing can be made"
        raise parsed.wrong(problem, "name a class or a function")
    options = read_options(parsed, make, *arguments)
    parameters = inspect.signature(make).parameters.values()
    taken_names = {parameter.name for parameter in _places(make)[: len(arguments)]}
    # Checked before the call, whose own error would not name the flag.
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.kind in _BY_KEY
        and parameter.default is parameter.empty
        and parameter.name not in {*options, *taken_names}
    ]
    if missing:
        example = ",".join(f"{name}=..." for name in missing)
        raise parsed.wrong(f"{parsed.name} needs {' and '.join(missing)}", f"write {parsed.name}:{example}")
    try:
        return make(*arguments, **options)
    except ForgeError:
        raise
    except Exception as error:
        raise parsed.error(
            f"{parsed.flag} {parsed.name} cannot be made: {type(error).__name__}: {error}",
            hint="fix its options or its code",
        ) from error


def read_options(parsed: FlagText, make: Callable[..., Any], *arguments: object) -> dict[str, Any]:
    """Return the options of a flag's text as arguments of a class or function, in the types of their hints.

        read_options(parse("length:tokens=200", "--reward"), Length)  # {"tokens": 200}

    A field of an option that is a dataclass is named as OPTION.FIELD; the other fields keep the values of the option's
    default. If this dataclass has `presets` by name, OPTION=PRESET sets all of its fields. An option without a usable
    type hint has its value in `parsed.params`.

    Args:
        arguments: positional arguments of `make`; their parameters are not options.

    Raises:
        ForgeError: an option is unknown, or its value is invalid; marks its place.
    """
    parameters = inspect.signature(make).parameters
    places = _places(make)
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    taken_names = {parameter.name for parameter in places[: len(arguments)]}
    hints, settings = _hints(make), None
    names = {name for name, parameter in parameters.items() if parameter.kind in _BY_KEY} - taken_names
    # The fields of `settings` are options like the other parameters.
    if _SETTINGS in names and (settings := _dataclass_in(hints.get(_SETTINGS))) is not None:
        names = names - {_SETTINGS} | _hints(settings).keys()
        hints = {**_hints(settings), **hints}
    if len(arguments) > len(places) and not takes_more:
        raise parsed.wrong(f"{parsed.name} takes no {arguments[-1]!r:.80}", f"its options are: {_listed(names)}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    values, nested = dict[str, Any](), dict[str, dict[str, Any]]()
    # A key is OPTION.FIELD, an option, or unknown.
    for key in parsed.raw_params:
        outer, _, inner = key.partition(".")
        owner = hints.get(outer) if inner and outer in names else None
        if isinstance(owner, type) and dataclasses.is_dataclass(owner) and inner in _hints(owner):
            nested.setdefault(outer, {})[inner] = read_option(parsed, key, _hints(owner)[inner])
        elif key not in names and (not takes_any or key == _SETTINGS):
            check_keys(parsed, names, key)
        else:
            values[key] = _converted(parsed, key, hints)
    for name, field_values in nested.items():
        base = values[name] if name in values else _default(make, name)
        try:
            values[name] = dataclasses.replace(base, **field_values)
        except ForgeError as error:
            raise parsed.refused(error) from None
    if settings is not None:
        # Options that are fields of the settings become one argument.
        values[_SETTINGS] = settings(**{name: values.pop(name) for name in [*values] if name in _hints(settings)})
    return values


def check_keys(parsed: FlagText, names: Collection[str], *keys: str) -> None:
    """Refuse the first key of a flag's text that is none of these names.

    Args:
        keys: the keys to check; by default all of the text.

    Raises:
        ForgeError: marks the key, and names the nearest.
    """
    for key in keys or parsed.raw_params:
        if key not in names:
            raise parsed.wrong(f"{parsed.name} has no option {key!r}", suggest(key, names, "its options are"), key=key)


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
        # validate_strings takes no lists and objects
        return adapter.validate_python(value) if isinstance(value, list | dict) else adapter.validate_strings(text)
    except pydantic.ValidationError as error:
        hint = f"pass a value of type {kind.__name__}" if isinstance(kind, type) else "set a valid value"
        raise parsed.wrong(f"{key} is {text!r:.80}: {error.errors()[0]['msg']}", hint, key=key) from None


def _converted(parsed: FlagText, key: str, hints: Mapping[str, Any]) -> Any:
    try:
        return read_option(parsed, key, hints[key]) if key in hints else parsed.params[key]
    except TypeError:
        return parsed.params[key]


def _places(make: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that take positional arguments."""
    return [parameter for parameter in inspect.signature(make).parameters.values() if parameter.kind in _BY_PLACE]


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a class's or function's parameters by name; {} if its hints cannot be resolved."""
    target: Any = make.func if isinstance(make, functools.partial) else make
    if isinstance(target, type) and dataclasses.is_dataclass(target):
        types = typing.get_type_hints(target)
        return {field.name: types[field.name] for field in dataclasses.fields(target) if field.init}
    if isinstance(target, type):
        target = vars(target).get("__init__", target)
    try:
        return typing.get_type_hints(target)
    except Exception:  # names imported only for type checking
        return {}


def _dataclass_in(hint: object) -> type[Any] | None:
    """Return the dataclass of a hint such as `Settings | None`."""
    kinds = (hint, *typing.get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _default(make: Callable[..., Any], name: str) -> Any:
    """Return a parameter's default; for a dataclass's field, also one from a factory."""
    if isinstance(make, functools.partial):
        return make.keywords[name] if name in make.keywords else _default(make.func, name)
    if isinstance(make, type) and dataclasses.is_dataclass(make):
        return default_of(next(field for field in dataclasses.fields(make) if field.name == name))
    return inspect.signature(make).parameters[name].default


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
