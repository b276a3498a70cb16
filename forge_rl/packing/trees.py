"""Prefix trees: groups segments that share prefixes, and assigns the trees to rows of similar length."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from forge_rl.token_arrays import Segment
from forge_rl.types import Episode


@dataclass(frozen=True, eq=False)
class Branch:
    """One segment in the trainer's form; arrays are [T], entry t describes token t, truncated after the last target."""

    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]
    advantages: npt.NDArray[np.float32]
    observed: npt.NDArray[np.bool_]
    """True for tokens between two turns: the environment's answers, and the template's tokens around them."""
    columns: Mapping[str, npt.NDArray[Any]]
    """[T] or [T, k] each, 0 where the mask is False."""
    episode: int
    segment: int
    routed: npt.NDArray[Any] | None
    """Experts of each token, see `Segment.routed`; None if unknown."""

    @property
    def inputs(self) -> int:
        """Number of positions without sharing: the last token is only a target."""
        return len(self.token_ids) - 1

    @cached_property
    def claims(self) -> npt.NDArray[np.bool_]:
        """[T], True for tokens whose values in the row are this segment's."""
        claims: npt.NDArray[np.bool_] = self.mask | self.observed
        return claims


@dataclass(frozen=True, eq=False)
class Tree:
    """All or some of a group's segments that share prefixes: a tree of any depth.

    Segments with a common prefix are neighbours, so the length of the prefix that each shares with the one before
    describes the whole tree.
    """

    key: tuple[int, int]
    """Indexes of the group and of the tree in it; the pieces of a split tree keep its key."""
    all_branches: tuple[Branch, ...]
    """All segments of the tree, including those in other pieces of it."""
    shares: tuple[int, ...]
    """Number of positions that each segment of the whole tree shares with the one before; 0 for the first."""
    indices: tuple[int, ...]
    """Indexes in all_branches of the segments that this tree holds, ascending."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Segments that this tree holds."""
        return tuple(self.all_branches[index] for index in self.indices)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Number of positions that each segment shares with the one before it here; 0 for the first."""
        # Lexicographic neighbours: two segments share the least of what each one between them shares with its
        # predecessor.
        ranges = pairwise(self.indices)
        return (0, *(min(self.shares[before + 1 : index + 1]) for before, index in ranges))

    @cached_property
    def size(self) -> int:
        """Number of positions."""
        return sum(branch.inputs - num_shared for branch, num_shared in zip(self.branches, self.shared, strict=True))

    def split(self, parts: int) -> list[Tree]:
        """Split into pieces of similar size, each with its own copy of their common prefix and at least one segment."""
        parts = min(parts, len(self.indices))
        if parts <= 1:
            return [self]
        if len(set(self.shared[1:])) == 1:  # one prefix: segments can be dealt in any way
            bins = _balance([branch.inputs - self.shared[1] for branch in self.branches], parts)
            return [self._piece(sorted(bin_)) for bin_ in bins if bin_]
        low, high = max(branch.inputs for branch in self.branches), self.size
        while low < high:  # the smallest limit that takes no more parts
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._runs(middle)) <= parts else (middle + 1, high)
        return self._runs(low)

    def fit(self, limit: int) -> list[Tree]:
        """Split into as few pieces as possible of at most limit tokens, which no single segment exceeds."""
        # Nested prefixes: only neighbours may stay together, or prefixes would be copied.
        if len(set(self.shared[1:])) > 1:
            return self._runs(limit)
        for parts in range(1, len(self.indices) + 1):
            pieces = self.split(parts)
            if max(piece.size for piece in pieces) <= limit:
                return pieces
        raise AssertionError(f"a segment of tree {self.key} is longer than {limit} tokens")

    def _runs(self, limit: int) -> list[Tree]:
        """Split between neighbours, into as few pieces of at most limit tokens as that allows."""
        runs: list[list[int]] = []
        size = 0
        for place, (branch, num_shared) in enumerate(zip(self.branches, self.shared, strict=True)):
            # In the run of its predecessor, a segment adds only what it does not share; a new run copies the prefix.
            if runs and size + branch.inputs - num_shared <= limit:
                runs[-1].append(place)
                size += branch.inputs - num_shared
            else:
                runs.append([place])
                size = branch.inputs
        return [self._piece(run) for run in runs]

    def _piece(self, places: Sequence[int]) -> Tree:
        return replace(self, indices=tuple(self.indices[place] for place in places))


def make_branch(
    segment: Segment,
    episode: int,
    index: int,
    advantages: float | npt.NDArray[np.float32],
    columns: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
    context_turns: Sequence[int] = (),
) -> Branch:
    """Turn segment `index` of an episode into a branch; tokens without a finite logprob are not trained.

    Args:
        advantages: the episode's advantage, or one per token of the segment, [T].
        columns: other values of the segment's tokens, [T] or [T, k].
        context_turns: turns that another episode trains, and that are only context here.
    """
    # A turn that an earlier episode trains stays in the segment as context.
    trained = segment.trained & ~np.isin(segment.turns, context_turns)
    mask = trained & np.isfinite(segment.logprobs)
    assert not mask[:1].any(), "the first token of a segment has no context that could predict it"
    # Nothing after the last target has a gradient or is seen by one.
    end = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
    return Branch(
        token_ids=segment.token_ids[:end],
        mask=mask[:end],
        behaviour=np.where(mask, segment.logprobs, np.float32(0))[:end],
        versions=np.where(mask, segment.versions, np.int32(-1))[:end],
        turns=np.where(mask, segment.turns, np.int32(-1))[:end],
        advantages=np.where(mask, advantages, np.float32(0))[:end].astype(np.float32, copy=False),
        # The prompt before the first trained turn is no observation.
        observed=(~segment.trained & np.logical_or.accumulate(trained))[:end],
        columns={name: values[:end] for name, values in columns.items()},
        episode=episode,
        segment=index,
        routed=segment.routed,
    )


def first_holders(episodes: Sequence[Episode]) -> list[list[tuple[int, int]]]:
    """Return, for each turn of each episode of a group, the index of the first episode that has this turn, and the
    turn's index there.

    Unless worlds forked, that is the episode itself.
    """
    first: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
    return [
        [
            # Within a group, a node and the turn's number identify a turn.
            first.setdefault((turn.branch, place), (number, place)) if turn.branch else (number, place)
            for place, turn in enumerate(episode.turns)
        ]
        for number, episode in enumerate(episodes)
    ]


def decoded_tokens(groups: Iterable[Sequence[Episode]]) -> int:
    """Return the number of tokens that were generated for groups; turns that episodes have in common count once."""
    return sum(
        len(turn.token_ids)
        for episodes in groups
        for number, holders in enumerate(first_holders(episodes))
        for turn, (first, _) in zip(episodes[number].turns, holders, strict=True)
        if first == number
    )


def build_trees(branches: list[Branch], group: int, *, share_prefixes: bool) -> list[Tree]:
    """Lay the segments of group `group` of a batch into trees, one for all that share their first positions."""
    if not share_prefixes:
        return [Tree((group, i), (branch,), (0,), (0,)) for i, branch in enumerate(branches)]
    # In lexicographic order, a segment shares most with its neighbour.
    # Big-endian bytes order as the token ids themselves do; ids are not negative.
    sorted_branches = sorted(branches, key=lambda b: (b.token_ids.astype(">i4").tobytes(), b.episode, b.segment))
    shares: list[int] = []
    tokens, claims = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    for branch in sorted_branches:
        num_shared = _shared(tokens, claims, branch)
        shares.append(num_shared)
        claimed = branch.claims.copy()
        if num_shared:
            # The path to this segment keeps the targets that earlier segments claimed on it.
            claimed[: num_shared + 1] |= claims[: num_shared + 1]
        tokens, claims = branch.token_ids, claimed
    starts = [index for index, shared in enumerate(shares) if shared == 0]
    spans = list(zip(starts, [*starts[1:], len(sorted_branches)], strict=True))
    spans.sort(key=lambda span: min((branch.episode, branch.segment) for branch in sorted_branches[span[0] : span[1]]))
    return [
        Tree((group, i), tuple(sorted_branches[start:end]), tuple(shares[start:end]), tuple(range(end - start)))
        for i, (start, end) in enumerate(spans)
    ]


def _shared(tokens: npt.NDArray[np.int32], claims: npt.NDArray[np.bool_], branch: Branch) -> int:
    """Return the number of positions that a segment shares with the path before it.

    A position has one target. So it is shared as long as the tokens are equal and at most one of the two claims the
    next token. It is not shared if the next tokens differ and one of them is claimed.
    """
    size = min(len(tokens), len(branch.token_ids))
    ends = (tokens[:size] != branch.token_ids[:size]) | (claims[:size] & branch.claims[:size])
    if not ends.any():
        return max(0, size - 1)  # the last token of the shorter one is only a target
    end = int(ends.argmax())
    return max(0, end - int(claims[end] or branch.claims[end]))


def assign_rows(trees: list[Tree], *, seq_len: int, shares: int) -> list[list[Tree]]:
    """Assign trees to rows: as many as first-fit decreasing needs, rounded up to a multiple of shares, then balanced.

    Shares process their rows in lockstep, so a plan's cost is the length of the longest row of each step, summed over
    steps. Finer splits of trees balance the rows better but copy prefixes; the cheapest of several grains is used.
    """
    if not trees:
        return []
    # First the fewest rows, then the cheapest way to fill as many of them evenly.
    pieces = [piece for tree in trees for piece in tree.fit(seq_len)]
    first = _first_fit(pieces, seq_len)
    count = round_up(len(first), shares)
    plans: list[list[list[Tree]]] = [first + [[] for _ in range(count - len(first))]]
    # Tokens of a row if all were equal.
    fair = max(1.0, sum(tree.size for tree in trees) / count)
    for grain in (0, 1, 2, 4):
        finer = [part for piece in pieces for part in piece.split(max(1, math.ceil(piece.size * grain / fair)))]
        bins = _balance([piece.size for piece in finer], count)
        plan = [_merge([finer[i] for i in bin_]) for bin_ in bins]
        if max(row_size(row) for row in plan) <= seq_len:
            plans.append(plan)

    def cost(plan: list[list[Tree]]) -> tuple[int, int]:
        sizes = sorted((row_size(row) for row in plan), reverse=True)
        # Rows are sorted, so every `shares`-th one is the longest of its step. Ties go to fewer copies of prefixes.
        return sum(sizes[::shares]), sum(sizes)

    best = min(plans, key=cost)
    rows = sorted(best, key=row_size, reverse=True)
    sides = [rows[i : i + shares] for i in range(0, count, shares)]
    # Every other step is reversed, so that no share always gets the longest row.
    return [row for i, side in enumerate(sides) for row in (side[::-1] if i % 2 else side)]


def _first_fit(pieces: list[Tree], limit: int) -> list[list[Tree]]:
    """Put each piece, longest first, into the first row with enough room (first-fit decreasing)."""
    rows: list[list[Tree]] = []
    sizes: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        i = next((i for i, size in enumerate(sizes) if size + piece.size <= limit), len(rows))
        if i == len(rows):
            rows.append([])
            sizes.append(0)
        rows[i].append(piece)
        sizes[i] += piece.size
    return [_merge(row) for row in rows]


def _balance(sizes: list[int], bins: int) -> list[list[int]]:
    """Distribute indexes of sizes over bins of similar load: largest first, each into the least loaded bin."""
    assignment: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, i) for i in range(bins)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, i = heap[0]
        assignment[i].append(index)
        heapq.heapreplace(heap, (load + sizes[index], i))
    return assignment


def _merge(row: list[Tree]) -> list[Tree]:
    """Join pieces of the same tree that are in one row, so that they share their prefixes again."""
    trees_by_key: dict[tuple[int, int], Tree] = {}
    for piece in sorted(row, key=lambda piece: piece.key):
        indices = trees_by_key[piece.key].indices if piece.key in trees_by_key else ()
        trees_by_key[piece.key] = replace(piece, indices=tuple(sorted(indices + piece.indices)))
    return list(trees_by_key.values())


def row_size(row: list[Tree]) -> int:
    return sum(tree.size for tree in row)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
