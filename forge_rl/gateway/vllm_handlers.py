"""vLLM's handlers of each API, with the engines' logprobs and validated Anthropic requests. Imports vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.logprobs import Logprob

from forge_rl.gateway.call import CALL
from forge_rl.gateway.completion import TokenLogprob
from forge_rl.gateway.json_text import LazyList
from forge_rl.tokens.tokenizer import Tokenizer

T = TypeVar("T")


class _Logprobs:
    """Mixin that formats logprobs for each API, lazily in responses that are not streamed."""

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
        token_ids: Sequence[int],
        top_logprobs: Sequence[TokenLogprob | Mapping[int, Logprob] | None],
        *_: object,
        initial_text_offset: int = 0,
        **__: object,
    ) -> CompletionLogProbs:
        """Format the logprobs of a completion, preceded by the prompt's if it is echoed."""
        entries = [_entry(token, known) for token, known in zip(token_ids, top_logprobs, strict=False)]

        def likeliest() -> Iterator[dict[str, float] | None]:
            for entry in entries:
                if entry is None:
                    yield None
                else:
                    # Tokens with equal text share an entry: the highest logprob, by which clients detect greedy tokens.
                    found: dict[str, float] = {}
                    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
                        text = self._token(token)
                        found[text] = max(logprob, found.get(text, logprob))
                    yield found

        texts = [self._token(token) for token in token_ids]
        offsets = [initial_text_offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return CompletionLogProbs.model_construct(
            text_offset=offsets[:-1],
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            tokens=texts,
            top_logprobs=_listed(likeliest, len(entries)),
        )

    def _one(self, token: int, logprob: float) -> dict[str, object]:
        raw = list(self.forge_rl_tokenizer.token_bytes(token))
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}

    def _token(self, token: int) -> str:
        return self.forge_rl_tokenizer.decode([token], skip_special=False)


class Chat(_Logprobs, OpenAIServingChat):
    """vLLM's handler of chat completions."""


class Completions(_Logprobs, OpenAIServingCompletion):
    """vLLM's handler of completions."""


class Messages(_Logprobs, AnthropicServingMessages):
    """vLLM's handler of Anthropic's messages."""

    def convert(self, request: Any) -> Any:
        """Convert a request to vLLM's chat request, which takes time if it is long."""
        return AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=self._merge_inline_system
        )

    @classmethod
    def _build_base_request(cls, anthropic_request: Any, openai_messages: list[Any]) -> Any:
        request = super()._build_base_request(anthropic_request, [])
        request.messages = openai_messages  # unvalidated: vLLM's types for them are slow
        return request

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **given: Any) -> Any:
        return CALL.get().converted

    def messages_full_converter(self, generator: Any) -> Any:
        for call in generator.choices[0].message.tool_calls:
            # Arguments must be a JSON object here, and the model may have written something else.
            try:
                good = isinstance(json.loads(call.function.arguments), dict)
            except (ValueError, RecursionError):
                good = False
            if not good:
                call.function.arguments = "{}"
        return super().messages_full_converter(generator)


class Responses(OpenAIServingResponses):
    """vLLM's handler of responses."""

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


def _entry(token: int, known: TokenLogprob | Mapping[int, Logprob] | None) -> TokenLogprob | None:
    """Return a token's entry from itself or from its prompt position's logprobs; a prompt's first token has none."""
    if known is None or isinstance(known, TokenLogprob):
        return known
    others = [(other, entry.logprob) for other, entry in known.items() if other != token]
    ids, logprobs = tuple(other for other, _ in others), tuple(logprob for _, logprob in others)
    return TokenLogprob(token=token, logprob=known[token].logprob, top_ids=ids, top_logprobs=logprobs)


def _listed(make: Callable[[], Iterator[T]], count: int) -> list[T]:
    """Return a list, lazy unless streamed or empty, as a whole response's may be long."""
    return LazyList(make()) if count and not CALL.get().streamed else list(make())  # type: ignore[return-value]
