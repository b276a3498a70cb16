"""The choices of one request while they are decoded: the engine's tokens, and what clients see of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ServiceError
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import ChatMessage, Prompt, ToolCall
from forge_rl.gateway.tools import CallDelta, ToolReader
from forge_rl.runtime.tasks import task_group
from forge_rl.types import Chunk, Sampling, Turn

_LEAST = -9999.0
"""OpenAI's value for a logprob that is unknown or has no JSON."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token with its logprob and the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """Content, tool calls and logprobs that a chunk adds to a choice."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()


class Choice:
    """One completion of a request.

    Args:
        index: its place among the request's choices.
        prompt: what the model is shown.
        sampling: how tokens are sampled.
        tokenizer: the model's tokenizer.
        reader: finds tool calls, if the request has tools.
        parallel_calls: keep more than the first call.
        logprobs: report each token's logprob and so many of the likeliest; None reports nothing.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        sampling: Sampling,
        tokenizer: Tokenizer,
        *,
        reader: ToolReader | None = None,
        parallel_calls: bool = True,
        logprobs: int | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.finish = ""
        """"stop" or "length" once it has ended."""
        self.stop_text = ""
        """Stop text that ended it, out of sampling.stop; "" if none did."""
        self.tokens: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._reader = reader
        self._parallel = parallel_calls
        self._top_logprobs = logprobs
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        # Parsers look for special tokens too, which a reader never sees.
        self._stream = tokenizer.text_stream(prompt.token_ids, skip_special=reader is None)
        self._text = ""
        self._shown = 0
        self._content: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    @property
    def completion_tokens(self) -> int:
        """Tokens decoded so far."""
        return len(self._ids)

    @property
    def version(self) -> int:
        """Version of the weights behind the last token; -1 while there is none."""
        return self._versions[-1] if self._versions else -1

    def add(self, chunk: Chunk, *, streamed: bool) -> ChoiceDelta:
        """Add decoded tokens; return what the client may see of them. Tool calls are found here only if streamed."""
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._versions += chunk.versions
        self.finish = chunk.finish
        tokens = () if self._top_logprobs is None else self._tokens(chunk, self._top_logprobs)
        self.tokens += tokens
        for place, token in enumerate(chunk.token_ids, 1):
            ends = chunk.finish == "stop" and place == len(chunk.token_ids) and token in self._tokenizer.stop_ids
            if not ends:
                self._text += self._stream.add(token)
        text = self._next_text()
        if not streamed:
            return ChoiceDelta()
        calls: tuple[CallDelta, ...] = ()
        if self._reader is not None:
            text, found = self._reader.parse_delta(text, chunk.token_ids, finished=bool(self.finish))
            calls = tuple(call for call in found if call.index == 0 or self._parallel)
            for call in calls:
                self._add_call(call)
        self._content.append(text)
        return ChoiceDelta(content=text, calls=calls, tokens=tokens)

    def parse_calls(self) -> None:
        """Find the tool calls of a completion that was not streamed."""
        content, calls = (self._text, ()) if self._reader is None else self._reader.parse(self._text, self._ids)
        self._content = [content]
        self._calls = dict(enumerate(calls if self._parallel else calls[:1]))

    @property
    def message(self) -> ChatMessage:
        """The completion as it is returned."""
        calls = tuple(self._calls[index] for index in sorted(self._calls))
        return ChatMessage(role="assistant", content="".join(self._content), calls=calls)

    @property
    def turn(self) -> Turn:
        """The completion as it is trained on."""
        text = self._tokenizer.decode(self._ids)
        if self.stop_text:
            text = text.partition(self.stop_text)[0]
        return Turn(
            prompt_ids=self.prompt.token_ids,
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            text=text,
            truncated=self.finish == "length",
        )

    @property
    def full_text(self) -> str:
        """Text of all its tokens, with the stop text and special tokens."""
        return self._tokenizer.decode(self._ids, skip_special=False)

    def _next_text(self) -> str:
        """Return text that can be shown now and was not yet; set `finish` when a stop text is found."""
        # A stop text can begin in what is held back, which is never longer than it.
        ends = [(at, stop) for stop in self.sampling.stop if (at := self._text.find(stop, self._shown)) >= 0]
        if ends:
            at, self.stop_text = min(ends)
            self._text, self.finish = self._text[:at], "stop"
        held = 0 if self.finish else max((_overlap(self._text, stop) for stop in self.sampling.stop), default=0)
        begin, self._shown = self._shown, max(self._shown, len(self._text) - held)
        return self._text[begin : self._shown]

    def _tokens(self, chunk: Chunk, top_logprobs: int) -> tuple[TokenLogprob, ...]:
        tops = chunk.top or ((),) * len(chunk.token_ids)
        found = []
        for token, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True):
            # A greedy completion has no behaviour logprob; the one to report is that of the likeliest token.
            known = logprob if math.isfinite(logprob) else dict(top).get(token, _LEAST)
            likeliest = tuple((other, max(value, _LEAST)) for other, value in top[:top_logprobs])
            found.append(TokenLogprob(token=token, logprob=max(known, _LEAST), top=likeliest))
        return tuple(found)

    def _add_call(self, delta: CallDelta) -> None:
        before = self._calls.get(delta.index, ToolCall(id="", name="", arguments=""))
        self._calls[delta.index] = ToolCall(
            id=delta.id or before.id, name=delta.name or before.name, arguments=before.arguments + delta.arguments
        )


OnDelta = Callable[[Choice, ChoiceDelta], Awaitable[None]]


async def decode(
    backend: Backend, choices: Sequence[Choice], *, session: str | None, on_delta: OnDelta | None = None
) -> None:
    """Decode choices side by side.

    Args:
        backend: decodes.
        choices: filled with tokens.
        session: key of the session that asks.
        on_delta: called with what each chunk adds, where the request is streamed. A choice goes on when it returns,
            so that a slow client holds up its own only.

    Raises:
        ForgeError: the backend failed; the other choices end too.
    """
    if len(choices) == 1:
        await _decode(backend, choices[0], session, on_delta)
        return
    async with task_group() as group:
        for choice in choices:
            group.create_task(_decode(backend, choice, session, on_delta))


async def _decode(backend: Backend, choice: Choice, session: str | None, on_delta: OnDelta | None) -> None:
    stream = backend.stream(choice.prompt.token_ids, choice.sampling, session=session)
    async with contextlib.aclosing(stream) as chunks:
        async for chunk in chunks:
            added = choice.add(chunk, streamed=on_delta is not None)
            if on_delta is not None:
                await on_delta(choice, added)
            if choice.finish:
                break
    if not choice.finish:
        raise ServiceError("a completion has no end", service="generator", call="stream")
    if on_delta is None:
        choice.parse_calls()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is the beginning, not the whole, of a stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
