"""Builds prompts for vLLM's handlers, in which recorded turns keep their tokens."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from forge_rl.gateway import vllm_internals as vllm
from forge_rl.gateway.chat import ChatMessage, Prompt, PromptBuilder, response_messages
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.request_state import REQUEST, RequestState
from forge_rl.gateway.requests import scores_prompt, template_settings
from forge_rl.gateway.shared import GatewayContext
from forge_rl.services.policy_backend import most_scored_tokens
from forge_rl.tokens.tool_parsers import read_calls

T = TypeVar("T")


class PromptRenderer(vllm.OnlineRenderer):
    """Builds prompts in which recorded turns keep their tokens, and text is never parsed as control tokens."""

    def __init__(self, shared: GatewayContext, model_config: Any, renderer: Any) -> None:
        super().__init__(
            model_config,
            renderer,
            request_logger=None,
            chat_template=renderer.tokenizer.chat_template,
            chat_template_content_format="string",
            enable_auto_tools=True,
        )
        self.parser = shared.parser.cls
        self._shared = shared
        self._tokenizer, self._reader = shared.tokenizer, shared.reader
        self._builder = PromptBuilder(shared.tokenizer, shared.parser.name)

    async def render_chat(self, request: Any, **_: object) -> Any:
        return await self._beside(super().render_chat(request))

    async def render_completion(self, request: Any, **_: object) -> Any:
        return await self._beside(super().render_completion(request))

    async def render_responses(self, request: Any, **_: object) -> Any:
        return await self._beside(self._render_responses(request))

    async def _render_responses(self, request: Any) -> Any:
        messages = response_messages(request.instructions, REQUEST.get().converted)
        tools = vllm.construct_tool_dicts(request.tools, request.tool_choice)
        settings = self.effective_chat_template_kwargs(request)
        _, (engine_input,) = await self.preprocess_chat(
            request, messages, self.chat_template, "string", settings, tools, self.parser
        )
        return vllm.ResponsesRenderResult(messages=messages, engine_input=engine_input)

    async def _beside(self, render: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that never waits, in the reader's thread if the request is long."""
        return await self._reader.run(REQUEST.get().body_bytes, partial(_finish, render))

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
        state = REQUEST.get()
        session, param = state.session, state.param
        tools = [_pruned(tool) for tool in tool_dicts or ()]
        chat_messages = [ChatMessage.read(message, f"{param}.{index}") for index, message in enumerate(messages)]
        texts = [json.dumps(tools, ensure_ascii=False)] if tools else []
        for message in chat_messages:
            texts += [message.content, *(call.arguments for call in message.calls)]
        # A message has at least one token. Both checks are cheap, and come before anything is rendered.
        self._reader.check_room(max(len(chat_messages), 1), param)
        self._reader.check_room("\n".join(texts), param)
        params = request.build_chat_params(default_template, default_template_content_format)
        settings = template_settings(params.chat_template_kwargs)
        template_args = self._tokenizer.template_args | settings
        prompt = self._builder.chat(chat_messages, tools, session, settings)
        if not state.only_counts:
            self._check_completion(state, prompt, request)
        is_free = request.tool_choice in ("auto", "none", None)
        # A forced call is sampled under a constraint, which training does not assume.
        if tools and session is not None and not is_free and self._shared.config.agent_sampling == "replaced":
            request.tool_choice = "auto"
            self._shared.replaced("tool_choice")
        elif not is_free:
            _force_arguments(request.tools)
        # The parser that writes the response also reads the recorded turn, so that what clients send back has its
        # digest.
        reads = None
        if parser is not None and (tools or parser.reasoning_parser_cls is not None):
            parser_instance = parser(
                self.renderer.tokenizer,
                request.tools,
                model_config=self.model_config,
                chat_template_kwargs=params.chat_template_kwargs | template_args,
            )
            # Parsers change requests, such as to keep the special tokens that they read.
            if request.tool_choice != "none" or parser.reasoning_parser_cls is not None:
                parser_instance.adjust_request(request)
            parser_instance.set_prompt_token_ids(prompt.token_ids)
            reads = partial(read_calls, parser_instance, request)
        return [], [_engine_input(replace(prompt, reads=reads), request)]

    async def preprocess_completion(
        self, request: Any, prompt_input: Any, prompt_embeds: object, **_: object
    ) -> list[Any]:
        state, engine_inputs = REQUEST.get(), []
        for raw_prompt in prompt_input:
            self._reader.check_room(raw_prompt if isinstance(raw_prompt, str) else len(raw_prompt), "prompt")
            prompt = self._builder.completion(raw_prompt, state.session)
            size = self._tokenizer.vocab_size
            if not len(prompt.token_ids):
                raise ApiError(400, "the prompt is empty", param="prompt")
            # Clients choose these ids, and an engine would use them as indices.
            if prompt.token_ids.min() < 0 or prompt.token_ids.max() >= size:
                raise ApiError(400, f"token ids must be from 0 to {size - 1}", param="prompt")
            self._check_completion(state, prompt, request)
            if scores_prompt(request):
                self._check_scored(state, prompt)
            text = raw_prompt if isinstance(raw_prompt, str) else None
            if request.echo and text is None:
                text = self._tokenizer.decode(prompt.token_ids, skip_special=False)
            engine_inputs.append(_engine_input(prompt, request, text))
        return engine_inputs

    def _check_scored(self, state: RequestState, prompt: Prompt) -> None:
        """Raise ApiError for prompt logprobs whose logits would not fit an engine's memory, or in a session."""
        if state.session is not None:
            raise ApiError(400, "prompt logprobs are not supported in an agent's session", param="prompt_logprobs")
        count, max_tokens = len(prompt.token_ids), most_scored_tokens(self._tokenizer.vocab_size)
        if count > max_tokens:
            raise ApiError(
                400, f"the prompt has {count} tokens; at most {max_tokens} can have logprobs", param="prompt"
            )

    def _check_completion(self, state: RequestState, prompt: Prompt, request: Any) -> None:
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        max_tokens = next((value for name in names if (value := getattr(request, name, None)) is not None), None)
        self._reader.check_completion(
            len(prompt.token_ids), max_tokens, state.param, may_truncate=state.session is not None
        )


def _engine_input(prompt: Prompt, request: Any, text: str | None = None) -> dict[str, Any]:
    """Return vLLM's input for a prompt; `text` is echoed, if that is requested."""
    engine_input = dict(vllm.tokens_input(prompt.token_ids.tolist(), prompt=text))
    # vLLM's handlers pass the input on to `EngineClient.generate` with this key in it.
    return {**engine_input, "forge_rl": replace(prompt, asked_temperature=request.temperature)}


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise AssertionError("the coroutine waits")


def _pruned(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without None fields, as the client sent it."""
    function = {name: value for name, value in tool.get("function", {}).items() if value is not None}
    return {**{name: value for name, value in tool.items() if value is not None}, "function": function}


def _force_arguments(tools: Sequence[Any] | None) -> None:
    """Constrain forced calls to their tools' schemas, unless `strict` is set: small models write other arguments."""
    for tool in tools or ():
        function = getattr(tool, "function", tool)
        schema = getattr(function, "parameters", None)
        is_open = getattr(function, "strict", False) is None and isinstance(schema, dict)
        if is_open and not vllm.has_xgrammar_unsupported_json_features(schema):
            function.strict = True
