"""One completion, put together from the chunks of one engine after another; and the check of each chunk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

from forge_rl.data.tokenizer import TextStream, Tokenizer
from forge_rl.errors import ReplicaError
from forge_rl.types import Chunk, Sampling, Turn

_MOST_FAILURES = 3
"""Engines that may die in a row without a token: a completion that kills them must not kill them all."""
_ROUNDING = 1e-4
"""Tolerance by which a logprob may exceed 0."""

OpenStream: TypeAlias = Callable[[tuple[int, ...], Sampling], AbstractAsyncContextManager[AsyncIterator[Chunk]]]
"""Opens the stream of one engine for a prompt; leaving the context ends the request."""


class ResumableCompletion:
    """Decodes one completion. When an engine dies, another one is shown all tokens so far and decodes the rest.

    completion = ResumableCompletion(prompt_ids, Sampling(max_tokens=64), tokenizer)
    turn = await completion.run(open_stream)
    """

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, tokenizer: Tokenizer) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids: list[int] = []
        self.text = ""
        """Text handed out so far."""
        self.finish = ""
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._decoder: TextStream | None = None
        self._failures = self._resumed_at = 0
        self._known = ""
        """Text of all tokens, once a second engine decodes."""

    @property
    def shown(self) -> tuple[int, ...]:
        """Prompt of the next engine: the completion's own, and all tokens so far."""
        return self.prompt_ids + tuple(self.token_ids)

    @property
    def rest(self) -> Sampling:
        """Settings for the tokens that are missing."""
        done = len(self.token_ids)
        if not done:
            return self._sampling
        seed = self._sampling.seed
        return replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - done,
            # Not the same random numbers again.
            seed=None if seed is None else (seed + 1_000_003 * done) % 2**63,
            # A stop text may have begun in the tokens that this engine has only as its prompt.
            stop=(),
        )

    async def stream(self, open_stream: OpenStream) -> AsyncGenerator[Chunk, None]:
        """Decode it, engine after engine; the last chunk, and no other, has a `finish`.

        Raises:
            ReplicaError: several engines in a row died without a token.
        """
        while True:
            try:
                async with open_stream(self.shown, self.rest) as chunks:
                    async for chunk in chunks:
                        yield self.add(chunk)
                        if self.finish:
                            return
            except ReplicaError as error:
                self.fail_over(error)

    async def run(self, open_stream: OpenStream) -> Turn:
        """Decode it to its end; raises as `stream` does."""
        async with contextlib.aclosing(self.stream(open_stream)) as chunks:
            async for _ in chunks:
                pass
        return self.turn()

    def add(self, chunk: Chunk) -> Chunk:
        """Append an engine's next chunk; returns it as it is in the whole completion.

        An engine that resumes for another does not see a character or a stop text that began before it: text and end
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

    def fail_over(self, error: ReplicaError) -> None:
        """Prepare for the next engine, as this one died.

        Raises:
            ReplicaError: `error`, if several engines in a row died without a token.
        """
        self._failures = 1 if len(self.token_ids) > self._resumed_at else self._failures + 1
        self._resumed_at = len(self.token_ids)
        if self._failures == _MOST_FAILURES:
            raise error
        if self._decoder is None and self.token_ids:
            self._decoder = self._tokenizer.text_stream(self.prompt_ids)
            self._known = "".join(self._decoder.add(token) for token in self.token_ids)

    def turn(self) -> Turn:
        """Return the whole completion, once it has ended."""
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
    """Check what an engine sent; returns why it is invalid, or "" if it is valid.

    `drawn` tokens of the completion came before it; `versions` are those that the engine may serve since then.
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
            return f"{drawn + count} tokens came, and {sampling.max_tokens} were requested"
        for token in chunk.token_ids:
            if not 0 <= token < vocab_size:
                return f"token {token} is not one of {vocab_size}"
        for logprob in chunk.logprobs if sampling.temperature > 0 else ():
            if not -math.inf < logprob <= _ROUNDING:
                return f"a logprob is {logprob}"
    except TypeError as error:
        return f"a chunk holds values of a wrong type: {error}"
    for version in chunk.versions:
        if version not in versions:
            return f"a token is of version {version}, where the engine serves {' or '.join(map(str, versions))}"
    if not isinstance(chunk.text, str) or chunk.finish not in ("", "stop", "length"):
        return f"a chunk has the finish {chunk.finish!r} and the text {chunk.text!r}"
    return ""
