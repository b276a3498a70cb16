"""Makes chat messages of the input of OpenAI's Responses: vLLM's types for it take a millisecond for each item."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forge_rl.gateway.errors import ApiError

_ROLES = ("user", "assistant", "system", "developer")
_WANTED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "custom_tool_call": {"call_id": str, "name": str, "input": str},
    "function_call_output": {"call_id": str, "output": (str, list)},
    "custom_tool_call_output": {"call_id": str, "output": (str, list)},
}
"""Fields of items that are not messages, each with its type."""


def to_messages(instructions: str | None, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make chat messages of a response's instructions and input; what one answer said and called is one message.

    The model's thoughts are left out: its own tokens have them where the conversation goes on from them.

    Raises:
        ApiError: an item is of an unknown kind, or lacks what it needs.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for place, item in enumerate(given):
        kind, where = str(item.get("type", "message")), f"input.{place}"
        for name, wanted in _WANTED.get(kind, {}).items():
            if not isinstance(item.get(name), wanted):
                raise ApiError(400, f"an item of type {kind!r} has no {name}", param=f"{where}.{name}")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind in ("function_call", "custom_tool_call"):
            arguments = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
            function = {"name": item["name"], "arguments": arguments}
            if last is None:
                messages.append(last := {"role": "assistant"})
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
        elif kind == "message" and item.get("role") in _ROLES and isinstance(item.get("content"), str | list):
            if item["role"] == "assistant" and last is not None and "content" not in last:
                last["content"] = item["content"]
            else:
                messages.append({"role": item["role"], "content": item["content"]})
        elif kind != "reasoning":
            problem = f"an item of type {kind[:100]!r} is incomplete or not supported here"
            raise ApiError(400, problem, param=where)
    return messages
