"""One completion, assembled from the chunks of successive engines, and the validation of chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forge_rl.errors import PoisonError, ReplicaError
from forge_rl.token_arrays import CacheUse, Chunk, ScoredTokens, TokenIds, read_only
from forge_rl.tokens.text_stream import TextStream
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling, Turn

GATHER_S = 0.2
"""Seconds for which an engine gathers tokens before it sends them, if nobody reads them live."""
_MOST_FAILURES = 3
"""Maximum consecutive engine deaths without a token: a completion that kills engines must not kill all of them."""
_MOST_DEATHS = 12
"""Maximum engine deaths per completion, with or without a token."""
_ROUNDING = 1e-4
"""Tolerance by which a logprob may exceed 0."""

Observer: TypeAlias = Callable[[Chunk], bool | None]
"""Called with each chunk of a completion, the last of which has a `finish`; returning True ends the completion."""


class ResumableCompletion:
    """One completion. If its engine dies, another one is prompted with all tokens so far and decodes the rest.

        completion = ResumableCompletion(prompt_ids, Sampling(max_tokens=64), tokenizer)
        while not completion.finish:
            try:
                await generator.decode(completion)  # calls completion.add with each chunk
            except ReplicaError as error:
                completion.fail_over(error)
        turn = completion.turn()

    Args:
        observe: called with each chunk; may end the completion.
        gather_s: seconds for which engines gather tokens into a chunk; 0 sends each at once.
    """

    def __init__(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        tokenizer: Tokenizer,
        *,
        observe: Observer | None = None,
        gather_s: float = GATHER_S,
    ) -> None:
        self.prompt_ids = read_only(np.asarray(prompt_ids, np.int32))
        self.tokens = 0
        """Number of tokens so far."""
        self.text = ""
        """Text emitted so far."""
        self.finish = ""
        """Finish reason: "stop" or "length"; "" before the end."""
        self.gather_s = gather_s
        self.sampling = sampling
        self._tokenizer = tokenizer
        self._observe = observe
        self._chunks: list[Chunk] = []
        """Chunks of the completion so far."""
        self._decoder: TextStream | None = None
        self._failures = self._deaths = self._resumed_at = 0
        self._known = ""
        """Text of all tokens, once another engine has resumed."""

    @property
    def shown(self) -> npt.NDArray[np.int32]:
        """Prompt for the next engine: the original prompt and all tokens so far."""
        if not self._chunks:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, *(chunk.token_ids for chunk in self._chunks)])

    @property
    def suspect(self) -> bool:
        """True once several engines in a row died before a token, perhaps because of this completion."""
        return self._failures > 1 and self.tokens == self._resumed_at

    @property
    def rest(self) -> Sampling:
        """Sampling settings for the remaining tokens."""
        num_tokens = self.tokens
        if not num_tokens:
            return self.sampling
        return replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - num_tokens,
            # A stop string may begin in tokens that are in this engine's prompt.
            stop=(),
        )

    def add(self, chunk: Chunk) -> bool:
        """Append an engine's next, validated chunk; returns True if the completion ended without the engine noticing.

        An engine that resumes another's completion misses characters and stop strings that began earlier, so text and
        end are determined here, and tokens after the end are cut off.
        """
        # `_decoded` may end the chunk earlier than the engine did.
        chunk_finish = chunk.finish
        if self._decoder is not None:
            chunk = self._decoded(self._decoder, chunk)
        self._chunks.append(chunk)
        self.tokens += len(chunk.token_ids)
        self.text += chunk.text
        self.finish = chunk.finish
        if self._observe is not None and self._observe(chunk) and not self.finish:
            self.finish = "stop"
        return self.finish != chunk_finish

    def fail_over(self, error: ReplicaError) -> None:
        """Prepare for the next engine after this one died.

        Raises:
            PoisonError: several engines in a row died without a token, or too many in total.
            ReplicaError: `error`, if another engine cannot resume, because constraints and penalties apply only to
                tokens that their own engine decoded; also if an engine hung under a constraint, which may be the cause.
        """
        if self.sampling.extra and (self.tokens or error.message.startswith("hung")):
            raise error
        # An engine that went away before it had the request says nothing about the request.
        if error.blamed is not False:
            self._deaths += 1
            # Only deaths in a row without a token point to the request; a token starts the count again.
            self._failures = 1 if self.tokens > self._resumed_at else self._failures + 1
            self._resumed_at = self.tokens
        if self._failures == _MOST_FAILURES or self._deaths == _MOST_DEATHS:
            raise PoisonError(
                f"a completion of {len(self.prompt_ids)} prompt tokens killed {self._deaths} engines and is not "
                f"retried; last cause: {error.message}",
                service=error.service,
                call=error.call,
                hint=error.hint,
            ) from error
        if self._decoder is None and self.tokens:
            self._decoder = self._tokenizer.text_stream(self.prompt_ids)
            # A character or stop string may span two engines, so the text is decoded again from the first token on.
            token_ids = self.shown[len(self.prompt_ids) :].tolist()
            self._known = "".join(self._decoder.add(token) for token in token_ids)

    def turn(self) -> Turn:
        """Return the whole completion after its end."""
        chunks = self._chunks
        # The usual case: its arrays are used as they are.
        if len(chunks) == 1:
            token_ids, logprobs, versions = chunks[0].token_ids, chunks[0].logprobs, chunks[0].versions
        else:
            token_ids = read_only(np.concatenate([chunk.token_ids for chunk in chunks]))
            logprobs = read_only(np.concatenate([chunk.logprobs for chunk in chunks]))
            versions = read_only(np.concatenate([chunk.versions for chunk in chunks]))
        return Turn.unchecked(
            prompt_ids=self.prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            text=self.text,
            answer=self._tokenizer.thoughts.answer(self.prompt_ids, token_ids, self.text),
            truncated=self.finish == "length",
            # Dead engines sent no routing; the last engine has prefilled all earlier tokens.
            routed=None
            if chunks[-1].routed is None
            else chunks[-1].routed[: len(self.prompt_ids) + len(token_ids) - 1],
        )

    def _decoded(self, decoder: TextStream, chunk: Chunk) -> Chunk:
        # The last characters may be the beginning of a stop string, all but its last one, and are not emitted yet.
        held_back = max(map(len, self.sampling.stop), default=1) - 1
        for count, token in enumerate(chunk.token_ids.tolist(), start=1):
            # A stop string that ends in this token begins at most this far back.
            search_start = max(0, len(self._known) - held_back)
            self._known += decoder.add(token)
            stop_positions = [
                position for stop in self.sampling.stop if (position := self._known.find(stop, search_start)) >= 0
            ]
            if stop_positions:
                self._known = self._known[: min(stop_positions)]
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


@dataclass
class DraftCounts:
    """Sums over chunks of what engines drafted by speculation."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    """Steps of single completions that verified a draft."""

    def note(self, chunk: Chunk) -> None:
        """Add a chunk's counts."""
        self.tokens += len(chunk.token_ids)
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted
        self.verified += chunk.verified

    @property
    def share_of_steps(self) -> float:
        """Share of the steps that verified a draft. Without one, a step yields one token of each completion."""
        return min(1.0, self.verified / max(1, self.tokens - self.accepted))


def validate_chunk(
    chunk: object, sampling: Sampling, *, num_drawn: int, vocab_size: int, versions: Collection[int]
) -> str:
    """Validate a chunk from an engine; returns why it is invalid, or "" if it is valid.

    `num_drawn` is the number of earlier tokens of the completion; `versions` are the versions that the engine may have
    served since.
    """
    if not isinstance(chunk, Chunk):
        return f"a chunk is of type {type(chunk).__name__}"
    count = len(chunk.token_ids)
    if len(chunk.logprobs) != count or len(chunk.versions) != count:
        return f"{count} tokens have {len(chunk.logprobs)} logprobs and {len(chunk.versions)} versions"
    if not 0 <= chunk.accepted <= chunk.drafted or chunk.verified < 0:
        return f"{chunk.accepted} of {chunk.drafted} drafted tokens were accepted in {chunk.verified} steps"
    if chunk.routed is not None and not chunk.finish:
        return "experts came before the end"
    if sampling.top_logprobs and len(chunk.top) != count:
        return f"{count} tokens have alternatives for {len(chunk.top)}"
    if num_drawn + count > sampling.max_tokens:
        return f"{num_drawn + count} tokens came, and {sampling.max_tokens} were requested"
    # Two comparisons instead of one for each token.
    for token in (chunk.token_ids.min(), chunk.token_ids.max()) if count else ():
        if not 0 <= token < vocab_size:
            return f"token {token} is not one of {vocab_size}"
    # NaN and infinities are no garbage in themselves: NonFiniteTokens masks and counts them.
    if sampling.temperature > 0 and (is_positive := np.isfinite(chunk.logprobs) & (chunk.logprobs > _ROUNDING)).any():
        return f"a logprob is {chunk.logprobs[is_positive][0]:g}"
    for version in set(chunk.versions.tolist()):
        if version not in versions:
            return f"a token is of version {version}, where the engine serves {' or '.join(map(str, versions))}"
    if not isinstance(chunk.text, str) or chunk.finish not in ("", "stop", "length"):
        return f"a chunk has the finish {chunk.finish!r} and the text {chunk.text!r}"
    if chunk.cache is not None and not _is_valid(chunk.cache):
        return f"a chunk has the cache use {chunk.cache!r}"
    return ""


def _is_valid(use: object) -> bool:
    if not isinstance(use, CacheUse) or not all(isinstance(value, int | float) for value in use):
        return False
    return min(use) >= 0 and use.usage <= 1


def validate_scores(scores: object, count: int, top_k: int, vocab_size: int) -> str:
    """Validate an engine's scores of `count` tokens; returns why they are invalid, or "" if they are valid."""
    if not isinstance(scores, ScoredTokens):
        return f"scores are of type {type(scores).__name__}"
    if scores.logprobs.shape != (count,):
        return f"{count} tokens have logprobs of shape {list(scores.logprobs.shape)}"
    for top in (scores.top_ids, scores.top_logprobs):
        if top.shape != (count, top_k):
            return f"the {top_k} most likely tokens at {count} have shape {list(top.shape)}"
    if scores.top_ids.size and not (scores.top_ids.min() >= 0 and scores.top_ids.max() < vocab_size):
        return f"a token is not one of {vocab_size}"
    for logprobs in (scores.logprobs, scores.top_logprobs):
        if (is_positive := logprobs > _ROUNDING).any():
            return f"a logprob is {logprobs[is_positive][0]:g}"
    return ""
