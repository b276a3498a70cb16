"""Anthropic's messages: reads requests and writes responses."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from forge_rl.gateway.chat import ChatMessage, Prompt, ToolCall, parsed
from forge_rl.gateway.choices import Choice, ChoiceDelta
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.json_text import to_event
from forge_rl.gateway.openai_requests import (
    FIRST_ERROR,
    LOGPROBS,
    MOST_MESSAGES,
    MOST_TOKENS,
    MOST_TOOLS,
    NOT_THERE,
    LenientModel,
    Part,
    StrictModel,
    check_stops,
    join_text,
    refused,
)
from forge_rl.gateway.request_builder import RequestBuilder, SamplingRequest
from forge_rl.gateway.response import ApiResponse
from forge_rl.gateway.sessions import Session


class Block(Part):
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], FIRST_ERROR] | None = None


class Message(LenientModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FIRST_ERROR]


class Tool(LenientModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class ToolChoice(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None


class CountRequest(StrictModel):
    """Fields that counting tokens and messages share."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: str | Annotated[list[Block], FIRST_ERROR] | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None

    unsupported: ClassVar = {
        **refused(LOGPROBS, top_p=(1,), top_k=(-1,), output_config=({},), output_format=({},)),
        **refused("the model's thoughts are text", thinking=({"type": "disabled"},)),
        **refused(NOT_THERE, context_management=({},), mcp_servers=([],)),
    }
    ignored: ClassVar = {"cache_control"}

    def check(self) -> None:
        super().check()
        if self.tool_choice and self.tool_choice.type in ("any", "tool"):
            raise ApiError(400, f"tool_choice is not supported: {LOGPROBS}", param="tool_choice")
        if self.messages[-1].role == "assistant":
            raise ApiError(400, "the model's message cannot be prefilled: end with a user's message", param="messages")

    def tool_schemas(self) -> list[dict[str, object]]:
        """Return the tools in OpenAI's form, which is how chat templates take them."""
        functions = (
            {**tool.model_dump(include={"name", "description"}, exclude_none=True), "parameters": tool.input_schema}
            for tool in self.tools or ()
        )
        return [{"type": "function", "function": function} for function in functions]

    def conversation(self) -> list[ChatMessage]:
        """Convert the messages to the form that all APIs share.

        Raises:
            ApiError: a block is of an unknown kind.
        """
        system = join_text(self.system, "system")
        found = [ChatMessage(role="system", content=system)] if system else []
        for at, message in enumerate(self.messages):
            found += _messages(message, f"messages.{at}.content")
        return found


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, le=MOST_TOKENS)
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)

    ignored: ClassVar = {
        *("cache_control", "metadata", "service_tier", "container", "inference_geo"),
        *("speed", "user_profile_id", "workspace_id", "diagnostics"),
    }


async def messages(body: bytes, builder: RequestBuilder, session: Session | None) -> ApiResponse:
    """Read a request of messages."""
    request, prompt, requested, tools = await builder.read(_read_messages, body, session)
    choices = await builder.choices([prompt], 1, requested, session, tools)
    return MessagesResponse(choices, bool(request.stream), request.model)


def _read_messages(
    body: bytes, builder: RequestBuilder, session: Session | None
) -> tuple[MessagesRequest, Prompt, SamplingRequest, list[dict[str, object]]]:
    request = MessagesRequest.read(body)
    builder.check_model(request.model)
    request.check()
    check_stops(request.stop_sequences or (), "stop_sequences")
    choice = request.tool_choice
    tools = request.tool_schemas()
    requested = SamplingRequest(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        stop=tuple(request.stop_sequences or ()),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
    )
    prompt = builder.chat(request.conversation(), tools, session)
    return request, prompt, requested, [] if choice and choice.type == "none" else tools


async def count_tokens(body: bytes, builder: RequestBuilder, session: Session | None) -> dict[str, object]:
    """Count the tokens of a request's prompt."""
    return await builder.read(_read_count, body, session)


def _read_count(body: bytes, builder: RequestBuilder, session: Session | None) -> dict[str, object]:
    request = CountRequest.read(body)
    builder.check_model(request.model)
    request.check()
    prompt = builder.chat(request.conversation(), request.tool_schemas(), session)
    return {"input_tokens": len(prompt.token_ids)}


class MessagesResponse(ApiResponse):
    """Response of one message: blocks of text and of tool calls."""

    def __init__(self, choices: tuple[Choice, ...], streamed: bool, model: str) -> None:
        super().__init__(choices, streamed=streamed)
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._block = -1
        """Index of the last block that was started; -1 if none was."""
        self._call: int | None = None
        """Index of the tool call that the block holds; None if it holds text."""

    def body(self) -> dict[str, object]:
        (choice,) = self.choices
        message = choice.message
        content: list[dict[str, object]] = [{"type": "text", "text": message.content}] if message.content else []
        for call in message.calls:
            given = parsed(call.arguments)
            given = given if isinstance(given, dict) else {}
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return {**self._head(), "content": content, **_stop(choice), "usage": self._usage(self.completion_tokens)}

    def stream_start(self) -> bytes:
        empty: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return _event("message_start", {"message": {**self._head(), **empty}}) + _event("ping", {})

    def stream_delta(self, choice: Choice, added: ChoiceDelta) -> bytes:
        found = b""
        if added.content:
            if self._block < 0 or self._call is not None:
                found += self._begin({"type": "text", "text": ""}, None)
            found += self._delta({"type": "text_delta", "text": added.content})
        for call in added.calls:
            if call.name is not None:
                found += self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, call.index)
            if call.arguments and call.index == self._call:
                found += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if choice.finish:
            usage = self._usage(choice.completion_tokens)
            found += self._end_block() + _event("message_delta", {"delta": _stop(choice), "usage": usage})
        return found

    def stream_end(self) -> bytes:
        return _event("message_stop", {})

    def _begin(self, block: dict[str, object], call: int | None) -> bytes:
        ended = self._end_block()
        self._block += 1
        self._call = call
        return ended + _event("content_block_start", {"index": self._block, "content_block": block})

    def _delta(self, delta: dict[str, object]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _end_block(self) -> bytes:
        return _event("content_block_stop", {"index": self._block}) if self._block >= 0 else b""

    def _head(self) -> dict[str, object]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _usage(self, completed: int) -> dict[str, object]:
        return {"input_tokens": self.prompt_tokens, "output_tokens": completed}


def _event(kind: str, data: dict[str, object]) -> bytes:
    return f"event: {kind}\n".encode() + to_event({"type": kind, **data})


def _stop(choice: Choice) -> dict[str, object]:
    reason = "max_tokens" if choice.finish == "length" else "end_turn"
    if choice.stop_text:
        reason = "stop_sequence"
    elif choice.finish == "stop" and choice.message.calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": choice.stop_text or None}


def _messages(message: Message, where: str) -> list[ChatMessage]:
    """Split a message: an assistant's is one, a user's becomes its tool outputs and texts in their order."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    texts: list[str] = []
    calls: list[ToolCall] = []
    found: list[ChatMessage] = []

    def flush() -> None:
        if texts:
            found.append(ChatMessage(role=message.role, content="\n".join(texts)))
            texts.clear()

    for at, block in enumerate(message.content):
        here = f"{where}.{at}"
        match block.type, message.role:
            case "text", _ if block.text is not None:
                texts.append(block.text)
            case "tool_use", "assistant" if block.name and block.id is not None:
                written = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(ToolCall(id=block.id, name=block.name, arguments=written))
            case "tool_result", "user" if block.tool_use_id:
                flush()
                content = join_text(block.content, f"{here}.content")
                found.append(ChatMessage(role="tool", content=content, call_id=block.tool_use_id))
            case _:
                raise ApiError(400, f"a block of type {block.type!r} is incomplete or not supported here", param=here)
    if message.role == "assistant":
        return [ChatMessage(role="assistant", content="".join(texts), calls=tuple(calls))]
    flush()
    return found
