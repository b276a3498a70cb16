"""Parses the `--env` flag: built-in environments, adapters, and the user's own code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from forge_rl.envs.protocol import EnvFactory
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError
from forge_rl.flags.options import build, read_options
from forge_rl.flags.texts import FlagText, parse, suggest
from forge_rl.flags.user_code import load
from forge_rl.system.lazy import LazyNames

ENVIRONMENTS: LazyNames[Callable[..., Any]] = LazyNames(
    {
        "game": "forge_rl.worlds.game:GuessNumber",
        "gymnasium": "forge_rl.worlds.gymnasium:GymnasiumEnv",
        "harbor": "forge_rl.worlds.harbor:HarborEnv",
        "mcp": "forge_rl.worlds.mcp:McpEnv",
        "openenv": "forge_rl.worlds.openenv:OpenEnvFactory",
        "python": "forge_rl.worlds.python:PythonEnv",
        "repository": "forge_rl.worlds.repository:RepositoryEnv",
        "shell": "forge_rl.worlds.shell:ShellEnv",
        "swebench": "forge_rl.worlds.swebench:SweBenchEnv",
        "textarena": "forge_rl.worlds.textarena:TextArena",
        "tools": "forge_rl.envs.bundled_tools:tools",
        "user": "forge_rl.worlds.user:SimulatedUser",
        "verifiers": "forge_rl.worlds.verifiers:VerifiersEnv",
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
        ConfigError: the environment is unknown, or these options do not fit it.
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
    environment: EnvFactory = build(parsed, ENVIRONMENTS[parsed.name], *arguments)
    return environment


def sources_of(environment: EnvFactory, seed: int) -> Mapping[str, Any]:
    """Return the task sources, by name, of an environment with its own tasks: the result of its `sources(seed)`.

    Raises:
        ConfigError: it has none.
    """
    sources = getattr(environment, "sources", None)
    if not callable(sources):
        raise ConfigError("no tasks are given, and the environment has none of its own", hint="set --tasks")
    sources_by_name = sources(seed)
    if not isinstance(sources_by_name, Mapping) or not sources_by_name:
        raise ConfigError(
            f"the environment's sources(seed) returned {sources_by_name!r:.80}", hint="return a dict of sources by name"
        )
    return sources_by_name


def _of_user(target: object, parsed: FlagText) -> EnvFactory:
    """Make a factory from the object that the flag names in the user's code."""
    from forge_rl.envs.tools import ToolEnv

    flag = f"--env {parsed.name}"
    if isinstance(target, list | tuple):
        tool_env: EnvFactory = build(parsed, functools.partial(ToolEnv, tuple(target)))
        return tool_env
    if isinstance(target, type):
        # `hasattr` would not tell: every class can be called, through its metaclass.
        if any("__call__" in vars(base) for base in target.__mro__):  # its instances are factories
            return _factory(build(parsed, target), flag)
        if not hasattr(target, "step") and not hasattr(target, "reset"):
            class_env: EnvFactory = build(parsed, functools.partial(ToolEnv, target))
            return class_env
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
    options: dict[str, object] = {}
    try:
        if parsed is not None and _takes_task(target):
            options = read_options(parsed, target, None)
        # Binds a task and the options without calling anything.
        inspect.signature(target).bind(None, **options)
    except TypeError as error:
        hint = "it must take the task as its argument; put tool functions in a list and name the list in --env"
        raise ConfigError(f"{flag} cannot be called with a task: {error}", hint=hint) from None
    except ValueError:  # it has no signature
        pass
    return functools.partial(target, **options) if options else target


def _takes_task(target: Callable[..., object]) -> bool:
    """Return whether a callable takes an argument by place."""
    by_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return any(parameter.kind in by_place for parameter in inspect.signature(target).parameters.values())
