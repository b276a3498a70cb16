"""One answer, put together from the chunks of one engine after another; and what is wrong with a chunk."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from forge_rl.data.tokenizer import TextStream, Tokenizer
from forge_rl.errors import ReplicaError
from forge_rl.types import Chunk, Sampling, Turn

_MOST_FAILURES = 3
"""So many engines may die at an answer, one after another without a token: it must not kill them all."""
_ROUNDING = 1e-4
"""A logprob may be above 0 by so much."""


class ResumableCompletion:
    """Collects an answer. When an engine dies, another one is shown what there is, and draws what is left.

    Args:
        prompt_ids: everything that the first engine is shown.
        sampling: how the whole answer is drawn.
        tokenizer: of the model.
    """

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, tokenizer: Tokenizer) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids: list[int] = []
        self.text = ""
        """As far as it was handed out."""
        self.finish = ""
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._decoder: TextStream | None = None
        self._failures = self._begun = 0
        self._known = ""
        """Text of all tokens, once an engine has gone on for another."""

    @property
    def shown(self) -> tuple[int, ...]:
        """What the next engine is shown."""
        return self.prompt_ids + tuple(self.token_ids)

    @property
    def rest(self) -> Sampling:
        """What the next engine is to draw."""
        done = len(self.token_ids)
        if not done:
            return self._sampling
        seed = self._sampling.seed
        return replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - done,
            # Not the same random numbers again.
            seed=None if seed is None else (seed + 1_000_003 * done) % 2**63,
            # One may have begun in the tokens that this engine has only as its prompt.
            stop=(),
        )

    def add(self, chunk: Chunk) -> Chunk:
        """Note an engine's next chunk; returns it as it is in the whole answer.

        An engine that goes on for another knows neither a character nor a stop text that began before: text and end
        are then found here, and tokens after the end are cut off.
        """
        if self._decoder is not None:
            chunk = self._decoded(self._decoder, chunk)
        self.token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._versions += chunk.versions
        self.text += chunk.text
        self.finish = chunk.finish
        return chunk

    def move(self, error: ReplicaError) -> None:
        """The engine died; the next chunk comes from another one.

        Raises:
            ReplicaError: this one; several engines, one after another, died without a token.
        """
        self._failures = 1 if len(self.token_ids) > self._begun else self._failures + 1
        self._begun = len(self.token_ids)
        if self._failures == _MOST_FAILURES:
            raise error
        if self._decoder is None and self.token_ids:
            self._decoder = self._tokenizer.text_stream(self.prompt_ids)
            self._known = "".join(self._decoder.add(token) for token in self.token_ids)

    def turn(self) -> Turn:
        """The answer, once it has ended."""
        return Turn(
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            text=self.text,
            truncated=self.finish == "length",
        )

    def _decoded(self, decoder: TextStream, chunk: Chunk) -> Chunk:
        held_back = max(map(len, self._sampling.stop), default=1) - 1
        for count, token in enumerate(chunk.token_ids, start=1):
            searched = max(0, len(self._known) - held_back)
            self._known += decoder.add(token)
            found = [at for stop in self._sampling.stop if (at := self._known.find(stop, searched)) >= 0]
            if found:
                self._known = self._known[: min(found)]
                chunk = replace(
                    chunk,
                    token_ids=chunk.token_ids[:count],
                    logprobs=chunk.logprobs[:count],
                    versions=chunk.versions[:count],
                    top=chunk.top[:count],
                    finish="stop",
                )
                break
        end = len(self._known) if chunk.finish else len(self._known) - held_back
        return replace(chunk, text=self._known[len(self.text) : max(end, len(self.text))])


def validate_chunk(chunk: object, sampling: Sampling, *, drawn: int, vocab_size: int, versions: Collection[int]) -> str:
    """What shows that a chunk is garbage; "" if nothing does.

    Args:
        chunk: what an engine gave.
        sampling: what it was asked for.
        drawn: tokens of the answer before this chunk.
        vocab_size: V.
        versions: that the engine may have served meanwhile.
    """
    if not isinstance(chunk, Chunk):
        return f"a chunk is of type {type(chunk).__name__}"
    try:
        count = len(chunk.token_ids)
        if len(chunk.logprobs) != count or len(chunk.versions) != count:
            return f"{count} tokens have {len(chunk.logprobs)} logprobs and {len(chunk.versions)} versions"
        if sampling.top_logprobs and len(chunk.top) != count:
            return f"{count} tokens have alternatives for {len(chunk.top)}"
        if drawn + count > sampling.max_tokens:
            return f"{drawn + count} tokens came where {sampling.max_tokens} were asked for"
        for token in chunk.token_ids:
            if not 0 <= token < vocab_size:
                return f"token {token} is none of {vocab_size}"
        for logprob in chunk.logprobs if sampling.temperature > 0 else ():
            if not -math.inf < logprob <= _ROUNDING:
                return f"a logprob is {logprob}"
    except TypeError as error:
        return f"a chunk holds what does not belong there: {error}"
    for version in chunk.versions:
        if version not in versions:
            return f"a token is of version {version}, where the engine serves {' or '.join(map(str, versions))}"
    if not isinstance(chunk.text, str) or chunk.finish not in ("", "stop", "length"):
        return f"an answer ends with {chunk.finish!r} and the text {chunk.text!r}"
    return ""
