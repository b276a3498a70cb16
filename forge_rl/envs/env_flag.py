"""Parses the `--env` flag: built-in environments, adapters, and the user's own code."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from forge_rl.envs.protocol import EnvFactory
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.options import read_option
from forge_rl.flags.texts import FlagText, parse, suggest
from forge_rl.flags.user_code import load
from forge_rl.system.lazy import LazyNames

ENVIRONMENTS: LazyNames[Callable[..., Any]] = LazyNames(
    {
        "game": "forge_rl.envs.game:GuessNumber",
        "gymnasium": "forge_rl.envs.gymnasium:GymnasiumEnv",
        "harbor": "forge_rl.envs.harbor:HarborEnv",
        "mcp": "forge_rl.envs.mcp:McpEnv",
        "openenv": "forge_rl.envs.openenv:OpenEnvFactory",
        "python": "forge_rl.envs.python:PythonEnv",
        "repository": "forge_rl.envs.repository:RepositoryEnv",
        "shell": "forge_rl.envs.shell:ShellEnv",
        "textarena": "forge_rl.envs.textarena:TextArena",
        "tools": "forge_rl.envs.bundled_tools:tools",
        "user": "forge_rl.envs.user:SimulatedUser",
        "verifiers": "forge_rl.envs.verifiers:VerifiersEnv",
    }
)
"""Environment factories by name. `NAME:ARGUMENT,KEY=VALUE` calls
`function("ARGUMENT", KEY=VALUE)`, which returns an EnvFactory; without an argument, `function(KEY=VALUE)`."""


def build_environment(text: str) -> EnvFactory:
    """Return the environment factory that `--env` names.

        build_environment("")  # SingleTurn: one answer
        build_environment("tools:corpus=notes.jsonl,max_turns=4")
        build_environment("mine.py:World,rooms=3")

    Names in ENVIRONMENTS take precedence; anything else is MODULE:NAME or FILE.py:NAME, which may be a class or a
    function that makes an Env from a task, a factory, a list of tool functions, or a class whose methods are tools: see
    `ToolEnv`. Options become keyword arguments; see `flags.texts.parse`.

    Raises:
        ConfigError: there is no such environment, or these options do not fit it.
    """
    if not text.strip():
        return SingleTurn
    parsed = parse(text, "--env", bundled=ENVIRONMENTS, takes_argument=True, takes_weight=False)
    if parsed.is_code:
        return _of_user(load(parsed.name, "--env"), parsed)
    if parsed.name not in ENVIRONMENTS:
        hint = suggest(parsed.name, ENVIRONMENTS, "environments")
        raise parsed.wrong(
            f"there is no environment {parsed.name!r}", f"{hint}; or give your own as MODULE:CLASS or FILE.py:CLASS"
        )
    arguments = [parsed.argument] if parsed.argument else []
    return _made(f"--env {parsed.name}", ENVIRONMENTS[parsed.name], parsed, *arguments)


def sources_of(environment: EnvFactory, seed: int) -> Mapping[str, Any]:
    """Return the task sources, by name, of an environment with its own tasks: the result of its `sources(seed)`.

    Raises:
        ConfigError: it has none.
    """
    sources = getattr(environment, "sources", None)
    if not callable(sources):
        raise ConfigError("there are no tasks, and the environment has none of its own", hint="set --tasks")
    sources_by_name = sources(seed)
    if not isinstance(sources_by_name, Mapping) or not sources_by_name:
        raise ConfigError(
            f"the environment's sources(seed) returned {sources_by_name!r:.80}", hint="return a dict of sources by name"
        )
    return sources_by_name


def _made(flag: str, make: Callable[..., EnvFactory], parsed: FlagText, *arguments: str) -> EnvFactory:
    """Call `make` with options checked against its parameters and converted to their type hints.

    If its parameter `settings` is a dataclass, options named as fields of it become that dataclass.
    """
    hints = _hints(make)
    settings = _settings(hints.get("settings"))
    fields = _hints(settings) if settings else {}
    options = {name: value for name, value in parsed.params.items() if name not in fields}
    if settings:
        options["settings"] = settings
    try:
        if settings and "settings" in parsed.params:
            raise TypeError("settings are options of their own")
        inspect.signature(make).bind(*arguments, **options)
    except TypeError as error:
        parameters = inspect.signature(make).parameters.values()
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        option_names = [name for name in names if not settings or name != "settings"] + [*fields]
        raise ConfigError(
            f"{flag} cannot be made: {error}", hint=f"its options are: {', '.join(option_names) or 'none'}"
        ) from None
    values = _converted(parsed, {**fields, **hints})
    try:
        if settings:
            values["settings"] = settings(**{name: values.pop(name) for name in [*values] if name in fields})
        return make(*arguments, **values)
    except ForgeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{flag} cannot be made: {type(error).__name__}: {error}", hint="fix its options or its code"
        ) from error


def _settings(hint: object) -> type | None:
    """Return the dataclass of a hint such as `Settings | None`."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    return kinds[0] if kinds else None


def _hints(make: Callable[..., Any]) -> Mapping[str, object]:
    function: Any = make.func if isinstance(make, functools.partial) else make
    if isinstance(function, type):
        function = vars(function).get("__init__", function)
    try:
        return typing.get_type_hints(function)
    except Exception:  # names imported only for type checking
        return {}


def _converted(parsed: FlagText, hints: Mapping[str, object]) -> dict[str, object]:
    """Return the options' values, converted to their type hints where text can have that type."""
    values: dict[str, object] = {}
    for name, value in parsed.params.items():
        try:
            values[name] = read_option(parsed, name, hints[name]) if name in hints else value
        except TypeError:
            values[name] = value
    return values


def _of_user(target: object, parsed: FlagText) -> EnvFactory:
    """Make a factory from the object that the flag names in the user's code."""
    from forge_rl.envs.tools import ToolEnv

    flag = f"--env {parsed.name}"
    if isinstance(target, list | tuple):
        return _made(flag, functools.partial(ToolEnv, tuple(target)), parsed)
    if isinstance(target, type):
        if any("__call__" in vars(base) for base in target.__mro__):  # its instances are factories
            return _factory(_made(flag, target, parsed), flag)
        if not hasattr(target, "step") and not hasattr(target, "reset"):
            return _made(flag, functools.partial(ToolEnv, target), parsed)
        for name in ("reset", "step"):
            if not inspect.iscoroutinefunction(getattr(target, name, None)):
                defect = f"whose {name} is not async" if hasattr(target, name) else f"without {name}"
                raise ConfigError(f"{flag} is a class {defect}", hint=f"define `{_METHODS[name]}`")
    return _factory(target, flag, parsed)


_METHODS = {
    "reset": "async def reset(self) -> Observation",
    "step": "async def step(self, completion: str) -> Step",
}


def _factory(target: object, flag: str, parsed: FlagText | None = None) -> EnvFactory:
    """Return a factory bound to its options, after checking that it accepts a task and these options."""
    if not callable(target):
        raise ConfigError(
            f"{flag} is {type(target).__name__} {target!r:.80}, which does not make environments",
            hint="name a class with reset and step, a function from a task to one, or a list of tool functions",
        )
    options = _converted(parsed, _hints(target)) if parsed else {}
    try:
        inspect.signature(target).bind(None, **options)
    except TypeError as error:
        hint = "it must take the task as its argument; put tool functions in a list and name the list in --env"
        raise ConfigError(f"{flag} cannot be called with a task: {error}", hint=hint) from None
    except ValueError:  # it has no signature
        pass
    return functools.partial(target, **options) if options else target
