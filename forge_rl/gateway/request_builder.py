"""Makes choices that can be decoded out of what a request asks for: the rules that all APIs share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import ChatMessage, Prompt, PromptBuilder
from forge_rl.gateway.choices import Choice
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.json_text import holds_more
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.tools import ToolParser
from forge_rl.types import Sampling

_LONG_BYTES = 32 << 10
"""Bodies from this length are read beside the event loop: they would hold up everything else in it."""
_MOST_WAITING_BYTES = 256 << 20
"""Bodies that may wait for their turn to be read, together."""
_MOST_VALUES = 1 << 17
"""Values in the JSON of a request, where the model's context is not half as long."""
_MOST_CONTAINERS = 3 << 12
"""Objects and arrays in it, which take more time and memory."""
_BYTES_PER_TOKEN = 4
"""Length of usual text, from which on it is counted whether it fits the context."""
_SLICE_CHARACTERS = 1 << 16
_MOST_COMPLETIONS = 128
"""Completions of one request."""
_MOST_LOGPROBS = 512
"""Logprobs of one position in all completions of a request."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Sampling parameters that a request asks for; None leaves one to the gateway."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Report each token's logprob, and so many of the likeliest; None reports nothing."""
    parallel_calls: bool = True
    prompt_param: str = "messages"
    """Name of the prompt in errors."""


class RequestBuilder:
    """Makes choices out of prompts and sampling requests.

    Args:
        backend: decodes them.
        tokenizer: the model's tokenizer.
        config: the gateway's config.
    """

    def __init__(self, backend: Backend, tokenizer: Tokenizer, config: GatewayConfig) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self._prompt_builder = PromptBuilder(tokenizer, config.tool_parser)
        self.parser = ToolParser(config.tool_parser, tokenizer)
        self.models = tuple(dict.fromkeys((backend.model, *config.aliases)))
        self._longest_token = max(map(len, tokenizer.hf.get_vocab()))
        self._most_values = max(_MOST_VALUES, 2 * backend.max_model_tokens)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="gateway-requests")
        """One thread, so that the loop keeps its core, whatever clients send and do not wait for."""
        self._waiting_bytes = 0

    def close(self) -> None:
        """Read no more requests."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def check_count(self, prompts: int, count: int, logprobs: int | None, param: str) -> None:
        """Check how much a request with so many prompts, and so many completions of each, asks for.

        Raises:
            ApiError: it is too much.
        """
        if prompts * count > _MOST_COMPLETIONS:
            problem = f"{prompts * count} completions in one request are more than {_MOST_COMPLETIONS}"
            raise ApiError(400, problem, param=param)
        if logprobs is not None and prompts * count * (logprobs + 1) > _MOST_LOGPROBS:
            problem = f"all completions together may have {_MOST_LOGPROBS} logprobs for a position; ask for fewer"
            raise ApiError(400, problem, param="logprobs")

    async def read(self, read: Read[T], body: bytes, session: Session | None) -> T:
        """Read the body of a request: parse it, check it, tokenise its prompt; beside the event loop if it is long.

        Raises:
            ApiError: it holds too much, or too many wait to be read. What `read` raises comes through.
        """
        if len(body) < _LONG_BYTES:
            return read(body, self, session)
        if self._waiting_bytes + len(body) > _MOST_WAITING_BYTES:
            raise ApiError(503, "too many long requests wait; try again", code="busy", headers={"retry-after": "1"})
        self._waiting_bytes += len(body)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, self._read_long, read, body, session)
        finally:
            self._waiting_bytes -= len(body)

    def _read_long(self, read: Read[T], body: bytes, session: Session | None) -> T:
        if holds_more(body, self._most_values, _MOST_CONTAINERS):
            problem = f"the body holds more than {self._most_values} values, or {_MOST_CONTAINERS} objects and arrays"
            raise ApiError(413, problem, code="request_too_large")
        return read(body, self, session)

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, object]], session: Session | None
    ) -> Prompt:
        """Make the prompt of a conversation.

        Raises:
            ApiError: it is too long for the model, or the chat template cannot show tools.
            ModelError: the chat template refuses the messages.
        """
        texts = [json.dumps(tools, ensure_ascii=False)] if tools else []
        for message in messages:
            texts += [message.content, *(call.arguments for call in message.calls)]
        self._check_room(max(len(messages), self._least_tokens("\n".join(texts))), "messages")
        return self._prompt_builder.chat(messages, tools, session)

    def completion(self, prompt: str | Sequence[int], session: Session | None) -> Prompt:
        """Make the prompt of a completion.

        Raises:
            ApiError: it is too long for the model.
        """
        self._check_room(self._least_tokens(prompt) if isinstance(prompt, str) else len(prompt), "prompt")
        return self._prompt_builder.completion(prompt, session)

    def check_model(self, name: str) -> str:
        """Return the name if the model goes by it.

        Raises:
            ApiError: it does not.
        """
        if name not in self.models:
            raise ApiError(
                404,
                f"The model `{name}` does not exist; there is {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def choices(
        self,
        prompts: Sequence[Prompt],
        count: int,
        requested: SamplingRequest,
        session: Session | None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> tuple[Choice, ...]:
        """Make so many choices for each prompt.

        Raises:
            ApiError: the sampling that is requested cannot be had.
        """
        asked = await self.parser.asked(tools) if tools else None
        found: list[Choice] = []
        size = self.tokenizer.vocab_size
        for prompt in prompts:
            if not len(prompt.token_ids):
                raise ApiError(400, "the prompt is empty", param=requested.prompt_param)
            if prompt.token_ids.min() < 0 or prompt.token_ids.max() >= size:
                raise ApiError(400, f"token ids go from 0 to {size - 1}", param=requested.prompt_param)
            sampling = self._sampling(prompt, requested, session)
            prompt_ids = prompt.token_ids.tolist() if asked is not None else []
            for place in range(count):
                if session is not None:
                    sampling = replace(sampling, seed=session.seed_for(prompt.token_ids))
                elif requested.seed is not None:
                    sampling = replace(sampling, seed=(requested.seed + place) % (1 << 63))
                reader = self.parser.reader(asked, prompt_ids) if asked is not None else None
                parallel, logprobs = requested.parallel_calls, requested.logprobs
                choice = Choice(len(found), prompt, sampling, self.tokenizer, reader, parallel, logprobs)
                found.append(choice)
        return tuple(found)

    def _least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without making many more than the context holds.

        A text that may be longer than the context is tokenised by slices until it is; a quarter is left for what their
        borders add. To tokenise all of it would take seconds.
        """
        limit = self.backend.max_model_tokens
        least = len(text) // self._longest_token
        if least > limit or (len(text) if text.isascii() else 4 * len(text)) < _BYTES_PER_TOKEN * limit:
            return least
        found = 0
        for begin in range(0, len(text), _SLICE_CHARACTERS):
            found += len(self.tokenizer.encode(text[begin : begin + _SLICE_CHARACTERS]))
            if found > 1.25 * limit:
                return found * 4 // 5
        return least

    def _check_room(self, least_tokens: int, param: str) -> None:
        """Raise ApiError if a prompt that has at least so many tokens cannot fit."""
        if least_tokens > (limit := self.backend.max_model_tokens):
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your {param} resulted in at least "
                f"{least_tokens} tokens. Please reduce the length of the {param}.",
                param=param,
                code="context_length_exceeded",
            )

    def _sampling(self, prompt: Prompt, requested: SamplingRequest, session: Session | None) -> Sampling:
        limit, used = self.backend.max_model_tokens, len(prompt.token_ids)
        room = limit - used
        tokens = requested.max_tokens if requested.max_tokens is not None else room
        if session is not None:
            tokens = min(tokens, session.sampling.max_tokens, room)
        if room < 1 or tokens > room:
            tokens, param = max(tokens, requested.max_tokens or 1), requested.prompt_param
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {used + tokens} tokens "
                f"({used} in the {param}, {tokens} in the completion). Please reduce the length of the {param} or "
                "completion.",
                param=param,
                code="context_length_exceeded",
            )
        temperature = _temperature(requested.temperature, session)
        # A greedy completion has no behaviour logprobs; what can be reported is that of the likeliest token.
        top = 0 if requested.logprobs is None else max(requested.logprobs, 1 if temperature == 0 else 0)
        stop = tuple(dict.fromkeys((*requested.stop, *(session.sampling.stop if session is not None else ()))))
        return Sampling(max_tokens=tokens, temperature=temperature, stop=stop, top_logprobs=top)


def _temperature(wanted: float | None, session: Session | None) -> float:
    """Choose the temperature: that of training, as recorded logprobs at another one would be another distribution's.

    Greedy completions have no logprobs and are not trained. A greedy session is evaluated: whatever is wanted, all of
    it is greedy.
    """
    if session is None:
        return 1.0 if wanted is None else wanted
    own = session.sampling.temperature
    if wanted is None or own == 0:
        return own
    if wanted in (own, 0):
        return wanted
    raise ApiError(
        400,
        f"temperature {wanted:g} is not the {own:g} that this session is trained at: the behaviour logprobs would be "
        "another distribution's. Leave temperature out, or set it to 0 for completions that are not trained",
        param="temperature",
        code="unsupported_value",
    )


Read: TypeAlias = Callable[[bytes, RequestBuilder, Session | None], T]
"""Reads the body of a request, in whatever thread. Raises ValidationError, ApiError or ForgeError if it is wrong."""
