"""Requests of OpenAI's chat completions and completions: types, bounds, and what is refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forge_rl.gateway.chat import ChatMessage, ToolCall
from forge_rl.gateway.errors import ApiError

_LOGPROBS = "the recorded logprobs would be those of another distribution than the one that is trained"
_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "top_p": ((1,), _LOGPROBS),
    "top_k": ((-1, 0), _LOGPROBS),
    "min_p": ((0,), _LOGPROBS),
    "frequency_penalty": ((0,), _LOGPROBS),
    "presence_penalty": ((0,), _LOGPROBS),
    "repetition_penalty": ((1,), _LOGPROBS),
    "logit_bias": (({},), _LOGPROBS),
    "response_format": (({"type": "text"},), _LOGPROBS),
    "tool_choice": (("auto", "none"), f"completions are not forced: {_LOGPROBS}"),
    "modalities": ((["text"],), "completions are text"),
    "audio": ((), "completions are text"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools"),
    "prediction": ((), "it is not there"),
    "web_search_options": ((), "it is not there"),
    "reasoning_effort": ((), "it is not there"),
    "verbosity": (("medium",), "it is not there"),
    "moderation": ((), "it is not there"),
    "echo": ((False,), "it is not there"),
    "suffix": (("",), "it is not there"),
    "best_of": ((1,), "use n"),
}
"""Parameters that are not supported: the values that change nothing, and the reason why others are refused."""

Stop = str | Annotated[list[str], Field(max_length=16)] | None


class StrictModel(BaseModel):
    """Requests: unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


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
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(LenientModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(LenientModel):
    type: Literal["function"]
    function: ToolFunction


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(StrictModel):
    """Fields that both kinds of requests have; Any marks those that are refused or ignored."""

    model: str
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    user: Any = None

    def check(self) -> None:
        """Raise ApiError for what is not supported."""
        for name, (neutral, why) in _UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for streams", param="stream_options")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, as a tuple."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise ApiError(400, "a stop text is empty", param="stop")
        return tuple(stops)

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    moderation: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(Common):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


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
        content=_text(message.content, at),
        calls=tuple(ToolCall(id=c.id, name=c.function.name, arguments=c.function.arguments) for c in calls),
        call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _text(content: str | list[Part] | None, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise ApiError(
                400,
                f"content of type {part.type!r} is not supported: send text",
                param=f"messages.{at}.content.{place}",
            )
        texts.append(text)
    return "\n".join(texts)
