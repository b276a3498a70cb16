"""A tool: a plain Python function whose schema comes from its type hints and docstring."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import json
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.strict_json import parse_json
from forge_rl.system.tasks import in_own_task


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that the model may call.

        def add(a: int, b: int = 0) -> int:
            '''Add two numbers.

            Args:
                a: the first one.
            '''
            return a + b

        await Tool(add).call('{"a": 1, "b": "2"}', timeout_s=10)  # "3"

    The function may be async; a plain one runs in its own thread. Type hints can be anything pydantic supports:
    numbers, text, bool, lists, dicts, Optional, Literal, enums, dataclasses, TypedDicts, pydantic models. Docstrings
    can be Google, NumPy or Sphinx style, or plain text.

    Raises:
        ConfigError: a parameter has no type hint, or one without a JSON form; or the function takes *args or **kwargs.
    """

    function: Callable[..., object]
    owner: object = None
    """Object to call a method on."""
    is_method: bool = False
    """True if the function's first parameter is `owner`."""
    alias: str = ""
    """Name by which the model calls it; "" for the function's."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"the tool {self.function!r:.80} is not a function", hint="pass tools as functions")
        self.schema  # noqa: B018  checks the hints

    def __reduce__(self) -> tuple[object, ...]:
        return Tool, (self.function, self.owner, self.is_method, self.alias)  # the adapter is rebuilt from the hints

    @property
    def name(self) -> str:
        """Name by which the model calls it."""
        return self.alias or str(inner_function(self.function).__name__)

    @functools.cached_property
    def schema(self) -> Mapping[str, object]:
        """Schema in the format of chat templates: {"type": "function", "function": {"name": ..., ...}}."""
        import docstring_parser

        docstring = docstring_parser.parse(inspect.getdoc(inner_function(self.function)) or "")
        texts = [docstring.short_description, docstring.long_description]
        parameters = _without_titles(self._adapter.json_schema())
        parameters.pop("additionalProperties", None)
        return tool_schema(self.name, "\n".join(filter(None, texts)), parameters)

    async def call(self, arguments: str, *, timeout_s: float) -> str:
        """Call the function with JSON arguments; return its result, or the error, as text for the model.

        A text result is returned as is, anything else as JSON. A plain function that times out is left running.

        Raises:
            ForgeError: the function raised it, for failures that are not the model's fault.
        """
        try:
            kwargs = self.read(arguments)
        except ValueError as error:
            return str(error)
        return (await self.run(kwargs, timeout_s=timeout_s))[0]

    def read(self, arguments: str) -> Mapping[str, Any]:
        """Return checked and converted arguments.

        Raises:
            ValueError: they do not fit the type hints; its text is for the model.
        """
        import pydantic
        import pydantic_core

        try:
            text = arguments.strip() or "{}"
            kwargs: Mapping[str, Any] = self._adapter.validate_json(text)
            # validate_json takes NaN and Infinity, which are not JSON.
            pydantic_core.from_json(text, allow_inf_nan=False)
        except pydantic.ValidationError as error:
            raise ValueError(f"error: wrong arguments of {self.name}: {_explained(error)}") from None
        except ValueError as error:
            raise ValueError(f"error: wrong arguments of {self.name}: NaN and Infinity are not JSON: {error}") from None
        return kwargs

    def canonical(self, kwargs: Mapping[str, Any]) -> object:
        """Return arguments from `read` as JSON values that are equal for equal arguments."""
        return self._adapter.dump_python(kwargs, mode="json")

    async def run(self, kwargs: Mapping[str, Any], *, timeout_s: float) -> tuple[str, bool]:
        """Call the function with arguments from `read`; return text as `call` does, and whether it is a result."""
        import pydantic_core

        try:
            async with asyncio.timeout(timeout_s):
                function = functools.partial(self.function, *[self.owner] * self.is_method, **kwargs)
                result = function() if self._is_async else await _in_thread(function)
                if inspect.isawaitable(result):
                    # Code that handles errors of a TaskGroup changes its task's count of cancellations, on which the
                    # timeout relies.
                    result = await in_own_task(result)
        except TimeoutError:
            return f"error: {self.name} took longer than {timeout_s:g} s", False
        except ForgeError:
            raise
        # A tool that calls sys.exit ends its call, not the run.
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}".removesuffix(": "), False
        try:
            text = result if isinstance(result, str) else pydantic_core.to_json(result, fallback=str).decode()
        except Exception as error:  # bytes that are no text, an object that holds itself, a fallback that fails
            return f"error: the result of {self.name} has no JSON form: {error}", False
        return text, not text.startswith("error: ")

    @property
    def _is_async(self) -> bool:
        return inspect.iscoroutinefunction(inner_function(self.function))

    @functools.cached_property
    def _adapter(self) -> Any:
        """Pydantic TypeAdapter that validates and converts arguments; its TypedDict allows any parameter name."""
        import docstring_parser
        import pydantic
        import typing_extensions

        inner = inner_function(self.function)
        try:
            hints = typing.get_type_hints(inner, include_extras=True)
        except Exception as error:
            raise ConfigError(
                f"a type hint of the tool {self.name} cannot be resolved: {error}",
                hint="use types that its module defines or imports",
            ) from None
        texts = {
            param.arg_name: param.description for param in docstring_parser.parse(inspect.getdoc(inner) or "").params
        }
        fields: dict[str, object] = {}
        parameters = list(inspect.signature(self.function).parameters.values())
        # Without `self`, for which `owner` is passed.
        for parameter in parameters[1:] if self.is_method else parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"the tool {self.name} has the parameter {parameter}, which has no JSON schema",
                    hint="use named parameters with types",
                )
            if parameter.name not in hints:
                raise ConfigError(
                    f"the parameter {parameter.name} of the tool {self.name} has no type hint",
                    hint=f"add a type, such as {parameter.name}: str",
                )
            field_options: dict[str, Any] = {"description": texts[parameter.name]} if texts.get(parameter.name) else {}
            if parameter.default is parameter.empty:
                fields[parameter.name] = Annotated[hints[parameter.name], pydantic.Field(**field_options)]
            else:
                field_options["json_schema_extra"] = (
                    {"default": parameter.default} if _is_json(parameter.default) else None
                )
                # Left out of the arguments if the model omits it, so that the function's own default applies.
                fields[parameter.name] = typing_extensions.NotRequired[
                    Annotated[hints[parameter.name], pydantic.Field(**field_options)]
                ]
        shape = typing_extensions.TypedDict(self.name, fields)  # type: ignore[misc]
        try:
            adapter = pydantic.TypeAdapter(pydantic.with_config(pydantic.ConfigDict(extra="forbid"))(shape))
            # Types without a schema are reported now, not when an episode first shows the tool.
            adapter.json_schema()
        except Exception as error:
            cause = str(error).splitlines()[0]
            raise ConfigError(
                f"the type hints of the tool {self.name} have no JSON form: {cause}",
                hint="use types such as int, str, list[int], dict[str, float], Literal, an enum or a dataclass",
            ) from None
        return adapter


def tool_schema(name: str, description: str, parameters: Mapping[str, object]) -> dict[str, object]:
    """Return a tool's schema in the format of chat templates."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def read_arguments(name: str, arguments: str) -> dict[str, object]:
    """Parse the arguments of a call whose schema only a server checks.

    Raises:
        ValueError: they are not a JSON object; its text is for the model.
    """
    try:
        value = parse_json(arguments.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of {name} are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the arguments of {name} must be a JSON object")
    return value


def inner_function(function: Callable[..., object]) -> Any:
    """Return the function inside a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function).__call__


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _without_titles(schema: Any) -> Any:
    """Return a JSON schema without the titles that pydantic derives from names, which only waste tokens."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Below these keys stand data, in which "title" may be a key like any other.
    values = ("default", "enum", "const", "examples")
    return {
        key: value if key in values else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _explained(error: Any) -> str:
    """Describe the errors in the arguments in one line."""
    texts = []
    for detail in error.errors(include_url=False)[:5]:
        location = ".".join(map(str, detail["loc"]))
        input_text = "" if detail["type"] in ("missing", "json_invalid") else f", got {detail['input']!r:.80}"
        texts.append((f"{location}: " if location else "") + detail["msg"] + input_text)
    return "; ".join(texts)


async def _in_thread(function: Callable[[], object]) -> object:
    """Call a plain function in its own daemon thread, so that one that never returns blocks neither calls nor exit."""
    future: concurrent.futures.Future[object] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # cancelling the wait does not stop the thread

    def run() -> None:
        try:
            future.set_result(function())
        except StopIteration as error:  # asyncio's futures cannot hold it
            future.set_exception(RuntimeError(f"StopIteration {error}".strip()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return await asyncio.wrap_future(future)
