"""vLLM's handlers of each API, with the engines' logprobs and validated Anthropic requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forge_rl.gateway import vllm_internals as vllm
from forge_rl.gateway.request_state import REQUEST, TokenLogprob
from forge_rl.tokens.tokenizer import Tokenizer


class _Logprobs:
    """Mixin that formats logprobs for each API; in responses that are not streamed, entries are made when encoded."""

    forge_rl_tokenizer: Tokenizer

    def _create_chat_logprobs(
        self, token_ids: object, top_logprobs: Sequence[TokenLogprob], *_: object, **__: object
    ) -> Any:
        content = _made_late([partial(self._chat_entry, entry) for entry in top_logprobs])
        if REQUEST.get().streamed:
            return vllm.ChatCompletionLogProbs(content=content)
        # Unvalidated, as the entries are functions until the response is encoded.
        return vllm.ChatCompletionLogProbs.model_construct(content=content)

    def _create_completion_logprobs(
        self,
        token_ids: Sequence[int],
        top_logprobs: Sequence[TokenLogprob | Mapping[int, Any] | None],
        *_: object,
        initial_text_offset: int = 0,
        **__: object,
    ) -> Any:
        """Format the logprobs of a completion, preceded by the prompt's if it is echoed."""
        entries = [
            _entry(token, position_logprobs) for token, position_logprobs in zip(token_ids, top_logprobs, strict=False)
        ]
        texts = [self._token(token) for token in token_ids]
        # Character offsets of the tokens' texts, as in OpenAI's legacy completions.
        offsets = [initial_text_offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return vllm.CompletionLogProbs.model_construct(
            text_offset=offsets[:-1],
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            tokens=texts,
            top_logprobs=_made_late([partial(self._likeliest, entry) for entry in entries]),
        )

    def _chat_entry(self, entry: TokenLogprob) -> dict[str, object]:
        return {**self._one(entry.token, entry.logprob), "top_logprobs": [self._one(*pair) for pair in entry.top]}

    def _likeliest(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        """Return the logprobs of the most likely tokens and of the token, by their texts.

        Tokens with equal text share an entry: the highest logprob, by which clients detect greedy tokens.
        """
        if entry is None:
            return None
        logprob_by_text: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            text = self._token(token)
            logprob_by_text[text] = max(logprob, logprob_by_text.get(text, logprob))
        return logprob_by_text

    def _one(self, token: int, logprob: float) -> dict[str, object]:
        raw = list(self.forge_rl_tokenizer.token_bytes(token))
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}

    def _token(self, token: int) -> str:
        return self.forge_rl_tokenizer.decode([token], skip_special=False)


class ChatHandler(_Logprobs, vllm.OpenAIServingChat):
    """vLLM's handler of chat completions."""


class CompletionHandler(_Logprobs, vllm.OpenAIServingCompletion):
    """vLLM's handler of completions."""


class AnthropicHandler(_Logprobs, vllm.AnthropicServingMessages):
    """vLLM's handler of Anthropic's messages."""

    def convert(self, request: Any) -> Any:
        """Convert a request to vLLM's chat request, which takes time if it is long."""
        return vllm.AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=self._merge_inline_system
        )

    @classmethod
    def _build_base_request(cls, anthropic_request: Any, openai_messages: list[Any]) -> Any:
        request = super()._build_base_request(anthropic_request, [])
        request.messages = openai_messages  # unvalidated: vLLM's types for them are slow
        return request

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **kwargs: Any) -> Any:
        return REQUEST.get().converted

    def messages_full_converter(self, generator: Any) -> Any:
        for call in generator.choices[0].message.tool_calls:
            # Arguments must be a JSON object here, and the model may have written something else.
            try:
                is_object = isinstance(json.loads(call.function.arguments), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                call.function.arguments = "{}"
        return super().messages_full_converter(generator)


class ResponsesHandler(vllm.OpenAIServingResponses):
    """vLLM's handler of responses."""

    forge_rl_tokenizer: Tokenizer

    def _create_response_logprobs(
        self, token_ids: object, logprobs: Sequence[TokenLogprob], tokenizer: object, top_logprobs: int | None = None
    ) -> Any:
        def to_logprob(token: int, logprob: float) -> Any:
            return vllm.Logprob(logprob, decoded_token=self.forge_rl_tokenizer.decode([token], skip_special=False))

        position_logprobs = [
            {token: to_logprob(token, logprob) for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in logprobs
        ]
        return super()._create_response_logprobs(
            [entry.token for entry in logprobs], position_logprobs, tokenizer, top_logprobs
        )


def _entry(token: int, position_logprobs: TokenLogprob | Mapping[int, Any] | None) -> TokenLogprob | None:
    """Return a token's entry from itself or from its prompt position's logprobs; a prompt's first token has none."""
    if position_logprobs is None or isinstance(position_logprobs, TokenLogprob):
        return position_logprobs
    alternatives = [(other, entry.logprob) for other, entry in position_logprobs.items() if other != token]
    ids, logprobs = tuple(other for other, _ in alternatives), tuple(logprob for _, logprob in alternatives)
    return TokenLogprob(token=token, logprob=position_logprobs[token].logprob, top_ids=ids, top_logprobs=logprobs)


def _made_late(entries: list[Callable[[], object]]) -> list[Any]:
    """Return functions of a response's entries, which may be many, or the entries themselves for a stream."""
    return [make() for make in entries] if REQUEST.get().streamed else entries
