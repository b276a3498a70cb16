"""Plays an episode of an environment in this process, for users who try it before a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from forge_rl.envs.protocol import (
    EnvFactory,
    Observation,
    Parsed,
    Step,
    close_env,
    make_env_beside,
    reset_env,
    step_env,
)
from forge_rl.system.strict_json import parse_json
from forge_rl.types import Message, Task, ToolCall

Answer = Callable[[Sequence[Message], Sequence[Mapping[str, object]]], Awaitable[Parsed | None]]
"""Answers a conversation, given the tools that may be called: content and calls, or None to end the episode."""


async def play(
    factory: EnvFactory, task: Task, answer: Answer | None, tell: Callable[[Observation | Step], None], *, turns: int
) -> float | None:
    """Show an environment's first observation, and let somebody play it.

    Args:
        answer: None only shows the first observation.
        tell: called with the observation and each step.
        turns: maximum number of turns.

    Returns:
        The sum of the environment's rewards; None if it gave none.

    Raises:
        ForgeError: the environment does not follow its protocol. Its own errors are raised unchanged.
    """
    env = await make_env_beside(factory, task)
    rewards: list[float] = []
    try:
        observation = await reset_env(env)
        tell(observation)
        messages, tools = tuple(observation.messages), observation.tools or task.tools
        for _ in range(turns if answer is not None else 0):
            assert answer is not None
            if (parsed := await answer(messages, tools)) is None:
                break
            content, calls = parsed
            # Without tools, the text is the completion itself.
            step = await step_env(env, content, parsed=parsed if tools else None)
            tell(step)
            rewards += [] if step.reward is None else [step.reward]
            if step.done:
                break
            assistant_message: dict[str, object] = {"role": "assistant", "content": content}
            if calls:
                assistant_message["tool_calls"] = [as_message(call) for call in calls]
            # A new history replaces all messages so far.
            messages = (*messages, assistant_message, *step.messages) if step.history is None else step.history
    finally:
        await close_env(env)
    return sum(rewards) if rewards else None


def as_message(call: ToolCall) -> dict[str, object]:
    """Return a call in the format of OpenAI's messages."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def typed(text: str, tools: Sequence[Mapping[str, object]]) -> Parsed:
    """Read what a person typed: `NAME {"key": "value"}` is a call if NAME is a tool; all else is the answer's text."""
    name, _, rest = text.strip().partition(" ")
    if name in map(_name, tools):
        try:
            is_object = isinstance(parse_json(rest or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if is_object:
            return "", (ToolCall(id="call-1", name=name, arguments=rest or "{}"),)
    return text, ()


def _name(tool: Mapping[str, object]) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
