"""Indexes of recent answers, of fixed size, that find what followed a text's ending before."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

_ANCHORS = (8, 3)
"""Numbers of tokens that must recur for a place to be found, the larger one first: in a text of many similar lines, the
last few tokens occur at more places than are compared, and nearly all of these continue differently."""
_LONGEST = 24
"""Maximum length of a match; longer ones count as this long."""
_PLACES = 16
"""Maximum number of places that are compared, the most recent first."""
_DOUBT = 2
"""Weight of "something else follows", in tokens of a match."""
_LEAST = 0.25
"""A draft ends before a token whose estimated probability of being accepted is below this."""
_RECENT = (1 << _LONGEST) - 1
"""Bits of the tokens by which a guide is judged."""
_LEAST_HITS = 6
"""Minimum number of these tokens that a guide must have predicted."""
_PROMPT = 4096
"""Maximum number of a prompt's last tokens that are indexed."""
_TASKS = 4096
"""Maximum number of prompts that are remembered."""
_FOLLOWED = 2048
"""Maximum number of requests that are remembered, so that those interrupted by a weight update are found again."""


@dataclass
class Guide:
    """A place in a text that continues as a request does except for single tokens: after a different digit in a sum,
    a sibling still predicts the tokens that follow."""

    place: int = -1
    """Place of the token that the request is expected to have next; -1 if there is none."""
    hits: int = 0
    """Bits of the request's last tokens, the last one lowest: 1 where it had the expected token."""


@dataclass
class _Voter:
    """A place that votes for the next token of a draft."""

    place: int
    length: int
    """Number of tokens of its match, and so its weight."""
    before: int
    """The token before the place; -1 if there is none."""
    token: int
    """The token at the place."""
    instead: dict[tuple[int, int], int]
    """Substitutions to repeat, by two consecutive tokens of the place's own text: the token that the drafted text had
    in place of the second one. The latest substitution counts."""
    proposes: int = -1


class SuffixIndex:
    """Tokens of texts in a ring, chained by hashes of their last tokens and of a key, such as the texts' task.

    index = SuffixIndex(1 << 20)
    for token in (5, 6, 7, 8):
        end = index.append(token, key=1, end=end)
    index.draft((5, 6, 7), key=1, max_tokens=4)  # [8]

    Args:
        size: maximum number of tokens, a power of 2; the oldest are overwritten. Each takes 52 bytes.
    """

    def __init__(self, size: int) -> None:
        assert size & (size - 1) == 0, "a power of 2"
        self._mask = size - 1
        self._tokens = array("i", bytes(4 * size))
        self._before = array("q", b"\xff" * 8 * size)
        """Place of the token before, in the same text; -1 if there is none."""
        self._after = array("q", b"\xff" * 8 * size)
        self._endings = [_Endings(length, size) for length in _ANCHORS]
        self._written = 0
        """Places are numbered in the order of writing and never reused; a place's slot is."""

    def append(self, token: int, *, key: int, end: int) -> int:
        """Append a token to a text that ends at place `end`, -1 for a new text; returns the token's place."""
        place, slot = self._written, self._written & self._mask
        self._written += 1
        # The text's end was overwritten: it goes on as a new text.
        if not self._kept(end):
            end = -1
        self._tokens[slot], self._before[slot], self._after[slot] = token, end, -1
        if end >= 0:
            self._after[end & self._mask] = place
        tail = self.tail(place, max(_ANCHORS))
        for endings in self._endings:
            endings.append(place, tail, key)
        return place

    def tail(self, place: int, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens of a text up to a place, the last first."""
        tokens, before, mask = self._tokens, self._before, self._mask  # a draft takes most of its time here
        # Older places are overwritten, and their slots hold another text's tokens.
        oldest = max(0, self._written - mask - 1)
        tail_tokens: list[int] = []
        while place >= oldest and len(tail_tokens) < max_tokens:
            tail_tokens.append(tokens[place & mask])
            place = before[place & mask]
        return tail_tokens

    def pass_by(self, guide: Guide, token: int) -> None:
        """Move a guide past the next token of its request; one that is wrong too often is given up."""
        if self._kept(guide.place):
            slot = guide.place & self._mask
            guide.hits = (guide.hits << 1 | (self._tokens[slot] == token)) & _RECENT
            guide.place = self._after[slot] if guide.hits.bit_count() >= _LEAST_HITS else -1

    def draft(self, place: int, *, key: int, max_tokens: int, guide: Guide | None = None) -> list[int]:
        """Return the tokens that may follow a text up to a place, at most `max_tokens`.

        Each place where the text's last tokens occurred before votes for what followed there, with the length of its
        match, against `_DOUBT`. The winner's share estimates how likely it is; the draft ends where the product of
        these shares falls below `_LEAST`. A place whose text repeats two tokens of shortly before votes for what the
        drafted text had instead of the second one: a sibling predicts the repetition of a number that differs from
        its own.

        Args:
            guide: becomes the longest match if that is long; if there is none, it votes with its hits.
        """
        ending = self.tail(place, _LONGEST)
        votes = self._matches(place, ending, key)
        if guide is not None:
            # A sibling that agrees for long becomes the guide, and goes on predicting past single differences.
            best_place, length = max(votes, key=itemgetter(1), default=(-1, 0))
            if length >= max(_ANCHORS):
                guide.place, guide.hits = best_place, (1 << length) - 1
            elif self._kept(guide.place):
                votes.append((guide.place, guide.hits.bit_count()))
        voters = [self._voter(match_place, length, ending) for match_place, length in votes]
        drafted: list[int] = []
        probability = 1.0
        while voters and len(drafted) < max_tokens:
            shares: dict[int, int] = {}
            for voter in voters:
                voter.proposes = voter.instead.get((voter.before, voter.token), voter.token)
                shares[voter.proposes] = shares.get(voter.proposes, 0) + voter.length
            best = max(shares, key=shares.__getitem__)
            # Votes against doubt: one short match gives a small share, several long ones that agree nearly 1.
            probability *= shares[best] / (sum(shares.values()) + _DOUBT)
            if probability < _LEAST:
                break
            drafted.append(best)
            voters = [voter for voter in voters if voter.proposes == best and self._move(voter)]
        return drafted

    def _voter(self, place: int, length: int, ending: Sequence[int]) -> _Voter:
        """Return the voter of a place, for a text that ends with these tokens (last token first)."""
        previous_tokens = self.tail(self._before[place & self._mask], _LONGEST + 1)
        pairs = itertools.pairwise(previous_tokens) if length < _LONGEST else ()
        instead = {
            (before, token): drafted_token
            for (token, before), drafted_token in reversed(list(zip(pairs, ending, strict=False)))
        }
        return _Voter(
            place, length, previous_tokens[0] if previous_tokens else -1, self._tokens[place & self._mask], instead
        )

    def _move(self, voter: _Voter) -> bool:
        """Move a voter past a token that it proposed; returns False if its text ends there."""
        voter.place, voter.before = self._after[voter.place & self._mask], voter.token
        voter.token = self._tokens[voter.place & self._mask]
        voter.length = min(voter.length + 1, _LONGEST)
        return voter.place >= 0

    def _matches(self, place: int, ending: Sequence[int], key: int) -> list[tuple[int, int]]:
        """Return places after recent occurrences of the ending, with the lengths of the matches, in tokens."""
        matches: list[tuple[int, int]] = []
        for endings in self._endings:
            for candidate in endings.recent(ending, key):
                # Chains lead from newer to older places: past the first overwritten one, all are.
                if not self._kept(candidate):
                    break
                # Not the text's own end, nor another text's, after which nothing follows.
                if candidate != place and (next_place := self._after[candidate & self._mask]) >= 0:
                    length = self._common(candidate, ending)
                    # Hashes may collide, so tokens are compared.
                    if length >= endings.length:
                        matches.append((next_place, length))
            # Long anchors come first, and short ones only if those found nothing.
            if matches:
                break
        return matches

    def _common(self, place: int, ending: Sequence[int]) -> int:
        """Return the length of the common ending of a text up to a place and of `ending` (last token first)."""
        for length, token in enumerate(ending):
            if not self._kept(place) or self._tokens[place & self._mask] != token:
                return length
            place = self._before[place & self._mask]
        return len(ending)

    def _kept(self, place: int) -> bool:
        return place >= 0 and place >= self._written - self._mask - 1


class _Endings:
    """Places by the hash of the `length` tokens up to them and of a key, in rings of `size` places."""

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self._mask = size - 1
        self._earlier = array("q", b"\xff" * 8 * size)
        """Previous place with the same hash, -1 if there is none."""
        self._last = array("q", b"\xff" * 8 * size)
        """Last place of each hash."""

    def append(self, place: int, tail: Sequence[int], key: int) -> None:
        """Add the next place, after these tokens (last token first)."""
        # The slot's previous owner had a chain of its own.
        self._earlier[place & self._mask] = -1
        if len(tail) >= self.length:
            head = self._hash(tail, key)
            self._earlier[place & self._mask], self._last[head] = self._last[head], place

    def recent(self, tail: Sequence[int], key: int) -> Iterator[int]:
        """Yield the last `_PLACES` places with the hash of these tokens, the most recent first.

        A place that was overwritten must end the iteration.
        """
        place = self._last[self._hash(tail, key)] if len(tail) >= self.length else -1
        for _ in range(_PLACES):
            if place < 0:
                return
            yield place
            place = self._earlier[place & self._mask]

    def _hash(self, tail: Sequence[int], key: int) -> int:
        return hash((key, *tail[: self.length])) & self._mask


class AnswerIndex:
    """Drafts the rest of an answer from other answers to the same prompt, and from the request's own text.

    A prompt that begins with another request's whole prompt belongs to the same task: a later turn of a sibling, or
    the rest of an answer that another engine began.

    Args:
        size: maximum number of tokens, as for `SuffixIndex`.
    """

    def __init__(self, size: int) -> None:
        self._index = SuffixIndex(size)
        self._tasks: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Number of each task and the length of its prompt, by the prompt's hash; the most recently used last."""
        self._lengths: Counter[int] = Counter()
        self._made = 0
        self._requests: OrderedDict[str, _IndexedRequest] = OrderedDict()

    def follow(self, request: str, tokens: npt.NDArray[np.int32], prompt_tokens: int) -> None:
        """Index the tokens that a request gained since the last call.

        Args:
            tokens: `[T]`, its prompt and its answer so far.
            prompt_tokens: length of its prompt.
        """
        followed = self._requests.get(request)
        if followed is None:
            task, shared = self._task(tokens[:prompt_tokens])
            followed = self._requests[request] = _IndexedRequest(
                task=task, end=-1, num_seen=max(shared, prompt_tokens - _PROMPT)
            )
            if len(self._requests) > _FOLLOWED:
                self._requests.popitem(last=False)
        for token in tokens[followed.num_seen :].tolist():
            self._index.pass_by(followed.guide, token)
            followed.end = self._index.append(token, key=followed.task, end=followed.end)
        followed.num_seen = len(tokens)
        self._requests.move_to_end(request)

    def draft(self, request: str, max_tokens: int) -> list[int]:
        """Return tokens that may follow a request's, at most `max_tokens`."""
        followed = self._requests[request]
        return self._index.draft(followed.end, key=followed.task, max_tokens=max_tokens, guide=followed.guide)

    def _task(self, prompt: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Return the number of a prompt's task, and how many of its tokens the index has from an earlier request."""
        # The shortest prompt that is a prefix of this one is the task's first turn, shared by all its siblings.
        for length in sorted(self._lengths):
            if length > len(prompt):
                break
            task = self._tasks.get(digest := hash(prompt[:length].tobytes()))
            if task is not None and task[1] == length:
                self._tasks.move_to_end(digest)
                return task
        self._made += 1
        self._tasks[hash(prompt.tobytes())] = self._made, len(prompt)
        self._lengths[len(prompt)] += 1
        if len(self._tasks) > _TASKS:
            _, (_, length) = self._tasks.popitem(last=False)
            self._lengths[length] -= 1
            self._lengths += Counter()  # drops zeros
        return self._made, 0


@dataclass
class _IndexedRequest:
    """A request whose tokens are in the index."""

    task: int
    end: int
    """Place of its last token."""
    num_seen: int
    """Number of its tokens that were indexed or skipped."""
    guide: Guide = field(default_factory=Guide)
