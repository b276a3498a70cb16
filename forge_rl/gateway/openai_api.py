"""OpenAI's chat completions and completions: reads requests and writes responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from forge_rl.gateway.chat import ChatMessage, Prompt
from forge_rl.gateway.choices import Choice, ChoiceDelta, TokenLogprob
from forge_rl.gateway.json_text import to_event
from forge_rl.gateway.openai_requests import ChatRequest, Common, CompletionRequest, to_chat
from forge_rl.gateway.request_builder import RequestBuilder, SamplingRequest
from forge_rl.gateway.response import ApiResponse
from forge_rl.gateway.sessions import Session


async def chat(body: bytes, builder: RequestBuilder, session: Session | None) -> ApiResponse:
    """Read a request of chat completions."""
    request, prompt, requested, tools = await builder.read(_read_chat, body, session)
    choices = await builder.choices([prompt], request.n or 1, requested, session, tools)
    return OpenAIResponse(choices, request, builder, request.model)


def _read_chat(
    body: bytes, builder: RequestBuilder, session: Session | None
) -> tuple[ChatRequest, Prompt, SamplingRequest, list[dict[str, object]]]:
    request = ChatRequest.read(body)
    builder.check_model(request.model)
    request.check()
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    messages = [to_chat(message, at) for at, message in enumerate(request.messages)]
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    builder.check_count(1, request.n or 1, logprobs, "n")
    requested = SamplingRequest(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop=request.stops,
        logprobs=logprobs,
        parallel_calls=request.parallel_tool_calls is not False,
    )
    prompt = builder.chat(messages, tools, session)
    return request, prompt, requested, tools if request.tool_choice != "none" else []


async def completion(body: bytes, builder: RequestBuilder, session: Session | None) -> ApiResponse:
    """Read a request of completions."""
    request, prompts, requested = await builder.read(_read_completion, body, session)
    choices = await builder.choices(prompts, request.n or 1, requested, session)
    return CompletionResponse(choices, request, builder, request.model)


def _read_completion(
    body: bytes, builder: RequestBuilder, session: Session | None
) -> tuple[CompletionRequest, list[Prompt], SamplingRequest]:
    request = CompletionRequest.read(body)
    builder.check_model(request.model)
    request.check()
    given = request.prompt
    several = bool(given) and isinstance(given, list) and not isinstance(given[0], int)
    texts: Sequence[Any] = given if several else [given]
    builder.check_count(len(texts), request.n or 1, request.logprobs, "prompt")
    requested = SamplingRequest(
        max_tokens=request.max_tokens or 16,
        temperature=request.temperature,
        seed=request.seed,
        stop=request.stops,
        logprobs=request.logprobs,
        prompt_param="prompt",
    )
    return request, [builder.completion(text, session) for text in texts], requested


class OpenAIResponse(ApiResponse):
    """Response of chat completions, and what completions share with it."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, choices: tuple[Choice, ...], request: Common, builder: RequestBuilder, model: str) -> None:
        super().__init__(choices, streamed=bool(request.stream))
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._tokenizer = builder.tokenizer
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(self) -> dict[str, object]:
        version = self.choices[-1].version
        return {
            **self._head,
            "object": self.kind,
            "system_fingerprint": f"weights-{version}" if version >= 0 else None,
            "choices": [
                self._entry(choice, self._whole(choice.message), choice.tokens, ended=True) for choice in self.choices
            ],
            "usage": self._usage(),
        }

    def stream_start(self) -> bytes:
        first = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event([self._entry(choice, first)]) for choice in self.choices)

    def stream_delta(self, choice: Choice, added: ChoiceDelta) -> bytes:
        data = b""
        if added.content or added.tokens or added.calls:
            data = self._event([self._entry(choice, self._part(added), added.tokens)])
        if choice.finish:
            data += self._event([self._entry(choice, self._part(None), ended=True)])
        return data

    def stream_end(self) -> bytes:
        return (self._event([], self._usage()) if self._with_usage else b"") + b"data: [DONE]\n\n"

    def _whole(self, message: ChatMessage) -> dict[str, object]:
        """Return what a choice of a whole response shows."""
        shown: dict[str, object] = {
            "role": "assistant",
            "content": message.content or (None if message.calls else ""),
            "refusal": None,
        }
        if message.calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
        return {"message": shown}

    def _part(self, added: ChoiceDelta | None) -> dict[str, object]:
        """Return what an event shows that adds something to a choice, or with None that ends it."""
        delta: dict[str, object] = {}
        if added and (added.content or added.tokens):
            delta["content"] = added.content
        if added and added.calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    **({"id": call.id, "type": "function"} if call.id else {}),
                    "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments},
                }
                for call in added.calls
            ]
        return {"delta": delta}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
        content = (
            {**self._one(entry.token, entry.logprob), "top_logprobs": [self._one(*pair) for pair in entry.top]}
            for entry in tokens
        )
        return {"content": self._listed(content), "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, object]:
        raw = list(self._tokenizer.token_bytes(token))
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}

    def _entry(
        self, choice: Choice, shown: dict[str, Any], tokens: Sequence[TokenLogprob] = (), *, ended: bool = False
    ) -> dict[str, object]:
        finish = "tool_calls" if choice.finish == "stop" and choice.message.calls else choice.finish
        logprobs = self._logprobs(choice.index, tokens) if tokens else None
        return {"index": choice.index, **shown, "logprobs": logprobs, "finish_reason": finish if ended else None}

    def _event(self, choices: list[dict[str, object]], usage: dict[str, object] | None = None) -> bytes:
        event = {**self._head, "object": self.chunk_kind, "choices": choices}
        return to_event({**event, "usage": usage} if self._with_usage else event)

    def _usage(self) -> dict[str, object]:
        prompt, completed = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}

    def _token(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


class CompletionResponse(OpenAIResponse):
    """Response of completions."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, choices: tuple[Choice, ...], request: Common, builder: RequestBuilder, model: str) -> None:
        super().__init__(choices, request, builder, model)
        self._offsets = [0] * len(choices)

    def stream_start(self) -> bytes:
        return b""

    def _whole(self, message: ChatMessage) -> dict[str, object]:
        return {"text": message.content}

    def _part(self, added: ChoiceDelta | None) -> dict[str, object]:
        return {"text": added.content if added else ""}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
        texts = [self._token(entry.token) for entry in tokens]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in tokens],
            "top_logprobs": self._listed(
                {self._token(token): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))}
                for entry in tokens
            ),
            "text_offset": offsets,
        }
