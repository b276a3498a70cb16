"""Prefix trees: groups segments that share a prefix, and assigns the trees to rows of similar length."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from forge_rl.token_arrays import Segment


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
    """True for tokens between two turns: the environment's answers, and what the template puts around them."""
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

    @property
    def shareable(self) -> int:
        """Number of tokens that may be in a shared prefix: all before the first target's predictor."""
        return int(self.mask.argmax()) - 1


@dataclass(frozen=True, eq=False)
class Tree:
    """A shared prefix and the branches that continue it."""

    key: tuple[int, int]
    """Indexes of the group and of the tree in it, kept by the pieces of a split tree."""
    prefix: int
    """Number of tokens of the shared prefix."""
    branches: tuple[Branch, ...]

    @property
    def size(self) -> int:
        return self.prefix + sum(branch.inputs - self.prefix for branch in self.branches)

    def split(self, parts: int) -> list[Tree]:
        """Split into pieces of similar size, each with its own copy of the prefix and at least one branch."""
        bins = _balance([branch.inputs - self.prefix for branch in self.branches], min(parts, len(self.branches)))
        return [replace(self, branches=tuple(self.branches[i] for i in sorted(bin_))) for bin_ in bins if bin_]

    def fit(self, limit: int) -> list[Tree]:
        """Split into as few pieces as possible of at most limit tokens, which no single branch exceeds."""
        for parts in range(1, len(self.branches) + 1):
            pieces = self.split(parts)
            if max(piece.size for piece in pieces) <= limit:
                return pieces
        raise AssertionError(f"a branch of tree {self.key} is longer than {limit} tokens")


_place = operator.attrgetter("episode", "segment")
"""Sort key of branches: their order in the batch."""


def make_branch(
    segment: Segment,
    episode: int,
    index: int,
    advantages: float | npt.NDArray[np.float32],
    columns: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
) -> Branch:
    """Turn segment `index` of an episode into a branch; tokens without a finite logprob are not trained.

    Args:
        advantages: the episode's advantage, or one per token of the segment, [T].
        columns: other values of the segment's tokens, [T] or [T, k].
    """
    mask = segment.trained & np.isfinite(segment.logprobs)
    assert not mask[:1].any(), "the first token of a segment has no context that could predict it"
    end = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
    return Branch(
        token_ids=segment.token_ids[:end],
        mask=mask[:end],
        behaviour=np.where(mask, segment.logprobs, np.float32(0))[:end],
        versions=np.where(mask, segment.versions, np.int32(-1))[:end],
        turns=np.where(mask, segment.turns, np.int32(-1))[:end],
        advantages=np.where(mask, advantages, np.float32(0))[:end].astype(np.float32, copy=False),
        observed=(~segment.trained & np.logical_or.accumulate(segment.trained))[:end],
        columns={name: each[:end] for name, each in columns.items()},
        episode=episode,
        segment=index,
        routed=segment.routed,
    )


def build_trees(branches: list[Branch], group: int, *, share_prefixes: bool) -> list[Tree]:
    """Partition the segments of a group, with this index, into trees so that sharing saves the most tokens.

    In lexicographic order, a run of segments shares the shortest prefix common to neighbours, so a small dynamic
    program finds the best partition into runs. best[j] covers the first j segments: the most tokens saved, and the
    start and prefix of the last run.
    """
    if not share_prefixes:
        return [Tree((group, i), 0, (branch,)) for i, branch in enumerate(branches)]
    branches = sorted(branches, key=lambda b: b.token_ids[: b.shareable].astype(">i4").tobytes())
    common = [_common_prefix(a.token_ids[: a.shareable], b.token_ids[: b.shareable]) for a, b in pairwise(branches)]
    best = [(0, 0, 0)]
    for j in range(1, len(branches) + 1):
        options = [(best[j - 1][0], j - 1, 0)]
        prefix = branches[j - 1].shareable
        for i in range(j - 2, -1, -1):
            prefix = min(prefix, common[i])
            if prefix == 0:
                break
            options.append((best[i][0] + (j - i - 1) * prefix, i, prefix))
        best.append(max(options, key=lambda option: option[0]))
    runs: list[tuple[int, tuple[Branch, ...]]] = []
    end = len(branches)
    while end:
        _, start, prefix = best[end]
        runs.append((prefix, tuple(sorted(branches[start:end], key=_place))))
        end = start
    runs.sort(key=lambda run: _place(run[1][0]))
    return [Tree((group, i), prefix, run) for i, (prefix, run) in enumerate(runs)]


def _common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Return the length of the common prefix."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def assign_rows(trees: list[Tree], *, seq_len: int, shares: int) -> list[list[Tree]]:
    """Assign trees to rows: as many as first-fit decreasing needs, rounded up to a multiple of shares, then balanced.

    Shares process their rows in lockstep, so a plan's cost is the length of the longest row of each step, summed over
    steps. Finer splits of trees balance the rows better but copy prefixes; the cheapest of several grains is used.
    """
    if not trees:
        return []
    pieces = [piece for tree in trees for piece in tree.fit(seq_len)]
    first = _first_fit(pieces, seq_len)
    count = round_up(len(first), shares)
    plans: list[list[list[Tree]]] = [first + [[] for _ in range(count - len(first))]]
    fair = max(1.0, sum(tree.size for tree in trees) / count)
    for grain in (0, 1, 2, 4):
        finer = [part for piece in pieces for part in piece.split(max(1, math.ceil(piece.size * grain / fair)))]
        bins = _balance([piece.size for piece in finer], count)
        plan = [_merge([finer[i] for i in bin_]) for bin_ in bins]
        if max(row_size(row) for row in plan) <= seq_len:
            plans.append(plan)

    def cost(plan: list[list[Tree]]) -> tuple[int, int]:
        sizes = sorted((row_size(row) for row in plan), reverse=True)
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
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, i) for i in range(bins)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, i = heap[0]
        filled[i].append(index)
        heapq.heapreplace(heap, (load + sizes[index], i))
    return filled


def _merge(row: list[Tree]) -> list[Tree]:
    """Join pieces of the same tree that are in one row, so that they share one prefix again."""
    merged: dict[tuple[int, int], Tree] = {}
    for piece in sorted(row, key=lambda piece: piece.key):
        held = merged[piece.key].branches if piece.key in merged else ()
        merged[piece.key] = replace(piece, branches=tuple(sorted(held + piece.branches, key=_place)))
    return list(merged.values())


def row_size(row: list[Tree]) -> int:
    return sum(tree.size for tree in row)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
