"""OpenAI's chat completions and completions: from a request to its answers, and how they are written."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from forge_rl.gateway.choices import Choice, Piece, TokenLogprob
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.job import Job
from forge_rl.gateway.openai_requests import ChatRequest, Common, CompletionRequest, to_chat
from forge_rl.gateway.request_builder import RequestBuilder, SamplingRequest
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.wire import encode


async def chat(body: bytes, desk: RequestBuilder, session: Session | None) -> Job:
    """A request of chat completions.

    Raises:
        ValidationError, ApiError, ForgeError: it is wrong.
    """
    request = ChatRequest.model_validate_json(body)
    model = desk.check_model(request.model)
    request.check()
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs wants logprobs to be true", param="top_logprobs")
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    messages = [to_chat(message, at) for at, message in enumerate(request.messages)]
    wish = SamplingRequest(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop=request.stops,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        parallel_calls=request.parallel_tool_calls is not False,
    )
    prompt = await desk.composer.chat(messages, tools, session)
    called = tools if request.tool_choice != "none" else []
    choices = await desk.choices([prompt], request.n or 1, wish, session, called)
    return ChatJob(choices, request, desk, model)


async def completion(body: bytes, desk: RequestBuilder, session: Session | None) -> Job:
    """A request of completions.

    Raises:
        ValidationError, ApiError, ForgeError: it is wrong.
    """
    request = CompletionRequest.model_validate_json(body)
    model = desk.check_model(request.model)
    request.check()
    given = request.prompt
    several = bool(given) and isinstance(given, list) and not isinstance(given[0], int)
    texts: Sequence[Any] = given if several else [given]
    if len(texts) * (request.n or 1) > 2048:
        raise ApiError(400, "more than 2048 answers in one request", param="prompt")
    wish = SamplingRequest(
        max_tokens=request.max_tokens or 16,
        temperature=request.temperature,
        seed=request.seed,
        stop=request.stops,
        logprobs=request.logprobs,
        prompt_param="prompt",
    )
    prompts = [await desk.composer.completion(text, session) for text in texts]
    choices = await desk.choices(prompts, request.n or 1, wish, session)
    return CompletionJob(choices, request, desk, model)


class OpenAIJob(Job):
    """What the responses of both kinds share."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, choices: tuple[Choice, ...], request: Common, desk: RequestBuilder, model: str) -> None:
        super().__init__(choices, streamed=bool(request.stream))
        self._with_usage = request.with_usage
        self._request_builder = desk
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(desk.now()), "model": model}

    def body(self) -> dict[str, object]:
        version = self.choices[-1].version
        return {
            **self._head,
            "object": self.kind,
            "system_fingerprint": f"weights-{version}" if version >= 0 else None,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
        }

    def ending(self) -> bytes:
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
        prompt, answered = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}

    def _token(self, token: int) -> str:
        return self._request_builder.tokenizer.decode([token], skip_special=False)


class ChatJob(OpenAIJob):
    """Chat completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> bytes:
        first: dict[str, object] = {"role": "assistant", "content": ""}
        return b"".join(self._delta(choice, first) for choice in self.choices)

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        delta: dict[str, object] = {}
        if piece.content or piece.tokens:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    **({"id": call.id, "type": "function"} if call.id else {}),
                    "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments},
                }
                for call in piece.calls
            ]
        return self._delta(choice, delta, piece.tokens) if delta else b""

    def closing(self, choice: Choice) -> bytes:
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
            {**self._one(told.token, told.logprob), "top_logprobs": [self._one(*pair) for pair in told.top]}
            for told in tokens
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, object]:
        raw = list(self._request_builder.tokenizer.token_bytes(token))
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}


class CompletionJob(OpenAIJob):
    """Completions."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self, choices: tuple[Choice, ...], request: CompletionRequest, desk: RequestBuilder, model: str
    ) -> None:
        super().__init__(choices, request, desk, model)
        self._offsets = dict.fromkeys(range(len(choices)), 0)

    def opening(self) -> bytes:
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        if not piece.content and not piece.tokens:
            return b""
        logprobs = self._logprobs(choice, piece.tokens)
        return self._event(
            [{"index": choice.index, "text": piece.content, "logprobs": logprobs, "finish_reason": None}]
        )

    def closing(self, choice: Choice) -> bytes:
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
        for told in tokens:
            texts.append(self._token(told.token))
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(texts[-1])
        return {
            "tokens": texts,
            "token_logprobs": [told.logprob for told in tokens],
            "top_logprobs": [
                {self._token(token): logprob for token, logprob in (*told.top, (told.token, told.logprob))}
                for told in tokens
            ],
            "text_offset": offsets,
        }


def _finish(choice: Choice) -> str:
    return "tool_calls" if choice.finish == "stop" and choice.message.calls else choice.finish
