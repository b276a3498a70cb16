"""Choices, the answers to one request, while they are decoded: the engine's tokens, and what is shown of them."""

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
"""What OpenAI writes for a logprob that is not known, or is no JSON."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """What OpenAI calls a token with its logprob."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a chunk adds to an answer."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()


class Choice:
    """One of the answers to a request, all of which are of one conversation.

    Args:
        index: among them.
        prompt: what the model is shown.
        sampling: how it is drawn.
        tokenizer: of the model.
        reader: finds tool calls in it, if the request has tools.
        parallel_calls: keep more than the first call.
        logprobs: of each token tell its logprob and so many of the likeliest; None tells nothing.
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
        """The one of sampling.stop that ended it."""
        self.tokens: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._reader = reader
        self._parallel = parallel_calls
        self._told = logprobs
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
        return len(self._ids)

    @property
    def version(self) -> int:
        """Of the weights behind its last token; -1 if that is not known."""
        return self._versions[-1] if self._versions else -1

    def add(self, chunk: Chunk, *, streamed: bool) -> Piece:
        """Take what was decoded; returns what may be shown of it. Tool calls are found here only if streamed."""
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._versions += chunk.versions
        self.finish = chunk.finish
        tokens = () if self._told is None else self._tokens(chunk, self._told)
        self.tokens += tokens
        for place, token in enumerate(chunk.token_ids, 1):
            ends = chunk.finish == "stop" and place == len(chunk.token_ids) and token in self._tokenizer.stop_ids
            if not ends:
                self._text += self._stream.add(token)
        text = self._take()
        if not streamed:
            return Piece()
        calls: tuple[CallDelta, ...] = ()
        if self._reader is not None:
            text, found = self._reader.delta(text, chunk.token_ids, finished=bool(self.finish))
            calls = tuple(call for call in found if call.index == 0 or self._parallel)
            for call in calls:
                self._add_call(call)
        self._content.append(text)
        return Piece(content=text, calls=calls, tokens=tokens)

    def end(self) -> None:
        """Find the tool calls of an answer that was not streamed."""
        content, calls = (self._text, ()) if self._reader is None else self._reader.whole(self._text, self._ids)
        self._content = [content]
        self._calls = dict(enumerate(calls if self._parallel else calls[:1]))

    @property
    def message(self) -> ChatMessage:
        """The answer as it is returned."""
        calls = tuple(self._calls[index] for index in sorted(self._calls))
        return ChatMessage(role="assistant", content="".join(self._content), calls=calls)

    @property
    def turn(self) -> Turn:
        """The answer as it is trained on."""
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
        """All that its tokens say, the text that stopped it included."""
        return self._tokenizer.decode(self._ids, skip_special=False)

    def _take(self) -> str:
        """Text that can be shown now, and was not yet; sets `finish` when a stop text is found."""
        # A stop text can begin in what is held back, which is never longer than it.
        ends = [(at, stop) for stop in self.sampling.stop if (at := self._text.find(stop, self._shown)) >= 0]
        if ends:
            at, self.stop_text = min(ends)
            self._text, self.finish = self._text[:at], "stop"
        held = 0 if self.finish else max((_overlap(self._text, stop) for stop in self.sampling.stop), default=0)
        begin, self._shown = self._shown, max(self._shown, len(self._text) - held)
        return self._text[begin : self._shown]

    def _tokens(self, chunk: Chunk, told: int) -> tuple[TokenLogprob, ...]:
        tops = chunk.top or ((),) * len(chunk.token_ids)
        found = []
        for token, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True):
            # A greedy answer has no behaviour logprob, but the model's own is the likeliest one's.
            known = logprob if math.isfinite(logprob) else dict(top).get(token, _LEAST)
            likeliest = tuple((other, max(value, _LEAST)) for other, value in top[:told])
            found.append(TokenLogprob(token=token, logprob=max(known, _LEAST), top=likeliest))
        return tuple(found)

    def _add_call(self, delta: CallDelta) -> None:
        before = self._calls.get(delta.index, ToolCall(id="", name="", arguments=""))
        self._calls[delta.index] = ToolCall(
            id=delta.id or before.id, name=delta.name or before.name, arguments=before.arguments + delta.arguments
        )


Show = Callable[[Choice, Piece], Awaitable[None]]


async def decode(backend: Backend, choices: Sequence[Choice], *, session: str | None, show: Show | None = None) -> None:
    """Decode choices side by side.

    Args:
        backend: decodes.
        choices: to be filled.
        session: key of the session that asks.
        show: called with what each chunk adds, where the request is streamed. A choice goes on when it returns, so
            that a slow client holds up its own only.

    Raises:
        ForgeError: the backend's; the other answers end too.
    """
    if len(choices) == 1:
        await _decode(backend, choices[0], session, show)
        return
    async with task_group() as group:
        for choice in choices:
            group.create_task(_decode(backend, choice, session, show))


async def _decode(backend: Backend, choice: Choice, session: str | None, show: Show | None) -> None:
    stream = backend.stream(choice.prompt.token_ids, choice.sampling, session=session)
    async with contextlib.aclosing(stream) as chunks:
        async for chunk in chunks:
            piece = choice.add(chunk, streamed=show is not None)
            if show is not None:
                await show(choice, piece)
            if choice.finish:
                break
    if not choice.finish:
        raise ServiceError("an answer has no end", service="generator", call="stream")
    if show is None:
        choice.end()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop text begins with, and is longer than."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
