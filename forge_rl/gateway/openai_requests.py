"""Requests of OpenAI's chat completions and completions: types, bounds, and what is refused and why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_rl.gateway.chat import ChatMessage, ToolCall
from forge_rl.gateway.errors import ApiError

LOGPROBS = "the recorded logprobs would be those of another distribution than the one that is trained"
NOT_THERE = "it is not there"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Finds halves of surrogate pairs, as JSON escapes them or as the bytes that no UTF-8 has."""
_SEARCHED_BYTES = 1 << 16
"""Longest body that is searched for one: all other requests wait meanwhile."""
MOST_MESSAGES = 4096
"""Messages of one request."""
MOST_TOOLS = 512
"""Tools of one request."""
MOST_STOPS = 16
"""Stop texts of one request: all are looked for after each token."""
MOST_STOP_CHARACTERS = 512
MOST_TOKENS = 2**31 - 1
"""What max_tokens may be; the model's context is the true bound."""
FIRST_ERROR = Field(fail_fast=True)
"""Lists end at their first error: errors of all elements would take long, and much memory."""


def check_stops(stops: Sequence[str], param: str) -> None:
    """Raise ApiError if there are too many stop texts, or one is empty or too long."""
    if "" in stops:
        raise ApiError(400, "a stop text is empty", param=param)
    if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > MOST_STOP_CHARACTERS:
        problem = f"there may be {MOST_STOPS} stop texts, each with {MOST_STOP_CHARACTERS} characters"
        raise ApiError(400, problem, param=param)


def refused(why: str, **neutral: tuple[object, ...]) -> dict[str, tuple[tuple[object, ...], str]]:
    """Name parameters that are refused, each with the values that change nothing and may be sent."""
    return {name: (values, why) for name, values in neutral.items()}


class StrictModel(BaseModel):
    """Requests. Parameters that are not declared are refused, but for those that change nothing."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]]
    ignored: ClassVar[set[str]]

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read the body of a request.

        Raises:
            ValidationError: it is not JSON, or a field is wrong.
            ApiError: a text in it has a lone surrogate; names the parameter.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError:
            if (param := _lone_surrogate(body)) is not None:
                problem = f"{param or 'the body'} has a lone surrogate, which stands for no character"
                raise ApiError(400, problem, param=param or None, code="invalid_value") from None
            raise

    def check(self) -> None:
        """Raise ApiError for what is not supported."""
        for name, (neutral, why) in self.unsupported.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
        for name in self.model_extra or ():
            if name not in self.unsupported and name not in self.ignored:
                raise ApiError(400, f"unknown parameter: {name}", param=name, code="unknown_parameter")


class LenientModel(BaseModel):
    """Parts of messages; unknown fields there, such as cache hints, are ignored: they do not concern the sampling."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Part(LenientModel):
    type: str
    text: str | None = None
    refusal: str | None = None


class Function(LenientModel):
    name: str
    arguments: str = ""


class Call(LenientModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(LenientModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FIRST_ERROR] | None = None
    tool_calls: list[Call] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(LenientModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(LenientModel):
    type: Literal["function"]
    function: ToolFunction


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(StrictModel):
    model: str
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Annotated[list[str], FIRST_ERROR] | None = None

    unsupported: ClassVar = {
        **refused(LOGPROBS, top_p=(1,), top_k=(-1, 0), min_p=(0,), frequency_penalty=(0,), presence_penalty=(0,)),
        **refused(LOGPROBS, repetition_penalty=(1,), logit_bias=({},), response_format=({"type": "text"},)),
        **refused(f"completions are not forced: {LOGPROBS}", tool_choice=("auto", "none")),
        **refused("completions are text", modalities=(["text"],), audio=()),
        **refused("use tools", functions=([],), function_call=("none", "auto")),
        **refused("use n", best_of=(1,)),
        **refused(NOT_THERE, prediction=(), web_search_options=(), reasoning_effort=(), verbosity=("medium",)),
        **refused(NOT_THERE, moderation=(), echo=(False,), suffix=("",)),
    }
    ignored: ClassVar = {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for streams", param="stream_options")
        check_stops(self.stops, "stop")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs wants logprobs to be true", param="top_logprobs")


class CompletionRequest(Common):
    prompt: (
        str
        | Annotated[list[int], FIRST_ERROR]
        | Annotated[list[str], FIRST_ERROR]
        | Annotated[list[Annotated[list[int], FIRST_ERROR]], FIRST_ERROR]
    )
    logprobs: int | None = Field(None, ge=0, le=20)


def _lone_surrogate(body: bytes) -> str | None:
    """Return the parameter of a body that has half of a surrogate pair, such as "messages.0.content".

    That is "" if it is the body's own or a key, and None if there is none, or the body is long, or no JSON anyway.
    """
    if len(body) > _SEARCHED_BYTES or not _SURROGATE.search(body):
        return None
    try:
        pending: list[tuple[object, tuple[str, ...]]] = [(json.loads(body.decode(errors="surrogatepass")), ())]
    except (ValueError, RecursionError):
        return None
    while pending:
        value, path = pending.pop()
        texts = value if isinstance(value, dict) else [value]
        if any(isinstance(text, str) and not _is_text(text) for text in texts):
            return ".".join(path)
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        pending += ((entry, (*path, str(name))) for name, entry in reversed([*entries]))
    return None


def _is_text(text: str) -> bool:
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def to_chat(message: Message, at: int) -> ChatMessage:
    """Convert a message to the form that all APIs share; `at` is its place in the request.

    Raises:
        ApiError: it holds what is not supported, or lacks what it needs.
    """
    role = "system" if message.role == "developer" else message.role
    calls = message.tool_calls or []
    if calls and role != "assistant":
        raise ApiError(400, "only an assistant's message has tool calls", param=f"messages.{at}.tool_calls")
    if role == "tool" and not message.tool_call_id:
        raise ApiError(400, "a tool's message names its call", param=f"messages.{at}.tool_call_id")
    if message.content is None and not calls and role != "assistant":
        raise ApiError(400, "the message has no content", param=f"messages.{at}.content")
    return ChatMessage(
        role=role,
        content=join_text(message.content, f"messages.{at}.content"),
        calls=tuple(ToolCall(id=c.id, name=c.function.name, arguments=c.function.arguments) for c in calls),
        call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def join_text(content: str | Sequence[Part] | None, where: str) -> str:
    """Return the text of a message's content; `where` is its place in the request.

    Raises:
        ApiError: it holds something else than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            raise ApiError(400, f"content of type {part.type!r} is not supported: send text", param=f"{where}.{place}")
        texts.append(text)
    return "\n".join(texts)
