"""vLLM's own server of OpenAI's and Anthropic's APIs, over an engine client and prompts of ours. Imports vLLM."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicMessage,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs, ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_tool_dicts
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.renderers.online_renderer import OnlineRenderer, ResponsesRenderResult
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.call import CALL, Call
from forge_rl.gateway.chat import ChatMessage, Prompt, PromptBuilder
from forge_rl.gateway.completion import TokenLogprob
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.engine_client import EngineClient
from forge_rl.gateway.errors import ApiError, invalid
from forge_rl.gateway.json_text import LazyList
from forge_rl.gateway.reading import Reader
from forge_rl.gateway.requests import (
    Body,
    ChatBody,
    CompletionBody,
    CountBody,
    MessagesBody,
    ResponsesBody,
    template_settings,
)
from forge_rl.gateway.responses_input import to_messages
from forge_rl.gateway.tools import ToolParser, read_calls

T = TypeVar("T")
_MOST_MESSAGE = 500
"""Characters of an error of vLLM's that a client is sent."""
_CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError, KeyError, NotImplementedError, RecursionError)
"""Errors that vLLM raises for what a client asks."""


@dataclass(frozen=True)
class _Endpoint:
    body: type[Body]
    request: type[Any]
    serve: Callable[[Any], Awaitable[Any]]
    long: tuple[str, object] = ("messages", ())
    """Field that may be long, and a value that vLLM's check takes in its place."""


class VLLMServer:
    """Answers requests by vLLM's handlers.

    Args:
        backend: decodes.
        tokenizer: the model's tokenizer.
        config: the gateway's config.
        reader: does what grows with a request's length.
        parser: the parser of tool calls, loaded.
        replaced: called with the name of each sampling setting that a session's replaced.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: GatewayConfig,
        reader: Reader,
        parser: ToolParser,
        replaced: Callable[[str], None],
    ) -> None:
        # It logs each error, with a trace, that its client is told; what is ours to see comes out of `answer`.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        self._reader = reader
        hf = get_cached_tokenizer(tokenizer.hf)
        model = SimpleNamespace(
            model=backend.model,
            max_model_len=backend.max_model_tokens,
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
        client = EngineClient(backend, tokenizer, model, renderer, config.agent_sampling, replaced)
        names = {"tool_parser": parser.name, "reasoning_parser": config.reasoning_parser or None}
        shared = {"request_logger": None, "chat_template": hf.chat_template, "chat_template_content_format": "string"}
        online = _Renderer(
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
        chat = _Chat(client, models, "assistant", **given)
        messages = _Messages(client, models, "assistant", **given)
        responses = _Responses(client, models, **given)
        completions = _Completions(client, models, online_renderer=online, request_logger=None)
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
        """Read the body of a request; returns vLLM's, and notes in the call what it asks for.

        Raises:
            ValidationError: it is not JSON, or a field is wrong.
            ApiError: it asks for what is not supported, or for too much.
        """
        endpoint = self._endpoints[path]

        def read(body: bytes) -> Any:
            asked = endpoint.body.read(body)
            call.model = check_model(asked.model)
            call.streamed, call.wanted = bool(asked.stream), asked.wanted
            call.counted = path.endswith("/count_tokens")
            given = asked.passed()
            # vLLM takes fewer stop texts than are checked already. What is long is kept from its check of the whole,
            # in which no other thread runs.
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
        """Answer a request: with the events of a stream, as an async generator, or with a whole response.

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
    """Check messages of Anthropic's API, block by block."""

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
    """Make errors of vLLM's for what a client asks those of our API; an engine's pass."""

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
    """What vLLM's handlers ask about models: each request's is checked before."""

    lora_requests: Mapping[str, object] = {}
    base_model_paths: Sequence[object] = ()

    def is_base_model(self, name: str) -> bool:
        """Return True: no other reaches it."""
        return True

    def model_name(self, lora_request: object = None) -> str:
        """Return the name that the client knows the model by."""
        return CALL.get().model


class _Renderer(OnlineRenderer):
    """Makes prompts in which recorded turns keep their tokens, and text is never a control token."""

    def use(
        self,
        tokenizer: Tokenizer,
        config: GatewayConfig,
        reader: Reader,
        parser: ToolParser,
        replaced: Callable[[str], None],
    ) -> None:
        self.parser = parser.cls
        self._tokenizer, self._config, self._reader, self._replaced = tokenizer, config, reader, replaced
        self._builder = PromptBuilder(tokenizer, parser.name)

    async def render_chat(self, request: Any, **_: object) -> Any:
        return await self._beside(super().render_chat(request))

    async def render_completion(self, request: Any, **_: object) -> Any:
        return await self._beside(super().render_completion(request))

    async def render_responses(self, request: Any, **given: Any) -> Any:
        return await self._beside(self._render_responses(request, given))

    async def _render_responses(self, request: Any, given: dict[str, Any]) -> Any:
        asked = CALL.get().converted
        if self.use_harmony:
            request.input = asked
            return await super().render_responses(ResponsesRequest.model_validate(request.model_dump()), **given)
        messages = to_messages(request.instructions, asked)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        settings = self.effective_chat_template_kwargs(request)
        _, (engine_input,) = await self.preprocess_chat(
            request, messages, self.chat_template, "string", settings, tools, self.parser
        )
        return ResponsesRenderResult(messages=messages, engine_input=engine_input)

    async def _beside(self, render: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for nothing, beside the event loop if the request is long."""
        return await self._reader.run(CALL.get().body_bytes, partial(_finish, render))

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: type[Any] | None = None,
        **_: object,
    ) -> tuple[list[Any], list[Any]]:
        call = CALL.get()
        session, param = call.session, "input" if isinstance(request, ResponsesRequest) else "messages"
        tools = [_pruned(tool) for tool in tool_dicts or ()]
        found = [ChatMessage.read(message, f"{param}.{place}") for place, message in enumerate(messages)]
        texts = [json.dumps(tools, ensure_ascii=False)] if tools else []
        for message in found:
            texts += [message.content, *(each.arguments for each in message.calls)]
        self._reader.check_room(max(len(found), 1), param)
        self._reader.check_room("\n".join(texts), param)
        params = request.build_chat_params(default_template, default_template_content_format)
        settings = template_settings(params.chat_template_kwargs)
        prompt = self._builder.chat(found, tools, session, settings)
        if not call.counted:
            self._check_completion(call, prompt, request)
        is_free = request.tool_choice in ("auto", "none", None)
        if tools and session is not None and not is_free and self._config.agent_sampling == "replaced":
            request.tool_choice = "auto"
            self._replaced("tool_choice")
        elif not is_free:
            _force_arguments(request.tools)
        reads = None
        if parser is not None and (tools or parser.reasoning_parser_cls is not None):
            made = parser(
                self.renderer.tokenizer,
                request.tools,
                model_config=self.model_config,
                chat_template_kwargs=params.chat_template_kwargs,
            )
            if request.tool_choice != "none" or parser.reasoning_parser_cls is not None:
                made.adjust_request(request)
            reads = partial(read_calls, made, request)
        return [], [_engine_input(prompt, reads=reads, temperature=request.temperature)]

    async def preprocess_completion(
        self, request: Any, prompt_input: Any, prompt_embeds: object, **_: object
    ) -> list[Any]:
        call = CALL.get()
        several = bool(prompt_input) and isinstance(prompt_input, list) and not isinstance(prompt_input[0], int)
        found = []
        for given in prompt_input if several else [prompt_input]:
            self._reader.check_room(given if isinstance(given, str) else len(given), "prompt")
            prompt = self._builder.completion(given, call.session)
            size = self._tokenizer.vocab_size
            if not len(prompt.token_ids):
                raise ApiError(400, "the prompt is empty", param="prompt")
            if prompt.token_ids.min() < 0 or prompt.token_ids.max() >= size:
                raise ApiError(400, f"token ids go from 0 to {size - 1}", param="prompt")
            self._check_completion(call, prompt, request)
            text = given if isinstance(given, str) else None
            if request.echo and text is None:
                text = self._tokenizer.decode(prompt.token_ids, skip_special=False)
            found.append(_engine_input(prompt, text=text, temperature=request.temperature))
        return found

    def _check_completion(self, call: Call, prompt: Prompt, request: Any) -> None:
        named = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        asked = next((value for name in named if (value := getattr(request, name, None)) is not None), None)
        param = {ResponsesRequest: "input", CompletionRequest: "prompt"}.get(type(request), "messages")
        self._reader.check_completion(len(prompt.token_ids), asked, param, cut=call.session is not None)


class _Logprobs:
    """Lists of logprobs in the form of each API, made as they are written where a response is whole."""

    forge_rl_tokenizer: Tokenizer

    def _create_chat_logprobs(
        self, token_ids: object, top_logprobs: Sequence[TokenLogprob], *_: object, **__: object
    ) -> ChatCompletionLogProbs:
        def entries() -> Iterator[dict[str, object]]:
            for entry in top_logprobs:
                top = [self._one(*pair) for pair in entry.top]
                yield {**self._one(entry.token, entry.logprob), "top_logprobs": top}

        if CALL.get().streamed:
            return ChatCompletionLogProbs(content=list(entries()))
        return ChatCompletionLogProbs.model_construct(content=_listed(entries, len(top_logprobs)))

    def _create_completion_logprobs(
        self,
        token_ids: object,
        top_logprobs: Sequence[TokenLogprob],
        *_: object,
        initial_text_offset: int = 0,
        **__: object,
    ) -> CompletionLogProbs:
        def likeliest() -> Iterator[dict[str, float]]:
            for entry in top_logprobs:
                pairs = (*entry.top, (entry.token, entry.logprob))
                yield {self._token(token): logprob for token, logprob in pairs}

        texts = [self._token(entry.token) for entry in top_logprobs]
        offsets = [initial_text_offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return CompletionLogProbs.model_construct(
            text_offset=offsets[:-1],
            token_logprobs=[entry.logprob for entry in top_logprobs],
            tokens=texts,
            top_logprobs=_listed(likeliest, len(top_logprobs)),
        )

    def _one(self, token: int, logprob: float) -> dict[str, object]:
        raw = list(self.forge_rl_tokenizer.token_bytes(token))
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}

    def _token(self, token: int) -> str:
        return self.forge_rl_tokenizer.decode([token], skip_special=False)


class _Chat(_Logprobs, OpenAIServingChat):
    """vLLM's chat completions."""


class _Completions(_Logprobs, OpenAIServingCompletion):
    """vLLM's completions."""


class _Messages(_Logprobs, AnthropicServingMessages):
    """vLLM's messages of Anthropic's API."""

    def convert(self, request: Any) -> Any:
        """Make the chat request of a request, which may be long."""
        return AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=self._merge_inline_system
        )

    @classmethod
    def _build_base_request(cls, anthropic_request: Any, openai_messages: list[Any]) -> Any:
        request = super()._build_base_request(anthropic_request, [])
        request.messages = openai_messages  # as they are: vLLM's types for them are slow
        return request

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **given: Any) -> Any:
        return CALL.get().converted

    def messages_full_converter(self, generator: Any) -> Any:
        for call in generator.choices[0].message.tool_calls:
            # What the model wrote may be no object, which it must be here.
            try:
                good = isinstance(json.loads(call.function.arguments), dict)
            except (ValueError, RecursionError):
                good = False
            if not good:
                call.function.arguments = "{}"
        return super().messages_full_converter(generator)


class _Responses(OpenAIServingResponses):
    """vLLM's responses."""

    forge_rl_tokenizer: Tokenizer

    def _create_response_logprobs(
        self, token_ids: object, logprobs: Sequence[TokenLogprob], tokenizer: object, top_logprobs: int | None = None
    ) -> Any:
        def known(token: int, logprob: float) -> Logprob:
            return Logprob(logprob, decoded_token=self.forge_rl_tokenizer.decode([token], skip_special=False))

        ids = [entry.token for entry in logprobs]
        found = [
            {**{token: known(token, each) for token, each in entry.top}, entry.token: known(entry.token, entry.logprob)}
            for entry in logprobs
        ]
        return super()._create_response_logprobs(ids, found, tokenizer, top_logprobs)


def _engine_input(
    prompt: Prompt, *, reads: Any = None, text: str | None = None, temperature: float | None = None
) -> dict[str, Any]:
    found = dict(tokens_input(prompt.token_ids.tolist(), prompt=text))
    made = Prompt(
        token_ids=prompt.token_ids, digest=prompt.digest, text=prompt.text, reads=reads, asked_temperature=temperature
    )
    return {**found, "forge_rl": made}


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("it waits for something")


def _pruned(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without what is None, as it was sent."""
    function = {name: value for name, value in tool.get("function", {}).items() if value is not None}
    return {**{name: value for name, value in tool.items() if value is not None}, "function": function}


def _force_arguments(tools: Sequence[Any] | None) -> None:
    """Hold forced calls to their tools' schemas, unless a tool says otherwise: small models write other arguments."""
    for tool in tools or ():
        function = getattr(tool, "function", tool)
        schema = getattr(function, "parameters", None)
        is_open = getattr(function, "strict", False) is None and isinstance(schema, dict)
        if is_open and not has_xgrammar_unsupported_json_features(schema):
            function.strict = True


def _listed(make: Callable[[], Iterator[T]], count: int) -> list[T]:
    """Make a list, as it is written where a response is whole: it may be long."""
    return LazyList(make()) if count and not CALL.get().streamed else list(make())  # type: ignore[return-value]


def _shown(response: Any, call: Call) -> dict[str, Any]:
    """Return a response as JSON takes it."""
    name = type(response).__name__
    if name in ("ChatCompletionResponse", "CompletionResponse"):
        response.system_fingerprint = f"weights-{call.version}" if call.version >= 0 else None
        shown: dict[str, Any] = response.model_dump(exclude={"choices": {"__all__": {"logprobs"}}})
        for entry, choice in zip(shown["choices"], response.choices, strict=True):
            entry["logprobs"] = dict(choice.logprobs) if choice.logprobs is not None else None
        return shown
    if name == "ResponsesResponse":
        return response.model_dump(mode="json", by_alias=True)
    return response.model_dump(exclude_none=True)
