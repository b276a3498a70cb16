"""State of one request on its way through vLLM's server: its session, its choices, and its failure."""

from __future__ import annotations

import asyncio
import math
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from forge_rl.gateway.chat import Prompt
from forge_rl.gateway.sessions import Session
from forge_rl.token_arrays import Chunk
from forge_rl.tokens.text_stream import whole_characters
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling, ToolCall, Turn

LEAST_LOGPROB = -9999.0
"""OpenAI's value for logprobs that are unknown or not representable in JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token with its logprob and the most likely tokens."""

    token: int
    logprob: float
    top_ids: tuple[int, ...]
    """Ids of the most likely tokens, apart from the logprobs: the garbage collector sees 2 objects a token, not 20."""
    top_logprobs: tuple[float, ...]

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The most likely tokens, each with its logprob."""
        return tuple(zip(self.top_ids, self.top_logprobs, strict=True))


@dataclass(frozen=True, kw_only=True)
class CompletionDelta:
    """Text and tokens that one chunk adds to a completion."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None


@dataclass(kw_only=True, eq=False)
class CompletionChoice:
    """One of a request's completions: the engine's tokens so far, and the text shown to the client."""

    index: int
    """Index among the completions of the prompt."""
    prompt: Prompt
    sampling: Sampling
    tokenizer: Tokenizer
    """The model's tokenizer."""
    skip_special: bool = True
    """Omit special tokens from the text."""
    keeps_stop: bool = False
    """Include the stop string that ended it in the text."""
    top: int | None = None
    """Number of most likely tokens reported with each token's logprob; None reports no logprobs."""
    finish: str = ""
    """Finish reason: "stop" or "length"; "" before the end."""
    stop_text: str = ""
    """String of sampling.stop that ended the completion; "" if none did."""
    text: str = ""
    """Text so far, without the stop string unless `keeps_stop`."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Empty unless they are reported."""
    of_prompt: tuple[tuple[tuple[int, float, int], ...], ...] = ()
    """(id, logprob, rank) of the prompt's tokens, see `Chunk.prompt`."""
    _began: float = field(default_factory=time.monotonic)
    _behaviour: list[float] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _routed: npt.NDArray[Any] | None = None
    _shown: int = 0

    def __post_init__(self) -> None:
        self._stream = self.tokenizer.text_stream(self.prompt.token_ids, skip_special=self.skip_special)

    @property
    def version(self) -> int:
        """Weight version of the last token; -1 before the first."""
        return self._versions[-1] if self._versions else -1

    def add(self, chunk: Chunk) -> CompletionDelta:
        """Add decoded tokens; return what may be shown to the client."""
        ids = chunk.token_ids.tolist()
        self.ids += ids
        self._behaviour += chunk.logprobs.tolist()
        self._versions += chunk.versions.tolist()
        self.finish, self._routed = chunk.finish, chunk.routed
        # Sent once, with the first chunk.
        self.of_prompt = chunk.prompt or self.of_prompt
        logprobs = self._token_logprobs(chunk)
        self.logprobs += logprobs or []
        for count, token in enumerate(ids, 1):
            # The token that ended the completion is recorded with the turn, and no text of it is shown.
            is_stop_token = chunk.finish == "stop" and count == len(ids) and token in self.tokenizer.stop_ids
            if not is_stop_token:
                self.text += self._stream.add(token)
        return CompletionDelta(text=self._next_text(), token_ids=ids, logprobs=logprobs)

    def all(self) -> CompletionDelta:
        """Return all text and tokens so far."""
        return CompletionDelta(text=self.text, token_ids=self.ids, logprobs=None if self.top is None else self.logprobs)

    def turn(self, *, trained: bool, agent: str = "", calls: tuple[ToolCall, ...] = ()) -> Turn:
        """Return the completion as a turn; if it is not trained on, its logprobs are NaN, which packing masks.

        Args:
            agent: name of the agent that asked for it.
            calls: tool calls that were parsed from it.
        """
        # Decoded from the ids: `self.text` depends on what the client asked to see.
        text = whole_characters(self.tokenizer.decode(self.ids))
        if self.stop_text:
            text = text.partition(self.stop_text)[0]
        return Turn(
            prompt_ids=self.prompt.token_ids,
            token_ids=self.ids,
            logprobs=self._behaviour if trained else np.full(len(self.ids), math.nan, np.float32),
            versions=self._versions,
            text=text,
            answer=self.tokenizer.thoughts.answer(self.prompt.token_ids, self.ids, text),
            agent=agent,
            truncated=self.finish == "length",
            messages=self.prompt.messages,
            calls=calls,
            seconds=time.monotonic() - self._began,
            routed=self._routed,
        )

    @property
    def full_text(self) -> str:
        """Text of all tokens, with the stop string and special tokens."""
        return whole_characters(self.tokenizer.decode(self.ids, skip_special=False))

    def _next_text(self) -> str:
        """Return the text that can be shown now and was not yet; set `finish` if a stop string is found."""
        # A stop string can begin in the text held back, which is never longer than the string.
        matches = [
            (position, stop) for stop in self.sampling.stop if (position := self.text.find(stop, self._shown)) >= 0
        ]
        if matches:
            position, self.stop_text = min(matches)
            self.text, self.finish = self.text[: position + len(self.stop_text) * self.keeps_stop], "stop"
        # The end of the text may begin a stop string, which clients must never see.
        held_back = 0 if self.finish else max((_overlap(self.text, stop) for stop in self.sampling.stop), default=0)
        begin, self._shown = self._shown, max(self._shown, len(self.text) - held_back)
        return self.text[begin : self._shown]

    def _token_logprobs(self, chunk: Chunk) -> list[TokenLogprob] | None:
        if self.top is None:
            return None
        entries = []
        tops = chunk.top or ((),) * len(chunk.token_ids)
        for token, logprob, top in zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), tops, strict=True):
            # A greedy completion has no behaviour logprob: report the most likely token's.
            reported_logprob = logprob if math.isfinite(logprob) else dict(top).get(token, LEAST_LOGPROB)
            top = top[: self.top]
            # `max` returns its first argument if the second is NaN.
            ids, logprobs = tuple(other for other, _ in top), tuple(max(LEAST_LOGPROB, value) for _, value in top)
            entries.append(
                TokenLogprob(
                    token=token, logprob=max(LEAST_LOGPROB, reported_logprob), top_ids=ids, top_logprobs=logprobs
                )
            )
        return entries


@dataclass(kw_only=True, eq=False)
class RequestState:
    """State of one request of a client."""

    session: Session | None
    """The request's session; None outside of sessions."""
    agent: str = ""
    """Name that the client gave itself; "" if it gave none."""
    model: str = ""
    """The model's name as the client wrote it."""
    adapter: str = ""
    """Name of the adapter to sample with; "" for the model itself."""
    param: str = ""
    """Parameter with the messages, prompts or input."""
    body_bytes: int = 0
    streamed: bool = False
    num_completions: int = 1
    """Number of completions requested."""
    only_counts: bool = False
    """True if the request only counts tokens and decodes no completion."""
    converted: Any = None
    """vLLM's chat request for Anthropic's API; the raw input for Responses; None otherwise."""
    choices: list[CompletionChoice] = field(default_factory=list)
    """Completions started so far, of all prompts."""
    started: bool = False
    """True once an engine has answered."""
    failure: BaseException | None = None
    """First error of the engines; kept here because vLLM's server turns it into text for the client."""
    decoding: list[asyncio.Future[None]] = field(default_factory=list)
    """Tasks that decode the completions, one for each prompt."""

    @property
    def version(self) -> int:
        """Weight version of the last token; -1 before the first."""
        return self.choices[-1].version if self.choices else -1

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, each prompt counted once."""
        return sum(len(choice.prompt.token_ids) for choice in self.choices if choice.index == 0)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of all completions so far."""
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def whole(self) -> bool:
        """True once all requested completions have finished."""
        return len(self.choices) == self.num_completions and all(choice.finish for choice in self.choices)

    def fail(self, error: BaseException) -> None:
        """Record an error, unless one is already recorded."""
        if self.failure is None:
            self.failure = error

    async def end(self) -> None:
        """Abort all completions still on an engine, and wait until they are off."""
        for task in self.decoding:
            task.cancel()
        await asyncio.gather(*self.decoding, return_exceptions=True)


REQUEST: ContextVar[RequestState] = ContextVar("request")
"""The current request; a context variable because vLLM's server cannot carry our state."""


def _overlap(text: str, stop: str) -> int:
    """Return the length of the text's longest suffix that is a proper prefix of a stop string."""
    # A whole stop string would have been found before: the overlap is shorter than the string.
    tail = text[max(0, len(text) - len(stop) + 1) :]
    position = tail.find(stop[0])
    while position >= 0 and not stop.startswith(tail[position:]):
        position = tail.find(stop[0], position + 1)
    return len(tail) - position if position >= 0 else 0
