"""Packing: lays a scored batch into rows in which the episodes of a group share their prompt.

A tree is a prefix that several segments have in common, stored and computed once, and one branch for the rest of each.
A row holds whole trees. The attention mask (`attends`) lets a branch see its prefix and itself, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.data.minibatches import deal
from forge_rl.data.trees import Branch, Tree, assign_rows, build_trees, make_branch, round_up, row_size
from forge_rl.errors import ConfigError
from forge_rl.types import Advantages, Batch, Episode, Segment


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of the rows that the trainer needs."""

    shares: int = 1
    """Number of data-parallel shares, each trained by a rank or by some that split its rows or the model; the number of
    rows is a multiple of it."""
    row_tokens: int = 2048
    """Maximum tokens of a row that one device holds, padding included."""
    context_parallel: int = 1
    """Number of devices that split a row, whose maximum length is so many times row_tokens."""
    pad_multiple: int = 1
    """A device's part of a row is rounded up to a multiple of this: 128 where FlexAttention's blocks need it."""
    least_tokens: int = 1
    """Fewest tokens of a device's part of a row, padding included: 256 where fewer would need graphs of their own."""
    tensor_parallel: int = 1
    """Number of devices that split the activations of one part of a row: its length is rounded up to a multiple of this
    too, by padding that row_tokens does not count."""
    minibatches: int = 1
    """Number of parts that a batch is cut into, each for an update of its own. A group is in one part, and every source
    in all of them, as evenly as the number of its groups allows."""
    epochs: int = 1
    """Times that a batch is cut into minibatches, each time otherwise; with one minibatch it is once."""
    seed: int = 0
    """Decides with the batch's version, and the epoch, which groups are in which minibatch."""
    share_prefixes: bool = True
    """Store and compute a common prefix once. Off, each segment is a tree of its own with one branch."""

    def __post_init__(self) -> None:
        sizes = "shares", "row_tokens", "context_parallel", "pad_multiple", "tensor_parallel", "minibatches", "epochs"
        for name in sizes:
            if getattr(self, name) < 1:
                flag = "--trainer." + name.replace("_", "-").replace("shares", "ranks")
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"set {flag} to 1 or more")
        if self.row_tokens % self.pad_multiple:
            raise ConfigError(
                f"row_tokens is {self.row_tokens}, not a multiple of {self.pad_multiple}, to which rows are padded",
                hint=f"set --trainer.row-tokens to {round_up(self.row_tokens, self.pad_multiple)}",
            )

    @property
    def longest(self) -> int:
        """Maximum tokens of a row, over the devices that split it."""
        return self.row_tokens * self.context_parallel


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One packed row. All fields are [L]; entry t of those from `targets` to `lengths` describes targets[t], that is,
    token t+1."""

    token_ids: torch.Tensor
    """int64; 0 in padding."""
    positions: torch.Tensor
    """int64, position within the token's own segment: each tree starts at 0, each branch where its prefix ends."""
    trees: torch.Tensor
    """int32, index of the token's tree, from 0 in each row; -1 in padding."""
    branches: torch.Tensor
    """int32, 0 for the shared prefix and padding, 1 and up for the branches of a tree."""
    targets: torch.Tensor
    """int64, the token that follows in the same prefix or branch; 0 where there is none."""
    mask: torch.Tensor
    """bool, True where the target is trained."""
    behaviour: torch.Tensor
    """float32, the engine's (behaviour policy's) logprob of the target; 0 where not mask."""
    advantages: torch.Tensor
    """float32, advantage of the target's episode; 0 where not mask."""
    versions: torch.Tensor
    """int32, version of the weights that produced the target; -1 where not mask."""
    episodes: torch.Tensor
    """int32, index into batch.episodes of the target's episode; -1 where not mask."""
    segments: torch.Tensor
    """int32, index of the target's segment within its episode; -1 where not mask."""
    turns: torch.Tensor
    """int32, index of the target's turn within its episode; -1 where not mask."""
    lengths: torch.Tensor
    """int32, number of trained tokens of the target's episode, over all rows; 1 where not mask."""
    routed: torch.Tensor | None = None
    """Experts that the engine sent the token itself to, [L, layers, top_k] int16, dense layers included; -1 in padding
    and where they are not known. None where they are known of no token."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __reduce__(self) -> tuple[object, ...]:
        # Tensors pickle by a class that torch makes for each, which is left to the garbage collector.
        return _read_row, ({name: each.numpy() for name, each in vars(self).items() if each is not None},)


def _read_row(arrays: Mapping[str, npt.NDArray[Any]]) -> Row:
    return Row(**{name: torch.from_numpy(array) for name, array in arrays.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch:
    """Rows that one update is taken on. It has none where all advantages are 0; there is no update then."""

    rows: tuple[Row, ...]
    """A multiple of Layout.shares. Share s trains rows[s::shares]; rows side by side are about equally long."""
    tokens: int
    """Number of trained tokens, those of groups that were left out included."""
    sequences: int
    """Number of episodes, those of groups that were left out included."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch, packed."""

    minibatches: tuple[Minibatch, ...]
    """Parts for an update each, those of the first epoch first."""
    epochs: int
    """Number of epochs that these are for."""
    trained_tokens: int
    """Number of targets with mask True, over all rows of an epoch."""
    sequence_tokens: int
    """Input tokens of all packed segments, before sharing and padding."""
    unscored_tokens: int
    """Completion tokens that are masked because the engine gave no finite logprob for them."""
    uniform_share: float
    """Share of groups whose advantages are all 0."""
    version: int
    """Version of the batch: a target's lag is this minus its own version."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the first epoch: each trained token is a target in one of them."""
        first = self.minibatches[: len(self.minibatches) // self.epochs]
        return tuple(row for minibatch in first for row in minibatch.rows)

    @property
    def packed_tokens(self) -> int:
        """Input tokens after sharing, padding included: the positions that the trainer computes in an epoch."""
        return sum(len(row) for row in self.rows)


def attends(trees: torch.Tensor, branches: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """True where the query at index q of a row sees the key at index k; bool, of the broadcast shape of q and k.

    It does iff k <= q, both are of the same tree, and the key is in the shared prefix or in the query's own branch.
    Padding sees only padding, so that no softmax is empty. Serves as FlexAttention's mask_mod and, by broadcasting, as
    dense_mask. `trees` and `branches` are those of the Row.
    """
    seen = (branches[k] == 0) | (branches[k] == branches[q])
    return (k <= q) & (trees[k] == trees[q]) & seen


def dense_mask(row: Row, first: int = 0, end: int | None = None) -> torch.Tensor:
    """Attention mask of a row, [L, L] bool: True where the query (first dim) sees the key (second dim).

    With `first` and `end`, that of these tokens alone.
    """
    index = torch.arange(first, len(row) if end is None else end, device=row.trees.device)
    return attends(row.trees, row.branches, index[:, None], index[None, :])


def pack(batch: Batch, advantages: Advantages, layout: Layout, *, drop_uniform: bool = True) -> Packed:
    """Lay the segments of a batch into rows with shared prefixes, balanced over data-parallel shares; deterministic.

        packed = pack(batch, batch_advantages(batch), run.trainer.layout)

    The shared prefix of a tree ends before the token that predicts the first completion token of any of its branches,
    so each trained token is the target of exactly one position. Tokens after the last trained token's predictor are
    left out: nothing depends on them. Completion tokens without a finite logprob are masked and counted in
    unscored_tokens.

    Args:
        advantages: [P, G] float32, one for each episode, which its segments share; or one for each of its tokens.
        drop_uniform: leave out groups whose advantages are all 0: the surrogate has no gradient there. They count in
            the loss's mean all the same. Keep them when another term (a KL penalty) should still reach them.

    Raises:
        ConfigError: a segment does not fit in a row, there are fewer groups than minibatches, or advantages do not
            match the batch.
    """
    shape = [len(batch.groups), len(batch.groups[0].episodes) if batch.groups else 0]
    _check(batch, advantages, shape)
    if batch.groups and len(batch.groups) < layout.minibatches:
        raise ConfigError(
            f"{len(batch.groups)} groups cannot be cut into {layout.minibatches} minibatches",
            hint="lower --trainer.minibatches, or raise --groups-per-batch",
        )
    groups: list[_Group] = []
    uniform = unscored = keys = 0
    for p, group in enumerate(batch.groups):
        laid, branches = _Group(), list[Branch]()
        for g, episode in enumerate(group.episodes):
            own = [
                make_branch(segment, p * shape[1] + g, s, _of_segment(advantages[p][g], episode, segment))
                for s, segment in enumerate(episode.segments)
            ]
            trained = sum(int(branch.mask.sum()) for branch in own)
            unscored += episode.response_tokens - trained
            laid.lengths[p * shape[1] + g] = trained
            branches += [branch for branch in own if branch.mask.any()]
        is_uniform = not any(bool(each.any()) for each in advantages[p])
        uniform += is_uniform
        if not (drop_uniform and is_uniform):
            laid.trees = build_trees(branches, first_key=keys, share_prefixes=layout.share_prefixes)
            keys += len(laid.trees)
        groups.append(laid)

    packed = [branch for group in groups for tree in group.trees for branch in tree.branches]
    needed = max((branch.inputs for branch in packed), default=0)
    if needed > layout.longest:
        on_one = round_up(-(-needed // layout.context_parallel), layout.pad_multiple)
        raise ConfigError(
            f"an episode needs a row of {needed} tokens and row_tokens is {layout.row_tokens}"
            + (f" on each of {layout.context_parallel} devices" if layout.context_parallel > 1 else ""),
            hint=f"set --trainer.row-tokens to at least {on_one}, or --trainer.context-parallel to at least "
            f"{-(-needed // layout.row_tokens)}, which splits each row over so many; or let episodes be shorter",
        )
    sources, has_trees = [group.task.source for group in batch.groups], [bool(group.trees) for group in groups]
    epochs = layout.epochs if layout.minibatches > 1 else 1
    seeds = [(layout.seed % 2**32, max(0, batch.version), epoch) for epoch in range(epochs)]
    parts = [part for seed in seeds for part in deal(sources, has_trees, layout.minibatches, seed=seed)]
    return Packed(
        minibatches=tuple(_minibatch([groups[p] for p in part], layout) for part in parts),
        epochs=epochs,
        trained_tokens=sum(int(branch.mask.sum()) for branch in packed),
        sequence_tokens=sum(branch.inputs for branch in packed),
        unscored_tokens=unscored,
        uniform_share=uniform / max(1, len(batch.groups)),
        version=batch.version,
    )


def _check(batch: Batch, advantages: Advantages, shape: list[int]) -> None:
    given = list(advantages.shape) if isinstance(advantages, torch.Tensor) else [len(advantages), *map(len, advantages)]
    if batch.groups and given[:2] != shape:
        raise ConfigError(
            f"advantages have shape {given[:2]} and the batch is of shape [P, G] = {shape}",
            hint="compute them from the batch, with batch_advantages",
        )
    if not isinstance(advantages, torch.Tensor):
        for each, episode in zip((own for group in advantages for own in group), batch.episodes, strict=True):
            if len(each) != episode.response_tokens:
                raise ConfigError(
                    f"an episode of {episode.response_tokens} tokens has {len(each)} advantages",
                    hint="compute them from the batch, with batch_advantages",
                )


def _of_segment(
    advantages: torch.Tensor | npt.NDArray[np.float32], episode: Episode, segment: Segment
) -> float | npt.NDArray[np.float32]:
    """Advantage of an episode, or those of a segment's tokens, [T]."""
    if isinstance(advantages, torch.Tensor):
        return float(advantages)
    ends = np.cumsum([len(turn.token_ids) for turn in episode.turns])
    found = np.zeros(len(segment.token_ids), np.float32)
    for turn in np.unique(segment.turns[segment.trained]):
        found[segment.turns == turn] = advantages[ends[turn] - len(episode.turns[turn].token_ids) : ends[turn]]
    return found


@dataclass
class _Group:
    """A group as it goes to a minibatch."""

    trees: list[Tree] = field(default_factory=list)
    """None if it is left out."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Number of trained tokens of each episode, also where it is left out."""


def _minibatch(groups: list[_Group], layout: Layout) -> Minibatch:
    lengths = {episode: length for group in groups for episode, length in group.lengths.items()}
    trees = [tree for group in groups for tree in group.trees]
    rows = assign_rows(trees, row_tokens=layout.longest, shares=layout.shares)
    multiple = math.lcm(layout.pad_multiple, layout.tensor_parallel) * layout.context_parallel
    least = layout.least_tokens * layout.context_parallel
    return Minibatch(
        rows=tuple(_row(row, multiple, least, lengths) for row in rows),
        tokens=sum(lengths.values()),
        sequences=len(lengths),
    )


_PADDING = (
    dict.fromkeys(("token_ids", "positions", "targets"), np.int64(0))
    | dict.fromkeys(("trees", "versions", "episodes", "segments", "turns"), np.int32(-1))
    | dict.fromkeys(("behaviour", "advantages"), np.float32(0))
    | {"branches": np.int32(0), "lengths": np.int32(1), "mask": np.bool_(False)}
)
"""Padding value and dtype of each field of a row."""


def _row(trees: list[Tree], pad_multiple: int, least: int, lengths: Mapping[int, int]) -> Row:
    length = round_up(max(least, row_size(trees)), pad_multiple)
    row = {name: np.full(length, padding) for name, padding in _PADDING.items()}
    routings = [branch.routed for tree in trees for branch in tree.branches if branch.routed is not None]
    if routings:
        row["routed"] = np.full((length, *routings[0].shape[1:]), -1, np.int16)
    at = 0
    for t, tree in enumerate(trees):
        row["trees"][at : at + tree.size] = t
        shared = slice(at, at + tree.prefix)
        row["token_ids"][shared] = tree.branches[0].token_ids[: tree.prefix]
        row["positions"][shared] = np.arange(tree.prefix)
        # The last shared token is followed by another token in each branch, so it has no target.
        row["targets"][at : at + max(0, tree.prefix - 1)] = tree.branches[0].token_ids[1 : tree.prefix]
        # A branch may have been computed anew, under other weights; the first that is known counts.
        known = next((branch.routed for branch in tree.branches if branch.routed is not None), None)
        if known is not None:
            row["routed"][shared] = known[: tree.prefix]
        at += tree.prefix
        for b, branch in enumerate(tree.branches, start=1):
            following = slice(tree.prefix + 1, None)
            here = slice(at, at + branch.inputs - tree.prefix)
            trained = branch.mask[following]
            row["token_ids"][here] = branch.token_ids[tree.prefix : branch.inputs]
            row["positions"][here] = np.arange(tree.prefix, branch.inputs)
            row["branches"][here] = b
            row["targets"][here] = branch.token_ids[following]
            row["mask"][here] = trained
            row["behaviour"][here] = branch.behaviour[following]
            row["advantages"][here] = branch.advantages[following]
            row["versions"][here] = branch.versions[following]
            row["turns"][here] = branch.turns[following]
            if branch.routed is not None:
                row["routed"][here] = branch.routed[tree.prefix : branch.inputs]
            row["lengths"][here][trained] = lengths[branch.episode]
            row["episodes"][here][trained] = branch.episode
            row["segments"][here][trained] = branch.segment
            at = here.stop
    return Row(**{name: torch.from_numpy(values) for name, values in row.items()})
