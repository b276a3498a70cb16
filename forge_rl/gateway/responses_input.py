"""Converts input of OpenAI's Responses API to chat messages; vLLM's types for it take a millisecond per item."""

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
"""Required fields of items other than messages, each with its type."""


def to_messages(instructions: str | None, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert a response's instructions and input to chat messages; text and calls of one answer form one message.

    Reasoning items are omitted: recorded turns keep the model's reasoning in their own tokens.

    Raises:
        ApiError: an item has an unknown type or lacks a required field.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for place, item in enumerate(given):
        kind, where = str(item.get("type", "message")), f"input.{place}"
        for name, wanted in _WANTED.get(kind, {}).items():
            if not isinstance(item.get(name), wanted):
                raise ApiError(400, f"an item of type {kind!r} has no valid {name}", param=f"{where}.{name}")
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
            problem = f"an item of type {kind[:100]!r} is incomplete or not supported"
            raise ApiError(400, problem, param=where)
    return messages
