"""Multi-turn tool use: the model calls functions until it answers in plain text."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from forge_rl.envs.compaction import Compact
from forge_rl.envs.protocol import Observation, Step, close_env
from forge_rl.envs.pure import CachedTool, purity, task_key, version_of
from forge_rl.envs.tool import Tool
from forge_rl.errors import ConfigError, check_flags
from forge_rl.system.result_cache import ResultCache
from forge_rl.system.strict_json import check_levels, parse_json
from forge_rl.types import Message, Task, ToolCall

_CALL_SIGNS = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
)
"""Markers that begin a tool call, by model family: a completion with one but no parsed call was an attempted call."""
UNREADABLE_CALL = "error: the tool call cannot be read; write it as JSON, in the form shown"
_NOT_TOOLS = frozenset({"reward", "close"})


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """Settings of an environment with tools."""

    max_turns: int = 8
    """Maximum completions per episode; an episode whose last completion calls tools has no answer."""
    timeout_s: float = 30.0
    """Timeout of one tool call. No further call of a completion is run once those after its first have taken as long
    together."""
    max_output_chars: int = 4000
    """Maximum characters of a tool output; the middle of a longer one is cut."""
    instruction: str = ""
    """System message for tasks that have none."""
    examples: Sequence[Message] = ()
    """Messages shown before the task's question, such as example calls with outputs and answers."""
    compact: Compact | None = None
    """Shortens a long conversation, such as DropOldOutputs(); with None the episode ends when the context is full."""

    def __post_init__(self) -> None:
        minimums = {"max_turns": 1, "max_output_chars": 100}
        check_flags(self, f"{type(self).__name__}'s ", minimum=minimums, above={"timeout_s": 0})


class CallableTool(Protocol):
    """A tool that an episode can call: a `Tool`, or one of a server."""

    @property
    def schema(self) -> Mapping[str, object]:
        """Schema in the format of chat templates."""

    async def call(self, arguments: str, *, timeout_s: float) -> str:
        """Call the tool with JSON arguments; return its result, or the error, as text for the model."""


@runtime_checkable
class KeptTool(CallableTool, Protocol):
    """A tool whose results may be kept, such as a `CachedTool`."""

    async def look_up(self, arguments: str, *, timeout_s: float) -> tuple[str, bool | None]:
        """Return the text of `call`, and whether it was a kept result; None if it could not have been one."""


@dataclass(frozen=True)
class ToolEnv(ToolSettings):
    """Makes environments with tools; a completion without a tool call is the answer.

        def add(a: int, b: int) -> int:
            '''Add two numbers.'''
            return a + b

        world = ToolEnv([add])  # --env mine.py:world

    Instead of functions, pass a class: each episode gets an instance, made with the task if the constructor takes one,
    whose public methods are the tools. An optional method `reward(answer: str) -> float`, plain or async, scores the
    episode instead of the verifier; `answer` is "" if the model never answered. `close`, if any, is called at the end.

        class Shop:  # --env mine.py:Shop
            def __init__(self, task: Task) -> None:
                self.task, self.cart = task, []

            def buy(self, item: str) -> str:
                '''Put something into the cart.'''
                self.cart.append(item)
                return f"{len(self.cart)} things are in the cart"

            def reward(self, answer: str) -> float:
                return float(self.task.truth["item"] in self.cart)

    If its process dies, a world is made again by its own calls; a class with `replayable = False` is not.

    The model sees unparsable calls, unknown tools, wrong arguments and a tool's exceptions as error text; a ForgeError
    raised by a tool is an environment error. Results of tools that `forge_rl.tool` declares pure are kept.

    Raises:
        ConfigError: no tool was given, two have the same name, one lacks a schema (see `Tool`), or one declared pure
            needs a version.
    """

    tools: Sequence[Callable[..., object]] | type
    """Functions, or a class whose methods are the tools."""
    _: KW_ONLY
    cache: str = "~/.cache/forge_rl/tools"
    """Folder of the results of pure tools, shared by all runs; empty keeps them in memory only."""
    cache_mib: int = 1024
    """Maximum MiB of these results; the least recently used are evicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "ToolEnv's ", minimum={"cache_mib": 1})
        is_class = isinstance(self.tools, type)
        functions = _methods(self.tools) if isinstance(self.tools, type) else self.tools
        tools_by_name = _by_name([Tool(function, is_method=is_class) for function in functions])
        for tool in tools_by_name.values():
            if purity(tool.function) is not None:
                version_of(tool.function)  # checks that it has one
        object.__setattr__(self, "_tools", tools_by_name)
        folder = Path(self.cache).expanduser() if self.cache else None
        object.__setattr__(self, "_cache", ResultCache(folder, most_bytes=self.cache_mib << 20))

    def __call__(self, task: Task) -> ToolUse:
        """Make the environment of one episode."""
        tools: dict[str, Tool] = self._tools  # type: ignore[attr-defined]
        if not isinstance(self.tools, type):
            return ToolUse(self, task, {name: self._kept(tool, "") for name, tool in tools.items()})
        # A world of its own for each episode: methods change it.
        world = self.tools(task) if inspect.signature(self.tools).parameters else self.tools()
        world_key = task_key(task)
        world_tools = {name: replace(tool, owner=world) for name, tool in tools.items()}
        return ToolUse(self, task, {name: self._kept(tool, world_key) for name, tool in world_tools.items()}, world)

    def _kept(self, tool: Tool, about: str | None) -> CallableTool:
        """Put the cache before a tool that is declared pure; `about` covers what else its results depend on."""
        if about is None or purity(tool.function) is None:
            return tool
        return CachedTool(tool, self._cache, about)  # type: ignore[attr-defined]


class ToolUse:
    """One episode with tools: runs each completion's calls in order."""

    def __init__(
        self, config: ToolSettings, task: Task, tools: Mapping[str, CallableTool], world: object = None
    ) -> None:
        self._config = config
        self._task = task
        self._tools = tools
        self._world = world
        self._turns = 0
        self._conversation: list[Message] = []

    async def reset(self) -> Observation:
        self._conversation = first_messages(self._task, self._config.instruction, self._config.examples)
        return Observation(
            messages=tuple(self._conversation), tools=tuple(tool.schema for tool in self._tools.values())
        )

    @property
    def replayable(self) -> bool:
        """Whether the world, if there is one, may be rebuilt by its own calls."""
        return getattr(self._world, "replayable", True)

    def resume(self, completion: str, step: Step, calls: Sequence[ToolCall]) -> bool:
        """Take an earlier turn from its step without running its calls, unless they changed a world."""
        # Calls of functions without a world changed nothing, and the step has their outputs.
        if self._world is not None:
            return False
        self._turns += 1
        if step.history is not None:
            self._conversation = list(step.history)
        elif self._config.compact is not None:
            self._conversation += [_as_turn(completion, calls), *step.messages]
        return True

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        self._turns += 1
        if truncated or not attempts_call(completion, calls):  # a truncated one may have lost calls, or part of one
            return await self._end(completion)
        # The model would never see the outputs of calls in its last turn, so that they are not run.
        if self._turns == self._config.max_turns:
            return await self._end("")
        outputs: list[Message] = []
        finished_calls: list[ToolCall] = []
        spent_s, timeout_s = 0.0, self._config.timeout_s
        # One after another: a later call may depend on what an earlier one has changed.
        for call in calls:
            start_time, seconds, cached = time.monotonic(), None, None
            if spent_s < timeout_s:
                text, cached = await self._run(call)
                seconds = time.monotonic() - start_time
                # The first call may have waited for a server to start.
                spent_s += seconds if finished_calls else 0.0
            else:
                text = not_run(timeout_s)
            error = text if text.startswith("error: ") else ""
            finished_calls.append(replace(call, seconds=seconds, error=error, cached=cached))
            outputs.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        if not calls:
            outputs.append({"role": "user", "content": UNREADABLE_CALL})
        if self._config.compact is not None:
            self._conversation += [_as_turn(completion, calls), *outputs]
            if inspect.isawaitable(shorter := self._config.compact(self._conversation)):
                shorter = await shorter
            if shorter is not None:
                self._conversation = list(shorter)
                return Step(done=False, history=tuple(shorter), calls=tuple(finished_calls))
        return Step(done=False, messages=tuple(outputs), calls=tuple(finished_calls))

    async def close(self) -> None:
        await close_env(self._world)

    async def _run(self, call: ToolCall) -> tuple[str, bool | None]:
        """Return a call's output, and whether it came from the cache; None if it could not have."""
        if (tool := self._tools.get(call.name)) is None:
            return f"error: there is no tool {call.name!r:.80}; there are: {', '.join(self._tools)}", None
        cached: bool | None = None
        if isinstance(tool, KeptTool):
            text, cached = await tool.look_up(call.arguments, timeout_s=self._config.timeout_s)
        else:
            text = await tool.call(call.arguments, timeout_s=self._config.timeout_s)
        return clipped(text, self._config.max_output_chars), cached

    async def _end(self, answer: str) -> Step:
        reward = getattr(self._world, "reward", None)
        if reward is None:
            return Step(done=True, output=answer)
        if inspect.isawaitable(value := reward(answer)):
            value = await value
        return Step(done=True, output=answer, reward=float(value))


def first_messages(task: Task, instruction: str, examples: Sequence[Message]) -> list[Message]:
    """Return a task's messages, with examples before them and an instruction if they have no system message."""
    messages = list(task.messages)
    if messages[0]["role"] != "system" and instruction:
        messages.insert(0, {"role": "system", "content": instruction})
    # Examples follow the system message: chat templates take one only at the beginning.
    position = 1 if messages[0]["role"] == "system" else 0
    messages[position:position] = examples
    return messages


def attempts_call(completion: str, calls: Sequence[ToolCall]) -> bool:
    """Return whether a completion calls a tool, or tried to in a form that cannot be read."""
    return bool(calls) or any(sign in completion for sign in _CALL_SIGNS)


def not_run(seconds: float) -> str:
    """Return the output of a call that is not run, as those before it in its completion took the time of all."""
    return f"error: not run, as the calls before it took {seconds:g} s"


def _as_turn(completion: str, calls: Sequence[ToolCall]) -> Message:
    return {"role": "assistant", "content": completion, "tool_calls": [_as_message(call) for call in calls]}


def _as_message(call: ToolCall) -> Message:
    arguments: object = call.arguments
    with contextlib.suppress(ValueError, RecursionError):
        # Chat templates expect an object rather than its text.
        value = parse_json(call.arguments)
        check_levels(value)
        arguments = value
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _methods(kind: type) -> list[Callable[..., object]]:
    """Return the public methods of a class, unbound, in definition order."""
    methods: dict[str, Callable[..., object]] = {}
    for base in reversed(kind.__mro__[:-1]):
        # Base classes come first: an override replaces the function and keeps its place.
        methods |= {name: value for name, value in vars(base).items() if inspect.isfunction(value)}
    return [value for name, value in methods.items() if not name.startswith("_") and name not in _NOT_TOOLS]


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    if not tools:
        raise ConfigError("there are no tools", hint="pass ToolEnv functions, or a class with public methods")
    tools_by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in tools_by_name:
            raise ConfigError(f"two tools have the name {tool.name!r}", hint="rename one of the functions")
        tools_by_name[tool.name] = tool
    return tools_by_name


def clipped(text: str, max_chars: int) -> str:
    """Cut the middle out of a text that is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
