"""Request bodies: each API's supported, ignored and refused parameters, and their limits; vLLM parses the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.sampling_bounds import check_sampling
from forge_rl.gateway.template_settings import check_template

_NOT_THERE = "it is not implemented"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Surrogates as JSON escapes, or as bytes that are invalid UTF-8."""
_SEARCHED_BYTES = 1 << 16
"""Maximum bytes of a body searched for lone surrogates: all other requests wait meanwhile."""
_MOST_MESSAGES = 4096
"""Maximum messages per request."""
_MOST_TOOLS = 512
"""Maximum tools per request."""
_MOST_STOPS = 16
"""Maximum stop strings per request: each is searched for after every token."""
_MOST_STOP_CHARACTERS = 512
_MOST_TOKENS = 2**31 - 1
"""Largest max_tokens accepted; the model's context is the effective limit."""
_MOST_COMPLETIONS = 128
"""Maximum completions per request."""
_MOST_LOGPROBS = 512
"""Maximum logprobs per position over all completions of a request."""
_FIRST_ERROR = Field(fail_fast=True)
"""Validation of a list stops at its first error: collecting all would take long and much memory."""


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _refused(why: str, **neutral: tuple[object, ...]) -> dict[str, tuple[tuple[object, ...], str]]:
    """Return refused parameters, each with the neutral values that are accepted, and the reason."""
    return {name: (values, why) for name, values in neutral.items()}


class Body(BaseModel):
    """A request's body. Refuses parameters that are neither declared nor listed as served or ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str
    stream: bool | None = None

    served: ClassVar[frozenset[str]]
    """Parameters that vLLM parses and validates."""
    ignored: ClassVar[frozenset[str]]
    """Parameters without effect here."""
    unsupported: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]]

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parse a request's body.

        Raises:
            ValidationError: the body is not JSON, or a field is wrong.
            ApiError: a string has a lone surrogate, or a parameter is unsupported or exceeds a limit.
        """
        try:
            found = cls.model_validate_json(body)
        except ValidationError:
            if (param := _lone_surrogate(body)) is not None:
                problem = f"{param or 'the body'} has a lone surrogate, which stands for no character"
                raise ApiError(400, problem, param=param or None, code="invalid_value") from None
            raise
        found.check()
        return found

    def check(self) -> None:
        """Raise ApiError for unsupported parameters and values above the limits."""
        for name, (neutral, why) in self.unsupported.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
        for name in self.model_extra or ():
            if name not in self.unsupported and name not in self.ignored and name not in self.served:
                raise ApiError(400, f"unknown parameter: {name}", param=name, code="unknown_parameter")
        check_template((self.model_extra or {}).get("chat_template_kwargs"))
        check_sampling({"temperature": getattr(self, "temperature", None), **(self.model_extra or {})}, self.wanted)

    @property
    def wanted(self) -> int:
        """Number of completions requested."""
        return 1

    def passed(self) -> dict[str, Any]:
        """Return the parameters for vLLM."""
        dropped = {name for name in self.model_extra or () if name not in self.served}
        found = self.model_dump(exclude_unset=True, exclude=dropped)
        return {name: value for name, value in found.items() if value is not None}

    def _check_stops(self, stops: Sequence[str], param: str) -> None:
        if "" in stops:
            raise ApiError(400, "a stop string is empty", param=param)
        if len(stops) > _MOST_STOPS or max(map(len, stops), default=0) > _MOST_STOP_CHARACTERS:
            problem = f"at most {_MOST_STOPS} stop strings of at most {_MOST_STOP_CHARACTERS} characters are allowed"
            raise ApiError(400, problem, param=param)

    def _check_count(self, logprobs: int | None, param: str) -> None:
        if self.wanted > _MOST_COMPLETIONS:
            problem = f"the request asks for {self.wanted} completions, more than {_MOST_COMPLETIONS}"
            raise ApiError(400, problem, param=param)
        if logprobs is not None and self.wanted * (logprobs + 1) > _MOST_LOGPROBS:
            problem = f"all completions together may have {_MOST_LOGPROBS} logprobs per position; request fewer"
            raise ApiError(400, problem, param="logprobs")


class _Lenient(BaseModel):
    """Parts of messages; ignores unknown fields such as cache hints, which do not affect sampling."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Part(_Lenient):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(_Lenient):
    name: str
    arguments: str = ""


class _Call(_Lenient):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], _FIRST_ERROR] | None = None
    tool_calls: list[_Call] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    name: str | None = None


class _ToolFunction(_Lenient):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Lenient):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_SAMPLING = _names(
    "top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias "
    "stop_token_ids ignore_eos min_tokens bad_words allowed_token_ids structured_outputs "
    "include_stop_str_in_output skip_special_tokens return_token_ids"
)


class _OpenAI(Body):
    """Fields shared by chat completions and completions."""

    n: int | None = Field(None, ge=1, le=_MOST_COMPLETIONS)
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Annotated[list[str], _FIRST_ERROR] | None = None

    served: ClassVar = _SAMPLING
    unsupported: ClassVar = {
        **_refused("only text is supported", modalities=(["text"],), audio=()),
        **_refused("use tools", functions=([],), function_call=("none", "auto")),
        **_refused("use n", best_of=(1,)),
        **_refused(_NOT_THERE, prediction=(), web_search_options=(), verbosity=("medium",), moderation=()),
        **_refused(_NOT_THERE, suffix=("",)),
    }
    ignored: ClassVar = _names(
        "user metadata store service_tier safety_identifier stream_options prompt_cache_key "
        "prompt_cache_options prompt_cache_retention"
    )

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream to be true", param="stream_options")
        self._check_stops((self.stop,) if isinstance(self.stop, str) else self.stop or (), "stop")

    def passed(self) -> dict[str, Any]:
        found = super().passed()
        if isinstance(options := found.get("stream_options"), dict):
            options.pop("include_obfuscation", None)
        return found


class ChatBody(_OpenAI):
    """Body of a chat completion request."""

    messages: list[_Message] = Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[_Tool] | None = Field(None, max_length=_MOST_TOOLS, fail_fast=True)

    served: ClassVar = _SAMPLING | _names(
        "tool_choice parallel_tool_calls response_format reasoning_effort include_reasoning chat_template_kwargs"
    )

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs to be true", param="top_logprobs")
        self._check_count((self.top_logprobs or 0) if self.logprobs else None, "n")

    @property
    def wanted(self) -> int:
        return self.n or 1

    def passed(self) -> dict[str, Any]:
        found = super().passed()
        if not found.get("tools"):  # some clients always send an empty list and a tool_choice
            found.pop("tools", None)
            if found.get("tool_choice") in ("auto", "none"):
                del found["tool_choice"]
        return found


class CompletionBody(_OpenAI):
    """Body of a completion request."""

    prompt: (
        str
        | Annotated[list[int], _FIRST_ERROR]
        | Annotated[list[str], _FIRST_ERROR]
        | Annotated[list[Annotated[list[int], _FIRST_ERROR]], _FIRST_ERROR]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=_MOST_TOKENS)

    served: ClassVar = _SAMPLING | {"response_format"}

    def check(self) -> None:
        super().check()
        self._check_count(self.logprobs, "prompt")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 requires echo to be true", param="max_tokens")
        if self.stream and self.scores_prompt:
            raise ApiError(400, "prompt logprobs are not supported in a stream", param="stream")

    @property
    def scores_prompt(self) -> bool:
        """True if the response has logprobs of the prompt's tokens."""
        return self.prompt_logprobs is not None or bool(self.echo and self.logprobs is not None)

    @property
    def prompts(self) -> Sequence[Any]:
        """List of the prompts, also if there is only one."""
        several = bool(self.prompt) and isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]

    @property
    def wanted(self) -> int:
        return len(self.prompts) * (self.n or 1)


class ResponsesBody(Body):
    """Body of a Responses API request."""

    input: Annotated[list[dict[str, Any]], Field(max_length=_MOST_MESSAGES, fail_fast=True)] | str
    max_output_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, max_length=_MOST_TOOLS, fail_fast=True)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Annotated[list[str], _FIRST_ERROR] | None = None

    served: ClassVar = _SAMPLING - {"min_tokens", "bad_words", "allowed_token_ids", "return_token_ids"} | {
        *("include", "instructions", "parallel_tool_calls", "reasoning", "text", "tool_choice", "truncation"),
        *("include_reasoning", "chat_template_kwargs", "metadata", "max_tool_calls"),
    }
    unsupported: ClassVar = {
        **_refused("responses are not stored; send the whole input", previous_response_id=(), conversation=()),
        **_refused("responses are not stored", background=(False,)),
        **_refused(_NOT_THERE, prompt=(), context_management=([],), moderation=()),
    }
    ignored: ClassVar = _names(
        "user store service_tier safety_identifier stream_options prompt_cache_key prompt_cache_options "
        "prompt_cache_retention"
    )

    def check(self) -> None:
        super().check()
        self._check_stops((self.stop,) if isinstance(self.stop, str) else self.stop or (), "stop")
        for place, tool in enumerate(self.tools or ()):
            if tool.get("type") not in ("function", "custom"):
                problem = f"tools of type {str(tool.get('type'))[:100]!r} are not supported: agents run their own"
                raise ApiError(400, problem, param=f"tools.{place}")


class CountBody(Body):
    """Body of a request to Anthropic's API to count a prompt's tokens."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, max_length=_MOST_TOOLS, fail_fast=True)

    served: ClassVar = _names("system tool_choice thinking chat_template_kwargs output_config")
    unsupported: ClassVar = _refused(_NOT_THERE, context_management=({},), mcp_servers=([],), output_format=({},))
    ignored: ClassVar = _names("cache_control")

    def check(self) -> None:
        super().check()
        if self.messages[-1].get("role") == "assistant":
            raise ApiError(400, "the answer cannot be prefilled; end with a user message", param="messages")


class MessagesBody(CountBody):
    """Body of a message request to Anthropic's API."""

    max_tokens: int = Field(ge=1, le=_MOST_TOKENS)
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    temperature: float | None = Field(None, ge=0, le=1)

    served: ClassVar = CountBody.served | {"top_p", "top_k"}
    ignored: ClassVar = _names(
        "cache_control metadata service_tier container inference_geo speed user_profile_id workspace_id diagnostics"
    )

    def check(self) -> None:
        super().check()
        self._check_stops(self.stop_sequences or (), "stop_sequences")


def _lone_surrogate(body: bytes) -> str | None:
    """Return the path of a body's lone surrogate, such as "messages.0.content"; "" for a top-level string or key.

    None if there is none, or if the body is too long to search or not JSON.
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
