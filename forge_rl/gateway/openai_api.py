"""OpenAI's chat completions and completions: reads requests and writes responses."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from forge_rl.gateway.choices import Choice, ChoiceDelta, TokenLogprob
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.openai_requests import ChatRequest, Common, CompletionRequest, to_chat
from forge_rl.gateway.request_builder import RequestBuilder, SamplingRequest
from forge_rl.gateway.response import ApiResponse
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.wire import encode


async def chat(body: bytes, builder: RequestBuilder, session: Session | None) -> ApiResponse:
    """Read a request of chat completions.

    Raises:
        ValidationError, ApiError, ForgeError: the request is wrong.
    """
    request = ChatRequest.model_validate_json(body)
    model = builder.check_model(request.model)
    request.check()
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs wants logprobs to be true", param="top_logprobs")
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    messages = [to_chat(message, at) for at, message in enumerate(request.messages)]
    requested = SamplingRequest(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop=request.stops,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        parallel_calls=request.parallel_tool_calls is not False,
    )
    prompt = await builder.prompt_builder.chat(messages, tools, session)
    called = tools if request.tool_choice != "none" else []
    choices = await builder.choices([prompt], request.n or 1, requested, session, called)
    return ChatResponse(choices, request, builder, model)


async def completion(body: bytes, builder: RequestBuilder, session: Session | None) -> ApiResponse:
    """Read a request of completions.

    Raises:
        ValidationError, ApiError, ForgeError: the request is wrong.
    """
    request = CompletionRequest.model_validate_json(body)
    model = builder.check_model(request.model)
    request.check()
    given = request.prompt
    several = bool(given) and isinstance(given, list) and not isinstance(given[0], int)
    texts: Sequence[Any] = given if several else [given]
    if len(texts) * (request.n or 1) > 2048:
        raise ApiError(400, "more than 2048 completions in one request", param="prompt")
    requested = SamplingRequest(
        max_tokens=request.max_tokens or 16,
        temperature=request.temperature,
        seed=request.seed,
        stop=request.stops,
        logprobs=request.logprobs,
        prompt_param="prompt",
    )
    prompts = [await builder.prompt_builder.completion(text, session) for text in texts]
    choices = await builder.choices(prompts, request.n or 1, requested, session)
    return CompletionResponse(choices, request, builder, model)


class OpenAIResponse(ApiResponse):
    """Parts that the responses of both kinds share."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, choices: tuple[Choice, ...], request: Common, builder: RequestBuilder, model: str) -> None:
        super().__init__(choices, streamed=bool(request.stream))
        self._with_usage = request.with_usage
        self._request_builder = builder
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(builder.now()), "model": model}

    def body(self) -> dict[str, object]:
        version = self.choices[-1].version
        return {
            **self._head,
            "object": self.kind,
            "system_fingerprint": f"weights-{version}" if version >= 0 else None,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
        }

    def stream_end(self) -> bytes:
        usage = self._event([], usage=self._usage()) if self._with_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _choice(self, choice: Choice) -> dict[str, object]:
        raise NotImplementedError

    def _event(self, choices: list[dict[str, object]], usage: dict[str, object] | None = None) -> bytes:
        event = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._with_usage:
            event["usage"] = usage
        return b"data: " + encode(event) + b"\n\n"

    def _usage(self) -> dict[str, object]:
        prompt, completed = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}

    def _token(self, token: int) -> str:
        return self._request_builder.tokenizer.decode([token], skip_special=False)


class ChatResponse(OpenAIResponse):
    """Response of chat completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def stream_start(self) -> bytes:
        first: dict[str, object] = {"role": "assistant", "content": ""}
        return b"".join(self._delta(choice, first) for choice in self.choices)

    def stream_delta(self, choice: Choice, added: ChoiceDelta) -> bytes:
        delta: dict[str, object] = {}
        if added.content or added.tokens:
            delta["content"] = added.content
        if added.calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    **({"id": call.id, "type": "function"} if call.id else {}),
                    "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments},
                }
                for call in added.calls
            ]
        return self._delta(choice, delta, added.tokens) if delta else b""

    def stream_finish(self, choice: Choice) -> bytes:
        return self._delta(choice, {}, finish=_finish(choice))

    def _choice(self, choice: Choice) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": choice.message.content or (None if choice.message.calls else ""),
            "refusal": None,
        }
        if choice.message.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.message.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": _finish(choice),
        }

    def _delta(
        self, choice: Choice, delta: dict[str, object], tokens: Sequence[TokenLogprob] = (), finish: str | None = None
    ) -> bytes:
        event = {"index": choice.index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}
        return self._event([event])

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not tokens:
            return None
        content = [
            {**self._one(entry.token, entry.logprob), "top_logprobs": [self._one(*pair) for pair in entry.top]}
            for entry in tokens
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, object]:
        raw = list(self._request_builder.tokenizer.token_bytes(token))
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}


class CompletionResponse(OpenAIResponse):
    """Response of completions."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self, choices: tuple[Choice, ...], request: CompletionRequest, builder: RequestBuilder, model: str
    ) -> None:
        super().__init__(choices, request, builder, model)
        self._offsets = dict.fromkeys(range(len(choices)), 0)

    def stream_start(self) -> bytes:
        return b""

    def stream_delta(self, choice: Choice, added: ChoiceDelta) -> bytes:
        if not added.content and not added.tokens:
            return b""
        logprobs = self._logprobs(choice, added.tokens)
        return self._event(
            [{"index": choice.index, "text": added.content, "logprobs": logprobs, "finish_reason": None}]
        )

    def stream_finish(self, choice: Choice) -> bytes:
        return self._event([{"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish}])

    def _choice(self, choice: Choice) -> dict[str, object]:
        return {
            "index": choice.index,
            "text": choice.message.content,
            "logprobs": self._logprobs(choice, choice.tokens),
            "finish_reason": choice.finish,
        }

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not tokens:
            return None
        texts, offsets = [], []
        for entry in tokens:
            texts.append(self._token(entry.token))
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(texts[-1])
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in tokens],
            "top_logprobs": [
                {self._token(token): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))}
                for entry in tokens
            ],
            "text_offset": offsets,
        }


def _finish(choice: Choice) -> str:
    return "tool_calls" if choice.finish == "stop" and choice.message.calls else choice.finish
