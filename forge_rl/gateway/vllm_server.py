"""vLLM's server of OpenAI's and Anthropic's APIs, on the gateway's engine client and prompts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ValidationError

from forge_rl.gateway import vllm_internals as vllm
from forge_rl.gateway.engine_client import EngineClient
from forge_rl.gateway.errors import ApiError, invalid
from forge_rl.gateway.prompt_renderer import PromptRenderer
from forge_rl.gateway.request_state import REQUEST, RequestState
from forge_rl.gateway.requests import Api
from forge_rl.gateway.shared import GatewayContext
from forge_rl.gateway.vllm_handlers import AnthropicHandler, ChatHandler, CompletionHandler, ResponsesHandler

_MOST_MESSAGE = 500
"""Maximum characters of a vLLM error message sent to a client."""
_CLIENT_ERRORS = (vllm.VLLMClientError, ValueError, TypeError, KeyError, NotImplementedError, RecursionError)
"""Errors that vLLM raises for invalid requests."""
_SAMPLING = (
    "top_p top_k frequency_penalty presence_penalty repetition_penalty min_p logit_bias stop_token_ids ignore_eos "
    "structured_outputs include_stop_str_in_output skip_special_tokens seed stop temperature "
)
_OPENAI = (
    f"{_SAMPLING} n stream_options max_tokens logprobs min_tokens bad_words allowed_token_ids return_token_ids "
    "response_format "
)
_ANTHROPIC = "system tools tool_choice thinking chat_template_kwargs output_config "
APIS = {
    "/v1/chat/completions": Api(
        vllm.ChatCompletionRequest,
        "messages",
        f"{_OPENAI} max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort "
        "include_reasoning chat_template_kwargs",
    ),
    "/v1/completions": Api(vllm.CompletionRequest, "prompt", f"{_OPENAI} prompt_logprobs echo"),
    "/v1/responses": Api(
        vllm.ResponsesRequest,
        "input",
        f"{_SAMPLING} include instructions parallel_tool_calls reasoning text tools tool_choice truncation "
        "include_reasoning chat_template_kwargs metadata max_tool_calls max_output_tokens top_logprobs",
    ),
    "/v1/messages": Api(
        vllm.AnthropicMessagesRequest,
        "messages",
        f"{_ANTHROPIC} max_tokens stop_sequences temperature top_p top_k",
        hottest=1,
    ),
    "/v1/messages/count_tokens": Api(vllm.AnthropicCountTokensRequest, "messages", _ANTHROPIC),
}


class VLLMServer:
    """Answers requests with vLLM's handlers."""

    def __init__(self, shared: GatewayContext) -> None:
        tokenizer, parser = shared.tokenizer, shared.parser.cls
        # vLLM logs a trace of each client error; errors for the server's owner are raised by `answer`.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        self._reader = shared.reader
        hf = vllm.get_cached_tokenizer(tokenizer.hf)
        # The attributes of vLLM's ModelConfig that its handlers read.
        model = SimpleNamespace(
            model=shared.backend.model,
            max_model_len=shared.backend.max_model_len,
            hf_config=SimpleNamespace(model_type=""),  # gpt-oss too has its prompts from its own template
            hf_text_config=SimpleNamespace(model_type=""),
            # No sampling defaults from the model's generation_config.json.
            generation_config="vllm",
            override_generation_config={},
            get_diff_sampling_param=dict,
            multimodal_config=None,
            encoder_config=None,
            enable_prompt_embeds=False,
            is_encoder_decoder=False,
        )
        renderer = SimpleNamespace(tokenizer=hf, get_tokenizer=lambda: hf)
        client = EngineClient(shared, model, renderer)
        online = PromptRenderer(shared, model, renderer)
        handler_options = {
            "online_renderer": online,
            "request_logger": None,
            "chat_template": hf.chat_template,
            "chat_template_content_format": "string",
            "reasoning_parser": shared.parser.reasoning,
            "enable_auto_tools": True,
        }
        models = _Models()
        chat = ChatHandler(client, models, "assistant", **handler_options)
        messages = AnthropicHandler(client, models, "assistant", **handler_options)
        responses = ResponsesHandler(client, models, **handler_options)
        completions = CompletionHandler(client, models, online_renderer=online, request_logger=None)
        for handler in (chat, messages, responses, completions):
            handler.system_fingerprint = None
            handler.forge_rl_tokenizer = tokenizer
        chat.parser_cls = messages.parser_cls = responses.parser = parser
        self._convert = messages.convert
        self._handlers: Mapping[str, Callable[[Any], Awaitable[Any]]] = {
            "/v1/chat/completions": chat.create_chat_completion,
            "/v1/completions": completions.create_completion,
            "/v1/responses": responses.create_responses,
            "/v1/messages": messages.create_messages,
            "/v1/messages/count_tokens": messages.count_tokens,
        }

    async def read(self, path: str, body: bytes, state: RequestState, check_model: Callable[[str], str]) -> Any:
        """Parse a request's body; return vLLM's request, and set the state's fields.

        Args:
            check_model: returns the adapter that a model's name stands for, "" for none.

        Raises:
            ApiError: the body is not JSON, or a parameter is wrong, unsupported or exceeds a limit.
        """

        def read(body: bytes) -> Any:
            parsed = APIS[path].read(body)
            request = chat = parsed.vllm
            state.adapter = check_model(request.model)
            state.model, state.param = request.model, APIS[path].text
            state.streamed, state.num_completions = bool(getattr(request, "stream", False)), parsed.num_completions
            state.only_counts = path.endswith("/count_tokens")
            if path.startswith("/v1/messages"):
                request.messages = list(_checked(parsed.text))
                chat = state.converted = self._convert(request)
            elif path == "/v1/responses":
                state.converted = parsed.text
            else:
                setattr(request, state.param, parsed.text)
            # Set after validation, as vLLM's models take fewer stop strings.
            chat.stop = parsed.stop
            return request

        state.body_bytes = len(body)
        with _as_client_errors(state):
            return await self._reader.read(body, read)

    async def answer(self, path: str, request: Any, state: RequestState) -> Any:
        """Return a request's answer: an async generator of stream events, or a whole response.

        Raises:
            ApiError: the request cannot be answered.
            ForgeError: the engines failed.
        """
        try:
            with _as_client_errors(state):
                answer = await self._handlers[path](request)
        except BaseException:
            # The engines' error, not what vLLM's handler has made of it.
            if state.failure is not None:
                raise state.failure from None
            raise
        if state.failure is not None:
            raise state.failure
        if isinstance(answer, vllm.ErrorResponse):
            error = answer.error
            raise ApiError(int(error.code), error.message[:_MOST_MESSAGE], param=error.param)
        if isinstance(answer, AsyncGenerator):
            return vllm._convert_stream_to_sse_events(answer) if path == "/v1/responses" else answer
        return _shown(answer, state)


def _checked(messages: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Validate messages of Anthropic's API, block by block."""
    if messages[-1].get("role") == "assistant":
        raise ApiError(400, "the answer cannot be prefilled; end with a user message", param="messages")
    for index, raw_message in enumerate(messages):
        path, blocks = f"messages.{index}", raw_message.get("content")
        if not isinstance(blocks, list):
            yield _validated(vllm.AnthropicMessage, raw_message, path)
            continue
        message = _validated(vllm.AnthropicMessage, {**raw_message, "content": []}, path)
        message.content = [
            _validated(vllm.AnthropicContentBlock, block, f"{path}.content.{index}")
            for index, block in enumerate(blocks)
        ]
        yield message.validate_tool_change_role()


def _validated(kind: type[BaseModel], value: object, path: str) -> Any:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(error, path) from None


@contextlib.contextmanager
def _as_client_errors(state: RequestState) -> Iterator[None]:
    """Convert vLLM's errors on invalid requests to ApiError; once an engine has answered, errors are its own."""
    try:
        yield
    except ApiError:
        raise
    except _CLIENT_ERRORS as error:
        if state.started:
            raise
        if isinstance(error, ValidationError):
            raise invalid(error) from None
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
        return REQUEST.get().model


def _shown(response: Any, state: RequestState) -> dict[str, Any]:
    """Return a response as a JSON-serializable dict."""
    body: dict[str, Any]
    name = type(response).__name__
    if name in ("ChatCompletionResponse", "CompletionResponse"):
        response.system_fingerprint = f"weights-{state.version}" if state.version >= 0 else None
        # Logprobs may be functions, made when the response is encoded; a dump would try to serialize them.
        body = response.model_dump(exclude={"choices": {"__all__": {"logprobs"}}})
        for entry, choice in zip(body["choices"], response.choices, strict=True):
            entry["logprobs"] = dict(choice.logprobs) if choice.logprobs is not None else None
    elif name == "ResponsesResponse":
        body = response.model_dump(mode="json", by_alias=True)
    else:
        body = response.model_dump(exclude_none=True)
    return body
