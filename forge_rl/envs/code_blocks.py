"""A tool that runs code, whose input the model writes in fenced blocks or as a tool call."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tools import CallableTool, ToolSettings, ToolUse
from forge_rl.errors import ConfigError, check_flags
from forge_rl.sandbox.fences import fenced_code
from forge_rl.types import Message, Task, ToolCall

QUEUE_S = 3600.0
"""Maximum time of a tool call with the wait for a session; the call's own time is limited in the session."""


class BlockOptions(Protocol):
    """Options that environments with such a tool share."""

    @property
    def max_turns(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def max_output_chars(self) -> int: ...
    @property
    def examples(self) -> Sequence[Message]: ...


def block_settings(name: str, options: BlockOptions, instruction: str) -> ToolSettings:
    """Check an environment's options and return the settings of its episodes.

    Args:
        name: of the environment as in --env, for errors.
        instruction: system message for tasks that have none.

    Raises:
        ConfigError: an option is out of range.
    """
    prefix = f"--env {name}:"
    check_flags(options, prefix, minimum={"max_turns": 1, "max_output_chars": 100}, above={"timeout_s": 0})
    if options.timeout_s > QUEUE_S:
        raise ConfigError(f"{prefix}timeout_s is {options.timeout_s:g}", hint=f"set it to {QUEUE_S:g} or less")
    return ToolSettings(
        max_turns=options.max_turns,
        timeout_s=QUEUE_S,
        max_output_chars=options.max_output_chars,
        instruction=instruction,
        examples=options.examples,
    )


class BlockUse:
    """One episode with a tool of one text argument, which the model calls, or writes in fenced blocks.

    The output of blocks is the next user message; a completion with neither ends the episode.

    Args:
        languages: of the blocks that are run; none to run tool calls only.
        shows_schema: show the model the tool's schema.
    """

    def __init__(
        self,
        settings: ToolSettings,
        task: Task,
        tool: CallableTool,
        *,
        languages: Collection[str],
        shows_schema: bool,
    ) -> None:
        function_schema: Any = tool.schema["function"]
        self._name, (self._argument,) = function_schema["name"], function_schema["parameters"]["properties"]
        self._use = ToolUse(settings, task, {self._name: tool})
        self._languages, self._shows_schema = languages, shows_schema

    async def reset(self) -> Observation:
        """Return the first observation."""
        observation = await self._use.reset()
        return observation if self._shows_schema else replace(observation, tools=())

    def continue_from(self, other: BlockUse) -> None:
        """Take over how far another episode has come."""
        self._use.continue_from(other._use)

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        """Run a completion's calls, or else its blocks."""
        code = [] if calls or truncated else fenced_code(completion, self._languages)
        if not code:
            return await self._use.step(completion, truncated=truncated, calls=calls)
        call = ToolCall(id="block", name=self._name, arguments=json.dumps({self._argument: "\n".join(code)}))
        step = await self._use.step(completion, truncated=False, calls=(call,))
        return replace(step, messages=tuple(_as_output(message) for message in step.messages))


def _as_output(message: Message) -> Message:
    return {"role": "user", "content": f"Output:\n{message['content']}"}
