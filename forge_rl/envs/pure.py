"""Pure tools: declared by the user, and answered from a cache of results by version and arguments."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.envs.tool import Tool, inner_function
from forge_rl.errors import ConfigError
from forge_rl.system.result_cache import ResultCache, content_key
from forge_rl.types import Task

F = TypeVar("F", bound=Callable[..., object])
_MARK = "__forge_rl_pure__"


def tool(*, pure: bool = False, version: str = "") -> Callable[[F], F]:
    """Declare properties of a tool function. Functions without this decorator are tools too.

        @forge_rl.tool(pure=True)
        def price(item: str) -> int:
            '''Look up the price of an item.'''
            return PRICES[item]

    Args:
        pure: the result depends on the arguments only (of a class's method, also on the task), and calling it changes
            nothing. Its results are kept and reused, by later runs too; errors and timeouts are not.
        version: change it when something changes the results that is not in the function's file, such as data or a
            package. The code of the function and the text of its file are always part of the version.
    """

    def mark(function: F) -> F:
        if pure:
            # On the inner function, so that partials of it are pure as well.
            setattr(inner_function(function), _MARK, version)
        return function

    return mark


def purity(function: Callable[..., object]) -> str | None:
    """Return the version that a function was declared pure with; None if it was not."""
    return getattr(inner_function(function), _MARK, None)


@functools.lru_cache(maxsize=1024)  # the file may change later, the loaded function does not
def version_of(function: Callable[..., object]) -> str:
    """Return a version of a function that changes with its code, its file, its bound values, and its declared version.

    Raises:
        ConfigError: it has bound objects that cannot be compared, and no declared version.
    """
    inner, declared_version = inspect.unwrap(inner_function(function)), purity(function)
    # Bound arguments, a method's object, defaults and closures change results without a change of the code.
    bound_objects: list[object] = []
    while isinstance(function, functools.partial):
        bound_objects += [function.args, function.keywords]
        function = function.func
    if isinstance(function, types.MethodType):
        bound_objects.append(vars(function.__self__))
    elif not hasattr(function, "__name__"):
        bound_objects.append(vars(function))
    bound_objects += [inner.__defaults__, inner.__kwdefaults__]
    bound_objects += [cell.cell_contents for cell in inner.__closure__ or ()]
    try:
        bound_text = json.dumps(bound_objects, sort_keys=True, default=_version_of_bound)
    except (TypeError, ValueError):
        if not declared_version:
            raise ConfigError(
                f"the pure tool {inner.__name__} has bound objects whose changes cannot be seen: "
                f"{bound_objects!r:.200}",
                hint='pass them as arguments, or declare a version that covers them: tool(pure=True, version="...")',
            ) from None
        bound_text = ""
    digest = hashlib.blake2b(digest_size=16)
    for part in (inner.__module__, inner.__qualname__, declared_version or "", bound_text, sys.version, _file(inner)):
        # Each part is hashed on its own, so that no text can move from one part to the next.
        digest.update(hashlib.blake2b(part.encode("utf-8", "surrogatepass")).digest())
    digest.update(_code(inner.__code__))
    return digest.hexdigest()


def _version_of_bound(value: object) -> str:
    if isinstance(value, types.FunctionType):
        return version_of(value)
    # json.dumps passes it on to `version_of`, which then asks for a declared version.
    raise TypeError


def task_key(task: Task) -> str | None:
    """Return a text that is equal for equal tasks; None if its truth has no JSON form."""
    try:
        return content_key(task.id, task.source, task.messages, dict(task.truth)).hex()
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, eq=False)
class CachedTool:
    """A pure tool with a cache before it.

    text, was_kept = await CachedTool(Tool(price), cache).look_up('{"item": "apple"}', timeout_s=10)
    """

    tool: Tool
    cache: ResultCache
    about: str = ""
    """Text that covers all that results depend on besides the arguments."""

    @property
    def schema(self) -> Mapping[str, object]:
        """Schema in the format of chat templates."""
        return self.tool.schema

    async def call(self, arguments: str, *, timeout_s: float) -> str:
        """Return the result of a call, or the error, as text for the model."""
        return (await self.look_up(arguments, timeout_s=timeout_s))[0]

    async def look_up(self, arguments: str, *, timeout_s: float) -> tuple[str, bool | None]:
        """Return the text of `call`, and whether it was kept; None if the arguments are wrong.

        Raises:
            ForgeError: the function raised it, for failures that are not the model's fault.
        """
        try:
            kwargs = self.tool.read(arguments)
        except ValueError as error:
            return str(error), None
        # All that a result depends on is in its key, so that no entry ever becomes wrong.
        key = content_key(self.tool.name, version_of(self.tool.function), self.about, self.tool.canonical(kwargs))
        run = functools.partial(self.tool.run, kwargs, timeout_s=timeout_s)
        return await self.cache.get(key, run, wait_s=timeout_s)


def _file(function: Any) -> str:
    """Return the text of the file that defines a function; "" if there is none."""
    try:
        return Path(function.__code__.co_filename).read_text(errors="replace")
    except OSError:
        return ""


def _code(code: types.CodeType) -> bytes:
    """Return what a function runs, with the functions inside of it."""
    parts = [code.co_code, repr((code.co_names, code.co_varnames)).encode()]
    for constant in code.co_consts:
        parts.append(_code(constant) if isinstance(constant, types.CodeType) else _constant(constant))
    return hashlib.blake2b(b"".join(hashlib.blake2b(part).digest() for part in parts)).digest()


def _constant(value: object) -> bytes:
    if isinstance(value, frozenset):  # in no order
        return repr(sorted(map(repr, value))).encode()
    return repr(value).encode()
