"""The choices of one request while they are decoded: the engine's tokens, and what clients see of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.chat import ChatMessage, Prompt, ToolCall
from forge_rl.gateway.tools import CallDelta, ToolReader
from forge_rl.types import Chunk, Sampling, Turn

_LEAST = -9999.0
"""OpenAI's value for a logprob that is unknown or has no JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token with its logprob and the likeliest alternatives."""

    token: int
    logprob: float
    top_ids: tuple[int, ...]
    """Apart from their logprobs: two objects a token for the garbage collector to look at, instead of twenty."""
    top_logprobs: tuple[float, ...]

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens, each with its logprob."""
        return tuple(zip(self.top_ids, self.top_logprobs, strict=True))


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
        reader: ToolReader | None,
        parallel_calls: bool,
        logprobs: int | None,
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
        ids = chunk.token_ids.tolist()
        self._ids += ids
        self._logprobs += chunk.logprobs.tolist()
        self._versions += chunk.versions.tolist()
        self.finish = chunk.finish
        tokens = self._token_logprobs(chunk)
        self.tokens += tokens
        for place, token in enumerate(ids, 1):
            ends = chunk.finish == "stop" and place == len(ids) and token in self._tokenizer.stop_ids
            if not ends:
                self._text += self._stream.add(token)
        text = self._next_text()
        if not streamed:
            if self.finish:
                text, whole = (self._text, ()) if self._reader is None else self._reader.parse(self._text, self._ids)
                self._content, self._calls = [text], dict(enumerate(whole if self._parallel else whole[:1]))
            return ChoiceDelta()
        calls: tuple[CallDelta, ...] = ()
        if self._reader is not None:
            text, found = self._reader.parse_delta(text, ids, finished=bool(self.finish))
            calls = tuple(call for call in found if call.index == 0 or self._parallel)
            for call in calls:
                before = self._calls.get(call.index, ToolCall(id="", name="", arguments=""))
                self._calls[call.index] = ToolCall(
                    id=call.id or before.id, name=call.name or before.name, arguments=before.arguments + call.arguments
                )
        self._content.append(text)
        return ChoiceDelta(content=text, calls=calls, tokens=tokens)

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
            token_ids=self._ids,
            logprobs=self._logprobs,
            versions=self._versions,
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

    def _token_logprobs(self, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        if self._top_logprobs is None:
            return ()
        found = []
        tops = chunk.top or ((),) * len(chunk.token_ids)
        for token, logprob, top in zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), tops, strict=True):
            # A greedy completion has no behaviour logprob; the one to report is that of the likeliest token.
            known = logprob if math.isfinite(logprob) else dict(top).get(token, _LEAST)
            top = top[: self._top_logprobs]
            ids, logprobs = tuple(other for other, _ in top), tuple(max(value, _LEAST) for _, value in top)
            found.append(TokenLogprob(token=token, logprob=max(known, _LEAST), top_ids=ids, top_logprobs=logprobs))
        return tuple(found)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is the beginning, not the whole, of a stop text."""
    tail = text[max(0, len(text) - len(stop) + 1) :]
    at = tail.find(stop[0])
    while at >= 0 and not stop.startswith(tail[at:]):
        at = tail.find(stop[0], at + 1)
    return len(tail) - at if at >= 0 else 0
