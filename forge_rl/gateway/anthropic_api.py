"""Anthropic's messages: reads requests and writes responses."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from forge_rl.gateway.chat import ChatMessage, ToolCall, parsed
from forge_rl.gateway.choices import Choice, ChoiceDelta
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.openai_requests import LenientModel, StrictModel
from forge_rl.gateway.request_builder import RequestBuilder, SamplingRequest
from forge_rl.gateway.response import ApiResponse
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.wire import encode


class Block(LenientModel):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Message(LenientModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(LenientModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class ToolChoice(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None


class CountRequest(StrictModel):
    """Fields that counting tokens and messages share; Any marks those that are refused or ignored."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Any = None
    output_config: Any = None
    output_format: Any = None
    cache_control: Any = None
    context_management: Any = None
    mcp_servers: Any = None

    def check(self) -> None:
        """Raise ApiError for what is not supported."""
        logprobs = "the recorded logprobs would be those of another distribution than the one that is trained"
        for name, refused, why in (
            ("top_p", getattr(self, "top_p", None) not in (None, 1), logprobs),
            ("top_k", getattr(self, "top_k", None) not in (None, -1), logprobs),
            ("tool_choice", bool(self.tool_choice and self.tool_choice.type in ("any", "tool")), logprobs),
            ("thinking", self.thinking not in (None, {"type": "disabled"}), "the model's thoughts are text"),
            ("output_config", bool(self.output_config), logprobs),
            ("output_format", bool(self.output_format), logprobs),
            ("context_management", bool(self.context_management), "it is not there"),
            ("mcp_servers", bool(self.mcp_servers), "it is not there"),
        ):
            if refused:
                raise ApiError(400, f"not supported: {why}", param=name)
        if self.messages[-1].role == "assistant":
            raise ApiError(400, "the model's message cannot be prefilled: end with a user's message", param="messages")

    @property
    def tool_schemas(self) -> list[dict[str, object]]:
        """Tools in OpenAI's form, which is how chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    **({"description": tool.description} if tool.description is not None else {}),
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or ()
        ]

    def conversation(self) -> list[ChatMessage]:
        """Convert the messages to the form that all APIs share.

        Raises:
            ApiError: a block is of an unknown kind.
        """
        system = _text(self.system, "system") if self.system is not None else ""
        found = [ChatMessage(role="system", content=system)] if system else []
        for at, message in enumerate(self.messages):
            found += _messages(message, f"messages.{at}.content")
        return found


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=16)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: Any = None
    top_k: Any = None
    metadata: Any = None
    service_tier: Any = None
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    diagnostics: Any = None


async def messages(body: bytes, builder: RequestBuilder, session: Session | None) -> ApiResponse:
    """Read a request of messages.

    Raises:
        ValidationError, ApiError, ForgeError: the request is wrong.
    """
    request = MessagesRequest.model_validate_json(body)
    model = builder.check_model(request.model)
    request.check()
    if "" in (request.stop_sequences or ()):
        raise ApiError(400, "a stop sequence is empty", param="stop_sequences")
    choice = request.tool_choice
    tools = request.tool_schemas
    requested = SamplingRequest(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        stop=tuple(request.stop_sequences or ()),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
    )
    prompt = await builder.prompt_builder.chat(request.conversation(), tools, session)
    called = [] if choice and choice.type == "none" else tools
    return MessagesResponse(await builder.choices([prompt], 1, requested, session, called), bool(request.stream), model)


async def count_tokens(body: bytes, builder: RequestBuilder, session: Session | None) -> dict[str, object]:
    """Count the tokens of a request's prompt.

    Raises:
        ValidationError, ApiError, ForgeError: the request is wrong.
    """
    request = CountRequest.model_validate_json(body)
    builder.check_model(request.model)
    request.check()
    prompt = await builder.prompt_builder.chat(request.conversation(), request.tool_schemas, session)
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
                begun: dict[str, object] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                found += self._begin(begun, call.index)
            if call.arguments and call.index == self._call:
                found += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return found

    def stream_finish(self, choice: Choice) -> bytes:
        stop: dict[str, object] = {"delta": _stop(choice), "usage": self._usage(choice.completion_tokens)}
        return self._end_block() + _event("message_delta", stop)

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
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **data}) + b"\n\n"


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
                content = _text(block.content or "", f"{here}.content")
                found.append(ChatMessage(role="tool", content=content, call_id=block.tool_use_id))
            case _:
                raise ApiError(400, f"a block of type {block.type!r} is incomplete or not supported here", param=here)
    if message.role == "assistant":
        return [ChatMessage(role="assistant", content="".join(texts), calls=tuple(calls))]
    flush()
    return found


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise ApiError(400, f"a block of type {block.type!r} is not supported: send text", param=f"{where}.{at}")
        texts.append(block.text)
    return "\n".join(texts)
