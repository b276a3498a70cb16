"""Packing: a scored batch becomes rows in which the episodes of a group share their prompt.

A tree is a prefix that several segments have in common, stored and computed once, and one branch for the rest of each.
A row holds whole trees. The attention mask (attends) lets a branch see its prefix and itself, and nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Segment


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the trainer wants its rows."""

    ranks: int = 1
    """Data-parallel ranks; the number of rows is a multiple of it."""
    row_tokens: int = 2048
    """Most tokens of a row, padding included."""
    pad_multiple: int = 1
    """A row's length is rounded up to a multiple of this: 128 where FlexAttention's blocks need it."""
    share_prefixes: bool = True
    """Store and compute a common prefix once. Off, each segment is a tree of its own with one branch."""

    def __post_init__(self) -> None:
        for name in ("ranks", "row_tokens", "pad_multiple"):
            if getattr(self, name) < 1:
                flag = "--trainer." + name.replace("_", "-")
                raise ConfigError(f"{name} is {getattr(self, name)}", mend=f"set {flag} to 1 or more")
        if self.row_tokens % self.pad_multiple:
            raise ConfigError(
                f"row_tokens is {self.row_tokens}, not a multiple of {self.pad_multiple}, to which rows are padded",
                mend=f"set --trainer.row-tokens to {_round_up(self.row_tokens, self.pad_multiple)}",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One packed row. All fields are [L]; entry t of the last seven describes targets[t], that is, token t+1."""

    token_ids: torch.Tensor
    """int64; 0 in padding."""
    positions: torch.Tensor
    """int64, position within the token's own segment: each tree starts at 0, each branch where its prefix ends."""
    trees: torch.Tensor
    """int32, the tree that a token belongs to, from 0 in each row; -1 in padding."""
    branches: torch.Tensor
    """int32, 0 for the shared prefix and padding, 1 and up for the branches of a tree."""
    targets: torch.Tensor
    """int64, the token that follows in the same prefix or branch; 0 where there is none."""
    mask: torch.Tensor
    """bool, whether the target is trained."""
    behaviour: torch.Tensor
    """float32, the engine's logprob of the target; 0 where not mask."""
    advantages: torch.Tensor
    """float32, of the target's episode; 0 where not mask."""
    versions: torch.Tensor
    """int32, version of the weights that produced the target; -1 where not mask."""
    episodes: torch.Tensor
    """int32, index into batch.episodes of the target's episode; -1 where not mask."""
    segments: torch.Tensor
    """int32, index of the target's segment within its episode; -1 where not mask."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch, packed. It has no rows when no token is left to train; the trainer then has nothing to step on."""

    rows: tuple[Row, ...]
    """A multiple of Layout.ranks. Rank r trains rows[r::ranks]; rows that run side by side are about equally long."""
    trained_tokens: int
    """Targets with mask True, over all rows and ranks: what the summed loss is divided by."""
    sequence_tokens: int
    """Input tokens of all packed segments, before sharing and padding."""
    unscored_tokens: int
    """Answer tokens that are masked because the engine gave no finite logprob for them."""
    version: int
    """The batch's: a target's lag is this minus its own version."""

    @property
    def packed_tokens(self) -> int:
        """Input tokens after sharing, padding included: what the trainer computes."""
        return sum(len(row) for row in self.rows)


def attends(trees: torch.Tensor, branches: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Whether the query at index q of a row sees the key at index k.

    It does iff k <= q, both are of the same tree, and the key is in the shared prefix or in the query's own branch.
    Padding sees only padding, so that no softmax is empty. Serves as FlexAttention's mask_mod and, by broadcasting, as
    dense_mask.

    Args:
        trees: [L] int32, Row.trees.
        branches: [L] int32, Row.branches.
        q: integer tensor of query indexes, any shape.
        k: integer tensor of key indexes; broadcasts with q.

    Returns:
        bool, of the broadcast shape of q and k.
    """
    seen = (branches[k] == 0) | (branches[k] == branches[q])
    return (k <= q) & (trees[k] == trees[q]) & seen


def dense_mask(row: Row) -> torch.Tensor:
    """The whole mask of a row, [L, L] bool: True where query (first dim) sees key (second dim)."""
    index = torch.arange(len(row), device=row.trees.device)
    return attends(row.trees, row.branches, index[:, None], index[None, :])


def pack(batch: Batch, advantages: torch.Tensor, layout: Layout, *, drop_uniform: bool = True) -> Packed:
    """Lay the segments of a batch into rows with shared prefixes, balanced over ranks. The result is deterministic.

    The shared prefix of a tree ends before the token that predicts the first answer token of any of its branches, so
    each trained token is the target of exactly one position. What follows the last trained token's predictor is left
    out: nothing depends on it. Answer tokens without a finite logprob are masked and counted in unscored_tokens.

    Args:
        batch: the scored batch.
        advantages: [P, G] float32, one for each episode; its segments share it.
        layout: what the trainer needs.
        drop_uniform: leave out groups with equal rewards: their advantages are 0, so the surrogate has no gradient.
            Keep them when another term (a KL penalty) should still reach them.

    Returns:
        Rows of which trained_tokens may be 0: then there are no rows at all.

    Raises:
        ConfigError: a segment does not fit in a row, or advantages do not match the batch.
    """
    shape = [len(batch.groups), len(batch.groups[0].episodes) if batch.groups else 0]
    if batch.groups and list(advantages.shape) != shape:
        raise ConfigError(
            f"advantages have shape {list(advantages.shape)} and the batch is of shape [P, G] = {shape}",
            mend="compute them from batch.rewards, with group_advantages",
        )
    trees: list[_Tree] = []
    unscored = 0
    for p, group in enumerate(batch.groups):
        if drop_uniform and group.is_uniform:
            continue
        branches = []
        for g, episode in enumerate(group.episodes):
            for s, segment in enumerate(episode.segments):
                branch = _branch(segment, p * shape[1] + g, s, float(advantages[p, g]))
                unscored += sum(segment.trained) - int(branch.mask.sum())
                if branch.mask.any():
                    branches.append(branch)
        trees += _grow(branches, len(trees)) if layout.share_prefixes else _alone(branches, len(trees))

    needed = max((branch.inputs for tree in trees for branch in tree.branches), default=0)
    if needed > layout.row_tokens:
        raise ConfigError(
            f"an episode needs a row of {needed} tokens and row_tokens is {layout.row_tokens}",
            mend=f"set --trainer.row-tokens to at least {_round_up(needed, layout.pad_multiple)}, "
            "or let episodes be shorter",
        )
    return Packed(
        rows=tuple(_row(row, layout.pad_multiple) for row in _lay(trees, layout)),
        trained_tokens=sum(int(branch.mask.sum()) for tree in trees for branch in tree.branches),
        sequence_tokens=sum(branch.inputs for tree in trees for branch in tree.branches),
        unscored_tokens=unscored,
        version=batch.version,
    )


def unpack(packed: Packed, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Bring per-position results back to their episodes.

    Args:
        packed: the packed batch.
        values: for each row a [L] tensor, any dtype; entry t is about targets[t].

    Returns:
        For each episode with trained tokens, by its index in batch.episodes, the values of those tokens: 1-dim, in the
        order of its segments and of the tokens in them. Episodes that were left out are absent.
    """
    if len(values) != len(packed.rows):
        raise ConfigError(f"{len(values)} tensors for {len(packed.rows)} rows", mend="give one [L] tensor for each row")
    if not packed.rows:
        return {}
    keys = np.concatenate(
        [torch.stack([r.positions, r.segments, r.episodes])[:, r.mask].cpu().numpy() for r in packed.rows], axis=1
    )
    flat = torch.cat([value[row.mask.to(value.device)] for row, value in zip(packed.rows, values, strict=True)])
    ordered = flat[torch.from_numpy(np.lexsort(keys)).to(flat.device)]
    episodes, counts = np.unique(keys[2], return_counts=True)
    return dict(zip(episodes.tolist(), ordered.split(counts.tolist()), strict=True))


@dataclass(frozen=True, eq=False)
class _Branch:
    """A segment with what the trainer needs of it; arrays are [T], entry t about token t, cut after the last target."""

    token_ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    episode: int
    segment: int
    advantage: float

    @property
    def inputs(self) -> int:
        """Positions it takes alone: the last token is only a target."""
        return len(self.token_ids) - 1

    @property
    def shareable(self) -> int:
        """Tokens that may lie in a shared prefix: those before the first target's predictor."""
        return int(self.mask.argmax()) - 1


@dataclass(frozen=True, eq=False)
class _Tree:
    key: int
    """Pieces of one split tree have the same key."""
    prefix: int
    branches: tuple[_Branch, ...]

    @property
    def size(self) -> int:
        return self.prefix + sum(branch.inputs - self.prefix for branch in self.branches)

    def split(self, parts: int) -> list[_Tree]:
        """About equal pieces, each with its own copy of the prefix; at most one a branch."""
        bins = _spread([branch.inputs - self.prefix for branch in self.branches], min(parts, len(self.branches)))
        return [replace(self, branches=tuple(self.branches[i] for i in sorted(bin_))) for bin_ in bins if bin_]

    def fit(self, limit: int) -> list[_Tree]:
        """As few pieces as stay within limit tokens, which each branch alone does."""
        for parts in range(1, len(self.branches) + 1):
            pieces = self.split(parts)
            if max(piece.size for piece in pieces) <= limit:
                return pieces
        raise AssertionError(f"a branch of tree {self.key} is longer than {limit} tokens")


def _branch(segment: Segment, episode: int, index: int, advantage: float) -> _Branch:
    behaviour = np.array(segment.logprobs, dtype=np.float32)
    mask = np.array(segment.trained, dtype=np.bool_) & np.isfinite(behaviour)
    assert not mask[:1].any(), "the first token of a segment has no context that could predict it"
    end = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
    return _Branch(
        token_ids=np.array(segment.token_ids[:end], dtype=np.int64),
        mask=mask[:end],
        behaviour=np.where(mask, behaviour, np.float32(0))[:end],
        versions=np.where(mask, np.array(segment.versions, dtype=np.int32), np.int32(-1))[:end],
        episode=episode,
        segment=index,
        advantage=advantage,
    )


def _alone(branches: list[_Branch], first_key: int) -> list[_Tree]:
    return [_Tree(first_key + i, 0, (branch,)) for i, branch in enumerate(branches)]


def _grow(branches: list[_Branch], first_key: int) -> list[_Tree]:
    """Partition the segments of a group into trees so that sharing saves the most tokens.

    In lexicographic order a run of segments shares what its neighbours share, so the best partition into runs is a
    short dynamic program. best[j] is the most tokens saved among the first j, whose last run begins at start[j].
    """
    branches = sorted(branches, key=lambda b: b.token_ids[: b.shareable].astype(">i8").tobytes())
    common = [_common(a.token_ids[: a.shareable], b.token_ids[: b.shareable]) for a, b in pairwise(branches)]
    best, start, shared = [0], [0], [0]
    for j in range(1, len(branches) + 1):
        best.append(best[j - 1])
        start.append(j - 1)
        shared.append(0)
        prefix = branches[j - 1].shareable
        for i in range(j - 2, -1, -1):
            prefix = min(prefix, common[i])
            if prefix == 0:
                break
            if (saved := best[i] + (j - i - 1) * prefix) > best[j]:
                best[j], start[j], shared[j] = saved, i, prefix
    runs: list[tuple[int, tuple[_Branch, ...]]] = []
    end = len(branches)
    while end:
        runs.append((shared[end], tuple(branches[start[end] : end])))
        end = start[end]
    ordered = [(prefix, tuple(sorted(run, key=lambda b: (b.episode, b.segment)))) for prefix, run in runs]
    ordered.sort(key=lambda run: (run[1][0].episode, run[1][0].segment))
    return [_Tree(first_key + i, prefix, run) for i, (prefix, run) in enumerate(ordered)]


def _common(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _lay(trees: list[_Tree], layout: Layout) -> list[list[_Tree]]:
    """Trees into rows: as few as first-fit decreasing finds, rounded up to a multiple of ranks, then made equal.

    Ranks run their rows in lockstep, so a plan costs the sum, over rows side by side, of the longest. Splitting trees
    more finely evens the rows out and copies prefixes; of several grains the cheapest plan wins.
    """
    if not trees:
        return []
    pieces = [piece for tree in trees for piece in tree.fit(layout.row_tokens)]
    first = _first_fit(pieces, layout.row_tokens)
    count = _round_up(len(first), layout.ranks)
    plans: list[list[list[_Tree]]] = [first + [[] for _ in range(count - len(first))]]
    fair = max(1.0, sum(tree.size for tree in trees) / count)
    for grain in (0, 1, 2, 4):
        finer = [part for piece in pieces for part in piece.split(max(1, math.ceil(piece.size * grain / fair)))]
        bins = _spread([piece.size for piece in finer], count)
        plan = [_merge([finer[i] for i in bin_]) for bin_ in bins]
        if max(_size(row) for row in plan) <= layout.row_tokens:
            plans.append(plan)

    def cost(plan: list[list[_Tree]]) -> tuple[int, int]:
        sizes = sorted((_size(row) for row in plan), reverse=True)
        return sum(sizes[:: layout.ranks]), sum(sizes)

    best = min(plans, key=cost)
    rows = sorted(best, key=_size, reverse=True)
    sides = [rows[i : i + layout.ranks] for i in range(0, count, layout.ranks)]
    # Every other step runs back to front, so that no rank gets the longer row each time.
    return [row for i, side in enumerate(sides) for row in (side[::-1] if i % 2 else side)]


def _first_fit(pieces: list[_Tree], limit: int) -> list[list[_Tree]]:
    """First-fit decreasing: each piece, longest first, goes into the first row with room."""
    rows: list[list[_Tree]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        size = piece.size
        i = next((i for i, left in enumerate(room) if left >= size), len(rows))
        if i == len(rows):
            rows.append([])
            room.append(limit)
        rows[i].append(piece)
        room[i] -= size
    return [_merge(row) for row in rows]


def _spread(sizes: list[int], bins: int) -> list[list[int]]:
    """Indexes of sizes in about equal bins: each, largest first, goes into the bin with least."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, i) for i in range(bins)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, i = heap[0]
        filled[i].append(index)
        heapq.heapreplace(heap, (load + sizes[index], i))
    return filled


def _merge(row: list[_Tree]) -> list[_Tree]:
    """Pieces of one tree that met in a row share one prefix again."""
    merged: dict[int, _Tree] = {}
    for piece in sorted(row, key=lambda piece: piece.key):
        held = merged.get(piece.key)
        together = piece.branches if held is None else held.branches + piece.branches
        merged[piece.key] = replace(piece, branches=tuple(sorted(together, key=lambda b: (b.episode, b.segment))))
    return list(merged.values())


def _size(row: list[_Tree]) -> int:
    return sum(tree.size for tree in row)


def _row(trees: list[_Tree], pad_multiple: int) -> Row:
    length = _round_up(max(1, _size(trees)), pad_multiple)
    token_ids, positions, targets = (np.zeros(length, dtype=np.int64) for _ in range(3))
    branches = np.zeros(length, dtype=np.int32)
    tree_ids, versions, episodes, segments = (np.full(length, -1, dtype=np.int32) for _ in range(4))
    mask = np.zeros(length, dtype=np.bool_)
    behaviour, advantages = (np.zeros(length, dtype=np.float32) for _ in range(2))
    at = 0
    for t, tree in enumerate(trees):
        tree_ids[at : at + tree.size] = t
        shared = slice(at, at + tree.prefix)
        token_ids[shared] = tree.branches[0].token_ids[: tree.prefix]
        positions[shared] = np.arange(tree.prefix)
        # The last shared token is followed by another token in each branch, so it has no target.
        targets[at : at + max(0, tree.prefix - 1)] = tree.branches[0].token_ids[1 : tree.prefix]
        at += tree.prefix
        for b, branch in enumerate(tree.branches, start=1):
            own, following = slice(tree.prefix, branch.inputs), slice(tree.prefix + 1, None)
            here = slice(at, at + branch.inputs - tree.prefix)
            trained = branch.mask[following]
            token_ids[here] = branch.token_ids[own]
            positions[here] = np.arange(tree.prefix, branch.inputs)
            branches[here] = b
            targets[here] = branch.token_ids[following]
            mask[here] = trained
            behaviour[here] = branch.behaviour[following]
            versions[here] = branch.versions[following]
            advantages[here] = np.where(trained, branch.advantage, 0)
            episodes[here] = np.where(trained, branch.episode, -1)
            segments[here] = np.where(trained, branch.segment, -1)
            at = here.stop
    return Row(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        trees=torch.from_numpy(tree_ids),
        branches=torch.from_numpy(branches),
        targets=torch.from_numpy(targets),
        mask=torch.from_numpy(mask),
        behaviour=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(advantages),
        versions=torch.from_numpy(versions),
        episodes=torch.from_numpy(episodes),
        segments=torch.from_numpy(segments),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
