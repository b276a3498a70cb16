"""vLLM's server of OpenAI's and Anthropic's APIs, on the gateway's engine client and prompts. Imports vLLM."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicMessage,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.tokenizers.hf import get_cached_tokenizer

from forge_rl.gateway.backend import Backend
from forge_rl.gateway.call import CALL, Call
from forge_rl.gateway.constraints import ConstraintChecker
from forge_rl.gateway.engine_client import EngineClient
from forge_rl.gateway.errors import ApiError, invalid
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.gateway.prompt_renderer import PromptRenderer
from forge_rl.gateway.reading import Reader
from forge_rl.gateway.requests import (
    Body,
    ChatBody,
    CompletionBody,
    CountBody,
    MessagesBody,
    ResponsesBody,
)
from forge_rl.gateway.tools import ToolParser
from forge_rl.gateway.vllm_handlers import Chat, Completions, Messages, Responses
from forge_rl.tokens.tokenizer import Tokenizer

T = TypeVar("T")
_MOST_MESSAGE = 500
"""Maximum characters of a vLLM error message sent to a client."""
_CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError, KeyError, NotImplementedError, RecursionError)
"""Errors that vLLM raises for invalid requests."""


@dataclass(frozen=True)
class _Endpoint:
    body: type[Body]
    request: type[Any]
    serve: Callable[[Any], Awaitable[Any]]
    long: tuple[str, object] = ("messages", ())
    """Field that may be long, and a placeholder that passes vLLM's validation."""


class VLLMServer:
    """Answers requests with vLLM's handlers.

    Args:
        backend: decodes completions.
        tokenizer: the model's tokenizer.
        config: the gateway's config.
        reader: runs the work that grows with a request's length.
        parser: the tool parser, loaded.
        constraints: checks constraints on completions.
        replaced: called with the name of each sampling setting that a session's sampling replaces.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: GatewayConfig,
        reader: Reader,
        parser: ToolParser,
        constraints: ConstraintChecker,
        replaced: Callable[[str], None],
    ) -> None:
        # vLLM logs a trace of each client error; errors for the server's owner are raised by `answer`.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        self._reader = reader
        hf = get_cached_tokenizer(tokenizer.hf)
        model = SimpleNamespace(
            model=backend.model,
            max_model_len=backend.max_model_len,
            hf_config=SimpleNamespace(model_type=tokenizer.model_type),
            hf_text_config=SimpleNamespace(model_type=tokenizer.model_type),
            generation_config="vllm",
            override_generation_config={},
            get_diff_sampling_param=dict,
            multimodal_config=None,
            encoder_config=None,
            enable_prompt_embeds=False,
            is_encoder_decoder=False,
        )
        renderer = SimpleNamespace(tokenizer=hf, get_tokenizer=lambda: hf)
        client = EngineClient(backend, tokenizer, model, renderer, config.agent_sampling, constraints, replaced)
        names = {"tool_parser": parser.name, "reasoning_parser": config.reasoning_parser or None}
        shared = {"request_logger": None, "chat_template": hf.chat_template, "chat_template_content_format": "string"}
        online = PromptRenderer(
            model,
            renderer,
            **shared,
            **names,
            enable_auto_tools=True,
        )
        online.use(tokenizer, config, reader, parser, replaced)
        names["reasoning_parser"] = config.reasoning_parser
        given = {**shared, **names, "online_renderer": online, "enable_auto_tools": True}
        models = _Models()
        chat = Chat(client, models, "assistant", **given)
        messages = Messages(client, models, "assistant", **given)
        responses = Responses(client, models, **given)
        completions = Completions(client, models, online_renderer=online, request_logger=None)
        for handler in (chat, messages, responses, completions):
            handler.system_fingerprint = None
            handler.forge_rl_tokenizer = tokenizer
        chat.parser_cls = messages.parser_cls = responses.parser = parser.cls
        self._messages = messages
        self._endpoints = {
            "/v1/chat/completions": _Endpoint(ChatBody, ChatCompletionRequest, chat.create_chat_completion),
            "/v1/completions": _Endpoint(
                CompletionBody, CompletionRequest, completions.create_completion, ("prompt", "-")
            ),
            "/v1/responses": _Endpoint(ResponsesBody, ResponsesRequest, responses.create_responses, ("input", ())),
            "/v1/messages": _Endpoint(MessagesBody, AnthropicMessagesRequest, messages.create_messages),
            "/v1/messages/count_tokens": _Endpoint(CountBody, AnthropicCountTokensRequest, messages.count_tokens),
        }

    async def read(self, path: str, body: bytes, call: Call, check_model: Callable[[str], str]) -> Any:
        """Parse a request's body; return vLLM's request, and set the call's fields.

        Raises:
            ValidationError: the body is not JSON, or a field is wrong.
            ApiError: a parameter is unsupported or exceeds a limit.
        """
        endpoint = self._endpoints[path]

        def read(body: bytes) -> Any:
            asked = endpoint.body.read(body)
            call.model = check_model(asked.model)
            call.streamed, call.wanted = bool(asked.stream), asked.wanted
            call.counted = path.endswith("/count_tokens")
            given = asked.passed()
            # vLLM accepts fewer stop strings than `asked`, which has checked them. Long fields skip vLLM's validation
            # of the whole request, which holds the GIL.
            stop = given.pop("stop_sequences", None) or given.pop("stop", None)
            name, placeholder = endpoint.long
            long = given.pop(name)
            request = chat = endpoint.request.model_validate({**given, name: placeholder})
            if isinstance(asked, ResponsesBody):
                call.converted = long
            elif isinstance(asked, CountBody):
                request.messages = list(_checked(long))
                chat = call.converted = self._messages.convert(request)
            else:
                setattr(request, name, long)
            chat.stop = [stop] if isinstance(stop, str) else stop or []
            return request

        call.body_bytes = len(body)
        with _as_client_errors():
            return await self._reader.read(body, read)

    async def answer(self, path: str, request: Any, call: Call) -> Any:
        """Return a request's answer: an async generator of stream events, or a whole response.

        Raises:
            ApiError: the request cannot be answered.
            ForgeError: the engines failed.
        """
        try:
            with _as_client_errors(call):
                answer = await self._endpoints[path].serve(request)
        except BaseException:
            if call.failure is not None:
                raise call.failure from None
            raise
        if call.failure is not None:
            raise call.failure
        if isinstance(answer, ErrorResponse):
            told = answer.error
            raise ApiError(int(told.code), told.message[:_MOST_MESSAGE], param=told.param)
        if isinstance(answer, AsyncGenerator):
            return _convert_stream_to_sse_events(answer) if path == "/v1/responses" else answer
        return _shown(answer, call)


def _checked(messages: Sequence[Mapping[str, Any]]) -> Iterator[AnthropicMessage]:
    """Validate messages of Anthropic's API, block by block."""

    def check(kind: type[BaseModel], given: object, *at: str | int) -> Any:
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise invalid(error, "messages", *at) from None

    for place, given in enumerate(messages):
        blocks = given.get("content")
        if not isinstance(blocks, list):
            yield check(AnthropicMessage, given, place)
            continue
        message = check(AnthropicMessage, {**given, "content": []}, place)
        message.content = [
            check(AnthropicContentBlock, block, place, "content", index) for index, block in enumerate(blocks)
        ]
        yield message.validate_tool_change_role()


class _as_client_errors:
    """Converts vLLM's errors on invalid requests to ApiError; engines' errors pass through."""

    def __init__(self, call: Call | None = None) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_ours = isinstance(error, ApiError | ValidationError) or (self._call is not None and self._call.started)
        if isinstance(error, _CLIENT_ERRORS) and not is_ours:
            param, text = getattr(error, "parameter", None), str((*error.args, "")[0])[:_MOST_MESSAGE]
            raise ApiError(400, text, param=param, code="invalid_value" if param else None) from error


class _Models:
    """The model registry of vLLM's handlers; requests' models are checked before they get here."""

    lora_requests: Mapping[str, object] = {}
    base_model_paths: Sequence[object] = ()

    def is_base_model(self, name: str) -> bool:
        """Return True, as other names never get here."""
        return True

    def model_name(self, lora_request: object = None) -> str:
        """Return the model's name as the client wrote it."""
        return CALL.get().model


def _shown(response: Any, call: Call) -> dict[str, Any]:
    """Return a response as a JSON-serializable dict."""
    shown: dict[str, Any]
    name = type(response).__name__
    if name in ("ChatCompletionResponse", "CompletionResponse"):
        response.system_fingerprint = f"weights-{call.version}" if call.version >= 0 else None
        shown = response.model_dump(exclude={"choices": {"__all__": {"logprobs"}}})
        for entry, choice in zip(shown["choices"], response.choices, strict=True):
            entry["logprobs"] = dict(choice.logprobs) if choice.logprobs is not None else None
    elif name == "ResponsesResponse":
        shown = response.model_dump(mode="json", by_alias=True)
    else:
        shown = response.model_dump(exclude_none=True)
    return shown
