"""Converts conversations to token ids; recorded turns of the session keep theirs, only what follows is tokenized."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_rl.gateway.errors import ApiError, invalid
from forge_rl.gateway.sessions import Session
from forge_rl.token_arrays import TokenArray, TokenIds, ValueRecord
from forge_rl.tokens.message_form import decoded_arguments
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import ToolCall

_TEXT_PARTS = ("text", "refusal", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of content parts that hold text."""
_ITEM_ROLES = ("user", "assistant", "system", "developer")
_ITEM_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "custom_tool_call": {"call_id": str, "name": str, "input": str},
    "function_call_output": {"call_id": str, "output": (str, list)},
    "custom_tool_call_output": {"call_id": str, "output": (str, list)},
}
"""Required fields of a response's input items other than messages, each with its type."""


class _LenientModel(BaseModel):
    """Parts of messages; ignores unknown fields such as cache hints, which do not affect sampling."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _RawFunction(_LenientModel):
    name: str
    arguments: str = ""


class _RawCall(_LenientModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _RawFunction


class _RawMessage(_LenientModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: list[_RawCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One message of a conversation, independent of the API it came through."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant message."""
    call_id: str = ""
    """Id of the call that a tool message answers."""
    name: str = ""

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> ChatMessage:
        """Read a message in OpenAI's format, to which all APIs are converted; `where` is its path in the request.

        Raises:
            ApiError: the message is wrong, has unsupported content or lacks a required field.
        """
        try:
            message = _RawMessage.model_validate(raw)
        except ValidationError as error:
            raise invalid(error, where) from None
        if message.tool_calls and message.role != "assistant":
            raise ApiError(400, "only an assistant message may have tool calls", param=f"{where}.tool_calls")
        if message.role == "tool" and not message.tool_call_id:
            raise ApiError(400, "a tool message needs a tool_call_id", param=f"{where}.tool_call_id")
        if message.content is None and not message.tool_calls and message.role != "assistant":
            raise ApiError(400, "the message has no content", param=f"{where}.content")
        return cls(
            # Most chat templates know no role `developer`, which is OpenAI's later name for `system`.
            role="system" if message.role == "developer" else message.role,
            content=_join_text(message.content, f"{where}.content"),
            calls=tuple(
                ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments)
                for call in message.tool_calls or ()
            ),
            call_id=message.tool_call_id or "",
            name=message.name or "",
        )

    def template(self) -> dict[str, object]:
        """Return the message in chat templates' format."""
        calls = self.template_calls()
        optional = {"tool_calls": calls, "tool_call_id": self.call_id, "name": self.name}
        return {"role": self.role, "content": self.content, **{key: value for key, value in optional.items() if value}}

    def template_calls(self) -> list[dict[str, object]]:
        """Return the calls in chat templates' format."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": decoded_arguments(call.arguments)},
            }
            for call in self.calls
        ]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Prompt(ValueRecord):
    """Prompt token ids, with the state that lets a later request continue from the completion."""

    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    digest: bytes = b""
    """Digest of the tools and messages."""
    text: str | None = None
    """Raw prompt text; None for chat and for prompts of ids."""
    messages: tuple[Mapping[str, object], ...] = ()
    """Messages after the recorded turn that the prompt continues; see `Turn.messages`."""
    reads: Callable[[str, Sequence[int]], tuple[str, Sequence[ToolCall]]] | None = None
    """Parses content and tool calls from a completion's text and ids; None if the text is the content."""
    asked_temperature: float | None = None
    """Temperature in the request, if any."""


def extend_digest(digest: bytes, message: ChatMessage) -> bytes:
    """Return the digest extended by one message.

    In assistant messages, whitespace around the text and in the JSON of arguments is ignored, and so are call ids:
    clients and parsers change them.
    """
    template_message = message.template()
    if message.role == "assistant":
        calls = [[call.name, decoded_arguments(call.arguments)] for call in message.calls]
        template_message = {**template_message, "content": message.content.strip(), "tool_calls": calls}
    return hashlib.sha256(digest + _canonical(template_message)).digest()


class PromptBuilder:
    """Builds prompts from conversations and texts.

    Args:
        tokenizer: the model's tokenizer.
        tool_parser: name of the completions' tool parser.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str) -> None:
        self.tokenizer = tokenizer
        self._tool_parser = tool_parser

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]],
        session: Session | None,
        settings: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Build the prompt of a conversation, including the generation prompt.

        Args:
            messages: the conversation.
            tools: schemas of the tools.
            session: session with the recorded turns, which keep their ids.
            settings: other variables of the chat template.

        Raises:
            ModelError: the chat template rejects the messages.
            ApiError: the chat template does not render tools.
        """
        # The tokenizer then writes tools and calls into the messages as text, which only this parser reads back.
        if tools and not self.tokenizer.shows_tools and self._tool_parser != "hermes":
            raise ApiError(
                400,
                "the model's chat template does not render tools, so the tool parser must be 'hermes', not "
                f"{self._tool_parser!r}",
                param="tools",
            )
        settings_json = _canonical([list(tools), settings or {}])
        # Digests of the tools and the first n messages, for n from 0.
        digests = list(accumulate(messages, extend_digest, initial=hashlib.sha256(settings_json).digest()))
        # Longest prefix first: the fewer messages are left, the more tokens are the engine's own.
        recorded = (
            (count, ids)
            for count in range(len(messages), 0, -1)
            if session
            and messages[count - 1].role == "assistant"
            and (ids := session.context(digests[count])) is not None
        )
        count, context = next(recorded, (0, ()))
        rest = messages[count:]
        template_messages = [message.template() for message in rest]
        if count == 0:
            token_ids: TokenIds = self.tokenizer.render(template_messages, tools=tools, settings=settings)
        else:
            # Rendering the whole conversation would tokenize the model's text again, and may give other tokens than it
            # sampled.
            calls = messages[count - 1].template_calls()
            token_ids = self.tokenizer.extend(context, template_messages, tools=tools, calls=calls, settings=settings)
        return Prompt(token_ids=token_ids, digest=digests[-1], messages=tuple(template_messages))

    def completion(self, prompt: str | Sequence[int], session: Session | None) -> Prompt:
        """Build the prompt of a completion. Control tokens are parsed: the client writes the template's part too."""
        if not isinstance(prompt, str):
            # Clamp to int32: out-of-range ids are refused later, like any id not in the vocabulary.
            return Prompt(token_ids=[min(max(token, -1), 2**31 - 1) for token in prompt])
        prefix, context = session.longest_prefix(prompt) if session is not None else ("", ())
        rest = prompt[len(prefix) :]
        # A begin-of-sequence token belongs only at the start of the whole prompt.
        added_ids = self.tokenizer.encode(rest, add_special=not prefix)
        return Prompt(
            token_ids=[*context, *added_ids],
            text=prompt,
            messages=({"role": "prompt", "content": rest},) if rest else (),
        )


def response_messages(instructions: str | None, input_items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert a response's instructions and input to chat messages; text and calls of one answer form one message.

    vLLM's types for them take a millisecond per item.

    Reasoning items are omitted: recorded turns keep the model's reasoning in their own tokens.

    Raises:
        ApiError: an item has an unknown type or lacks a required field.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    # A plain string is shorthand for one message of the user.
    if isinstance(input_items, str):
        return [*messages, {"role": "user", "content": input_items}]
    for index, item in enumerate(input_items):
        kind, where = str(item.get("type", "message")), f"input.{index}"
        for name, field_type in _ITEM_FIELDS.get(kind, {}).items():
            if not isinstance(item.get(name), field_type):
                raise ApiError(400, f"an item of type {kind!r} has no valid {name}", param=f"{where}.{name}")
        # The text and the calls of one answer arrive as separate items; chat templates expect one message.
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind in ("function_call", "custom_tool_call"):
            # A custom tool takes free text; templates and parsers know calls with JSON arguments only.
            arguments = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
            function = {"name": item["name"], "arguments": arguments}
            if last is None:
                messages.append(last := {"role": "assistant"})
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
        elif kind == "message" and item.get("role") in _ITEM_ROLES and isinstance(item.get("content"), str | list):
            if item["role"] == "assistant" and last is not None and "content" not in last:
                last["content"] = item["content"]
            else:
                messages.append({"role": item["role"], "content": item["content"]})
        elif kind != "reasoning":
            problem = f"an item of type {kind[:100]!r} is incomplete or not supported"
            raise ApiError(400, problem, param=where)
    return messages


def _join_text(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    """Return the text of a message's content; `where` is its path in the request.

    Raises:
        ApiError: the content is not only text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise ApiError(
                400, f"content of type {str(kind)[:100]!r} is not supported: send text", param=f"{where}.{index}"
            )
        texts.append(text)
    return "\n".join(texts)


def _canonical(value: object) -> bytes:
    # Sorted, as clients may send the keys of an object in any order.
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
