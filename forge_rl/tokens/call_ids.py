"""Finds the form of ids of tool calls that a chat template takes, and writes ids in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from forge_rl.errors import ModelError
from forge_rl.types import Message

_NAME = "probe_8d2f"
_SHORT = 9
"""Length of ids in Mistral's templates, which refuse others."""
_PROBES: tuple[tuple[Literal["any", "short", "named"], str], ...] = (
    ("any", "chatcmpl-tool-0123456789abcdef"),  # as vLLM's parsers make them
    ("short", "call00001"),
    ("named", f"functions.{_NAME}:0"),
)
"""An id of each form, which contains the next: Kimi K2's template writes a call's name only as part of its id."""


class CallIds:
    """Writes ids of calls, and of the messages that answer them, as one chat template takes them.

        tokenizer.call_ids.renamed([{"role": "assistant", "tool_calls": [...]}, {"role": "tool", "tool_call_id": ...}])

    Args:
        render: returns the text that the chat template writes for messages.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render

    @cached_property
    def form(self) -> Literal["any", "short", "named"] | None:
        """Form of ids with which the template writes a call's name; None if it writes no calls."""
        for form, call_id in _PROBES:
            call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": {"a": 1}}}
            answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                if _NAME in self._render([{"role": "user", "content": "?"}, answer]):
                    return form
            except ModelError:  # ids of this form are refused
                continue
        return None

    def new(self, name: str, index: int) -> str:
        """Return an id for the call number `index` of a conversation, from 0."""
        return f"functions.{name}:{index}" if self.form == "named" else f"call{index + 1:05}"

    def renamed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose calls, and the answers to them, have ids that the template takes."""
        has_ids = any("tool_calls" in message or "tool_call_id" in message for message in messages)
        if not has_ids or self.form in ("any", None):
            return messages
        new_ids: dict[str, str] = {}
        return [self._renamed(message, new_ids) for message in messages]

    def _renamed(self, message: Message, new_ids: dict[str, str]) -> Message:
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls):
            message = {**message, "tool_calls": [self._renamed_call(call, new_ids) for call in calls]}
        if (old_id := message.get("tool_call_id")) is not None:
            message = {**message, "tool_call_id": new_ids.get(str(old_id)) or self._in_form(str(old_id))}
        return message

    def _renamed_call(self, call: Mapping[str, object], new_ids: dict[str, str]) -> Mapping[str, object]:
        old_id, function = str(call.get("id", "")), call.get("function", call)
        new_id = self._in_form(old_id)
        if self.form == "named" and isinstance(function, Mapping):
            name = str(function.get("name"))
            new_id = old_id if old_id.startswith(f"functions.{name}:") else self.new(name, len(new_ids))
        new_ids[old_id] = new_id
        return {**call, "id": new_id}

    def _in_form(self, call_id: str) -> str:
        if self.form != "short" or (len(call_id) == _SHORT and call_id.isalnum()):
            return call_id
        # The same for a call and its answer, which may be rendered apart.
        return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT]
