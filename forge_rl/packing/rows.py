"""Packing: lays a scored batch into rows in which the segments of a group share every common prefix.

Segments of a group form a tree: a prefix of several segments is stored and computed once, at every level. A tree is
laid out depth first, so that the positions after a prefix are one range (`Row.until`), which the attention mask
(`attends`) needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.errors import ConfigError, check_flags
from forge_rl.packing.minibatches import deal
from forge_rl.packing.trees import (
    Branch,
    Tree,
    assign_rows,
    build_trees,
    first_holders,
    make_branch,
    round_up,
    row_size,
)
from forge_rl.system.seeds import derive_seed
from forge_rl.token_arrays import Segment
from forge_rl.types import Advantages, Batch, Episode, Group


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Row layout that the trainer requires."""

    shares: int = 1
    """Number of data-parallel shares, each trained by one rank or by several that split its rows or the model; the
    number of rows is a multiple of it."""
    seq_len: int = 2048
    """Maximum tokens of a row per device, padding included."""
    context_parallel_degree: int = 1
    """Number of devices that split a row, whose maximum length is seq_len times this."""
    pad_multiple: int = 1
    """Multiple to which a device's part of a row is padded: 128 if FlexAttention's blocks need it."""
    least_tokens: int = 1
    """Minimum tokens of a device's part of a row, padding included: 256 if shorter ones would need extra graphs."""
    tensor_parallel_degree: int = 1
    """Number of devices that split the activations of one part of a row; its length is also padded to a multiple of
    this, and seq_len does not count that padding."""
    minibatches: int = 1
    """Number of minibatches per batch, each for one update. A group is in one minibatch; each source's groups are
    spread over the minibatches as evenly as possible."""
    epochs: int = 1
    """Number of times that a batch is split into minibatches, differently each time; ignored with one minibatch."""
    seed: int = 0
    """Seed that, with the batch's version and the epoch, assigns groups to minibatches."""
    share_prefixes: bool = True
    """Store and compute a common prefix once. If off, each segment is its own tree with one branch."""

    def __post_init__(self) -> None:
        counts = ("context_parallel_degree", "tensor_parallel_degree", "minibatches", "epochs")
        check_flags(self, "--trainer.", minimum=dict.fromkeys(("seq_len", "pad_multiple", *counts), 1))
        if self.shares < 1:
            raise ConfigError(f"shares is {self.shares}", hint="set --trainer.ranks to 1 or more")
        if self.seq_len % self.pad_multiple:
            raise ConfigError(
                f"seq_len is {self.seq_len}, not a multiple of pad_multiple {self.pad_multiple}",
                hint=f"set --trainer.seq-len to {round_up(self.seq_len, self.pad_multiple)}",
            )

    @property
    def longest(self) -> int:
        """Maximum tokens of a row, summed over the devices that split it."""
        return self.seq_len * self.context_parallel_degree


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One packed row. All fields are [L]; in those from `targets` to `columns`, entry t describes targets[t], that is,
    token t+1."""

    token_ids: torch.Tensor
    """int64; 0 in padding."""
    positions: torch.Tensor
    """int64, position within the token's segment, which starts at 0."""
    trees: torch.Tensor
    """int32, index of the token's tree, from 0 in each row; -1 in padding."""
    until: torch.Tensor
    """int32, end of the range of positions that see this one; the range begins at the position itself."""
    targets: torch.Tensor
    """int64, next token; 0 where there is none, or where segments go on differently."""
    mask: torch.Tensor
    """bool, True where the target is trained."""
    behaviour: torch.Tensor
    """float32, the engine's (behaviour policy's) logprob of the target; 0 where not mask."""
    advantages: torch.Tensor
    """float32, advantage of the target's episode; 0 where not mask."""
    versions: torch.Tensor
    """int32, version of the weights that produced the target; -1 where not mask."""
    episodes: torch.Tensor
    """int32, index into batch.episodes of the target's episode; -1 where neither mask nor observed."""
    segments: torch.Tensor
    """int32, index of the target's segment within its episode; -1 where not mask."""
    turns: torch.Tensor
    """int32, index of the target's turn within its episode; -1 where not mask."""
    lengths: torch.Tensor
    """int32, number of trained tokens of the target's episode, over all rows; 1 where not mask."""
    observed: torch.Tensor
    """bool, True where the target is an observation: not trained, but between two turns of its episode."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values that the recipe gave `pack` for each trained token, by name: [L], or [L, k]; 0 where not mask."""
    routed: torch.Tensor | None = None
    """Experts to which the engine routed the token itself, [L, layers, top_k] int16, dense layers included; -1 in
    padding and where unknown. None if unknown for all tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __reduce__(self) -> tuple[object, ...]:
        # Pickling a tensor makes torch create a class for each, which only the garbage collector frees.
        columns = {name: tensor.numpy() for name, tensor in self.columns.items()}
        return _read_row, ({name: tensor.numpy() for name, tensor in self.tensors().items()}, columns)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def _read_row(arrays: Mapping[str, npt.NDArray[Any]], columns: Mapping[str, npt.NDArray[Any]]) -> Row:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Row(**tensors, columns={name: torch.from_numpy(array) for name, array in columns.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch:
    """Rows of one update, which is skipped if there are none."""

    rows: tuple[Row, ...]
    """Rows, a multiple of Layout.shares. Share s trains rows[s::shares]; rows of the same step have similar lengths."""
    tokens: int
    """Number of trained tokens, including rows that a loss spared; turns that episodes have in common count once for
    each."""
    sequences: int
    """Number of episodes, including rows that a loss spared."""
    observations: int = 0
    """Number of observation tokens, see `Row.observed`, including rows that a loss spared."""
    group_size: int = 1
    """Episodes per group of the batch."""
    sources: tuple[str, ...] = ()
    """Source of each of the batch's groups."""
    scattered: frozenset[str] = frozenset()
    """"episode" if an episode's trained tokens lie in several rows, "group" if a group's do."""
    uniform_rows: int = 0
    """Number of rows at the end, a multiple of Layout.shares, in which all advantages are 0."""

    def without_uniform(self) -> Minibatch:
        """Return the minibatch without `uniform_rows`, with the same counts."""
        if not self.uniform_rows:
            return self
        rows = self.rows[: len(self.rows) - self.uniform_rows]
        episodes = [set(np.unique(row.episodes.numpy()[row.mask.numpy()]).tolist()) for row in rows]
        return replace(self, rows=rows, uniform_rows=0, scattered=_scattered(episodes, self.group_size))


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A packed batch."""

    minibatches: tuple[Minibatch, ...]
    """Minibatches of all epochs, in order; one update each."""
    epochs: int
    """Number of epochs in `minibatches`."""
    sequence_tokens: int
    """Input tokens of all packed segments, before sharing and padding."""
    uniform_tokens: int
    """Those of `sequence_tokens` that lie in `Minibatch.uniform_rows`."""
    unscored_tokens: int
    """Completion tokens that are masked because the engine returned no finite logprob for them."""
    uniform_share: float
    """Share of groups whose advantages are all 0."""
    version: int
    """Version of the batch: a target's lag is this minus the target's version."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the first epoch: each trained token is a target in exactly one of them."""
        first = self.minibatches[: len(self.minibatches) // self.epochs]
        return tuple(row for minibatch in first for row in minibatch.rows)

    @property
    def trained_tokens(self) -> int:
        """Number of targets with mask True, over all rows of an epoch."""
        return sum(int(row.mask.sum()) for row in self.rows)

    @property
    def packed_tokens(self) -> int:
        """Input tokens after sharing, padding included: the positions that the trainer computes per epoch."""
        return sum(len(row) for row in self.rows)

    @cached_property
    def without_uniform(self) -> PackedBatch:
        """The batch without the rows that a loss can spare, see `Loss.keeps_uniform`; the same object each time."""
        if not self.uniform_tokens:
            return self
        return replace(
            self,
            minibatches=tuple(minibatch.without_uniform() for minibatch in self.minibatches),
            sequence_tokens=self.sequence_tokens - self.uniform_tokens,
            uniform_tokens=0,
        )


def attends(until: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return True where the query at index q of a row sees the key at index k; bool, broadcast shape of q and k.

    It does iff the key is in the query's prefix, or the query itself: k <= q < until[k], see `Row.until`. Padding sees
    only padding, so that no softmax is empty. Serves as FlexAttention's mask_mod and, by broadcasting, as a dense mask.
    """
    return (k <= q) & (q < until[k])


Columns: TypeAlias = Mapping[str, Sequence[Sequence[npt.NDArray[Any]]]]
"""Values of each episode's trained tokens by name, as columns[name][group][episode], [T] or [T, k]; in the order of the
episode's turns, like token advantages."""


def pack(
    batch: Batch,
    advantages: Advantages | None,
    layout: Layout,
    *,
    drop_uniform: bool = True,
    columns: Columns = MappingProxyType({}),
) -> PackedBatch:
    """Lay the segments of a batch into rows with shared prefixes, balanced over data-parallel shares; deterministic.

        packed = pack(batch, batch_advantages(batch), run.trainer.layout)

    Each trained token is the target of exactly one position: a position is shared unless several segments train its
    next token, or one does and another continues otherwise. Where worlds forked, episodes have turns in common (see
    `Turn.branch`): the first episode trains them, with the sum of the advantages that all give them. The gradient
    equals the one of separate episodes as long as losses are proportional to advantages and averaged over tokens.
    Tokens after the last trained token's predictor are dropped, as nothing depends on them. Completion tokens without a
    finite logprob are masked and counted in unscored_tokens.

    Groups whose advantages are all 0 lie in rows of their own, which the trainer spares where the loss allows it, see
    `Loss.keeps_uniform`: that saves time and changes no gradient, as they count in the loss's mean all the same.

    Args:
        advantages: [P, G] float32, one per episode, shared by its segments: a tensor, an array, or lists; or one per
            token of each episode. None if the loss reads none, as on given examples: no group can then be spared.
        drop_uniform: if False, all groups share rows, and none can be spared.
        columns: other values that the loss needs for each token; see `Loss.columns`.

    Raises:
        ConfigError: a segment does not fit in a row, there are fewer groups than minibatches, or the advantages do not
            match the batch.
    """
    shape = [len(batch.groups), len(batch.groups[0].episodes) if batch.groups else 0]
    if advantages is None:
        advantages, drop_uniform = torch.zeros(shape), False
    advantages = _check(batch, advantages, shape, layout)
    groups = []
    for p, group in enumerate(batch.groups):
        group_columns = {name: values[p] for name, values in columns.items()}
        groups.append(_lay(group, p, advantages[p], layout, columns=group_columns))
    branches = [branch for group in groups for tree in group.trees for branch in tree.branches]
    longest = max((branch.inputs for branch in branches), default=0)
    if longest > layout.longest:
        on_one = round_up(-(-longest // layout.context_parallel_degree), layout.pad_multiple)
        raise ConfigError(
            f"an episode needs a row of {longest} tokens, but seq_len is {layout.seq_len}"
            + (f" on each of {layout.context_parallel_degree} devices" if layout.context_parallel_degree > 1 else ""),
            hint=f"set --trainer.seq-len to at least {on_one}, or --trainer.context-parallel-degree to at least "
            f"{-(-longest // layout.seq_len)} to split each row over that many devices; or shorten episodes",
        )
    sources = [group.task.source for group in batch.groups]
    learns = [bool(group.trees) and not group.uniform for group in groups]
    epochs = layout.epochs if layout.minibatches > 1 else 1
    seeds = [derive_seed(layout.seed, "minibatches", batch.version, epoch) for epoch in range(epochs)]
    parts = [part for seed in seeds for part in deal(sources, learns, layout.minibatches, seed=seed)]
    spared_groups = [group for group in groups if drop_uniform and group.uniform]
    return PackedBatch(
        minibatches=tuple(
            _minibatch([groups[p] for p in part], layout, shape[1], tuple(sources), drop_uniform) for part in parts
        ),
        epochs=epochs,
        sequence_tokens=sum(branch.inputs for branch in branches),
        uniform_tokens=sum(
            branch.inputs for group in spared_groups for tree in group.trees for branch in tree.branches
        ),
        unscored_tokens=sum(group.unscored for group in groups),
        uniform_share=sum(group.uniform for group in groups) / max(1, len(groups)),
        version=batch.version,
    )


def _check(batch: Batch, advantages: Advantages, shape: list[int], layout: Layout) -> Advantages:
    """Check that advantages fit the batch; returns them as a [P, G] tensor, or as an array for each episode."""
    hint = "compute them from the batch, with batch_advantages"
    if not isinstance(advantages, torch.Tensor):
        try:
            is_per_episode = all(np.ndim(value) == 0 for group in advantages for value in group)
            advantages = (
                torch.from_numpy(np.array(advantages, np.float32))
                if is_per_episode
                else [[np.asarray(value, np.float32) for value in group] for group in advantages]
            )
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(advantages).__name__
            raise ConfigError(
                f"the advantages, a {kind}, are not numbers of shape [P, G] = {shape}: {error}", hint=hint
            ) from error
    if isinstance(advantages, torch.Tensor):
        actual_shape = list(advantages.shape)
    else:
        actual_shape = [len(advantages), *map(len, advantages)][:2]
    if batch.groups and actual_shape != shape:
        raise ConfigError(
            f"the advantages have shape {actual_shape}, but the batch has shape [P, G] = {shape}", hint=hint
        )
    if not isinstance(advantages, torch.Tensor):
        for values, episode in zip((values for group in advantages for values in group), batch.episodes, strict=True):
            if values.shape != (episode.response_tokens,):
                count = len(values) if len(values.shape) == 1 else list(values.shape)
                raise ConfigError(f"an episode of {episode.response_tokens} tokens has {count} advantages", hint=hint)
    if batch.groups and len(batch.groups) < layout.minibatches:
        raise ConfigError(
            f"{len(batch.groups)} groups cannot be split into {layout.minibatches} minibatches",
            hint="lower --trainer.minibatches, or raise --groups-per-batch",
        )
    return advantages


def _of_segment(values: npt.NDArray[Any], episode: Episode, segment: Segment) -> npt.NDArray[Any]:
    """Return the values of a segment's tokens, from the values of all tokens that the episode generated."""
    ends = np.cumsum([len(turn.token_ids) for turn in episode.turns])
    segment_values = np.zeros((len(segment.token_ids), *values.shape[1:]), values.dtype)
    for turn in np.unique(segment.turns[segment.trained]):
        segment_values[segment.turns == turn] = values[ends[turn] - len(episode.turns[turn].token_ids) : ends[turn]]
    return segment_values


def _summed(
    episodes: Sequence[Episode],
    advantages: torch.Tensor | Sequence[npt.NDArray[np.float32]],
    holders: Sequence[Sequence[tuple[int, int]]],
) -> torch.Tensor | Sequence[npt.NDArray[np.float32]]:
    """Sum the advantages of a turn that episodes have in common in the first of these episodes, which trains it."""
    if all(first == number for number, episode_holders in enumerate(holders) for first, _ in episode_holders):
        return advantages
    token_advantages = [
        np.full(episode.response_tokens, float(episode_advantages), np.float32)
        if isinstance(episode_advantages, torch.Tensor)
        else episode_advantages.copy()
        for episode, episode_advantages in zip(episodes, advantages, strict=True)
    ]
    turns = [
        np.split(episode_advantages, np.cumsum([len(turn.token_ids) for turn in episode.turns])[:-1])
        for episode_advantages, episode in zip(token_advantages, episodes, strict=True)
    ]
    for number, episode_holders in enumerate(holders):
        for turn, (first, first_turn) in enumerate(episode_holders):
            if first != number:
                turns[first][first_turn] += turns[number][turn]
    return token_advantages


@dataclass(frozen=True)
class _GroupTrees:
    """A group's trees and lengths, to be put into a minibatch."""

    trees: list[Tree]
    lengths: dict[int, int]
    """Number of trained tokens of each episode."""
    observations: int
    """Number of observation tokens."""
    repeated: int
    """Number of trained tokens that an episode has in common with an earlier one, which trains them."""
    unscored: int
    """Number of completion tokens without a finite logprob."""
    uniform: bool
    """True if all advantages are 0."""


def _lay(
    group: Group,
    index: int,
    advantages: torch.Tensor | Sequence[npt.NDArray[np.float32]],
    layout: Layout,
    *,
    columns: Mapping[str, Sequence[npt.NDArray[Any]]],
) -> _GroupTrees:
    """Lay the segments of group `index` of a batch into trees."""
    branches: list[Branch] = []
    lengths: dict[int, int] = {}
    holders = first_holders(group.episodes)
    trained_advantages = _summed(group.episodes, advantages, holders)
    repeated = unscored = 0
    for number, (episode, episode_advantages) in enumerate(zip(group.episodes, trained_advantages, strict=True)):
        place = index * len(group.episodes) + number
        context_turns = [turn for turn, (first, _) in enumerate(holders[number]) if first != number]
        episode_branches = []
        for segment_index, segment in enumerate(episode.segments):
            segment_advantages = (
                float(episode_advantages)
                if isinstance(episode_advantages, torch.Tensor)
                else _of_segment(episode_advantages, episode, segment)
            )
            segment_columns = {name: _of_segment(values[number], episode, segment) for name, values in columns.items()}
            episode_branches.append(
                make_branch(
                    segment, place, segment_index, segment_advantages, segment_columns, context_turns=context_turns
                )
            )
        lengths[place] = sum(int(branch.mask.sum()) for branch in episode_branches)
        repeated += sum(int(np.isfinite(episode.turns[turn].logprobs).sum()) for turn in context_turns)
        context_tokens = sum(len(episode.turns[turn].token_ids) for turn in context_turns)
        unscored += episode.response_tokens - context_tokens - lengths[place]
        branches += [branch for branch in episode_branches if branch.mask.any()]
    return _GroupTrees(
        trees=build_trees(branches, index, share_prefixes=layout.share_prefixes),
        lengths=lengths,
        observations=sum(int(branch.observed.sum()) for branch in branches),
        repeated=repeated,
        unscored=unscored,
        uniform=not any(bool(values.any()) for values in advantages),
    )


def _minibatch(
    groups: list[_GroupTrees], layout: Layout, group_size: int, sources: tuple[str, ...], drop_uniform: bool
) -> Minibatch:
    lengths = {episode: length for group in groups for episode, length in group.lengths.items()}
    parts = [
        [tree for group in groups if (drop_uniform and group.uniform) == is_spared for tree in group.trees]
        for is_spared in (False, True)
    ]
    row_lists = [assign_rows(trees, seq_len=layout.longest, shares=layout.shares) for trees in parts]
    rows, trees = row_lists[0] + row_lists[1], parts[0] + parts[1]
    episodes = [{branch.episode for tree in row for branch in tree.branches} for row in rows]
    columns = trees[0].branches[0].columns if trees else {}
    multiple = math.lcm(layout.pad_multiple, layout.tensor_parallel_degree) * layout.context_parallel_degree
    min_length = layout.least_tokens * layout.context_parallel_degree
    return Minibatch(
        rows=tuple(_row(row, multiple, min_length, lengths, columns) for row in rows),
        tokens=sum(lengths.values()) + sum(group.repeated for group in groups),
        sequences=len(lengths),
        observations=sum(group.observations for group in groups),
        group_size=group_size,
        sources=sources,
        scattered=_scattered(episodes, group_size),
        uniform_rows=len(row_lists[1]),
    )


def _scattered(episodes: Sequence[set[int]], group_size: int) -> frozenset[str]:
    """Return "episode" or "group" for those that lie in several rows, from the episodes of each row."""
    groups = [{episode // group_size for episode in row} for row in episodes]
    return frozenset(
        name
        for name, parts in (("episode", episodes), ("group", groups))
        if sum(map(len, parts)) > len(set().union(*parts))
    )


_PADDING = (
    dict.fromkeys(("token_ids", "positions", "targets"), np.int64(0))
    | dict.fromkeys(("trees", "versions", "episodes", "segments", "turns"), np.int32(-1))
    | dict.fromkeys(("behaviour", "advantages"), np.float32(0))
    | {"until": np.int32(0), "lengths": np.int32(1), "mask": np.bool_(False), "observed": np.bool_(False)}
)
"""Padding value and dtype of each field of a row."""


def _row(
    trees: list[Tree],
    pad_multiple: int,
    min_length: int,
    lengths: Mapping[int, int],
    example_columns: Mapping[str, npt.NDArray[Any]],
) -> Row:
    """Lay trees into a row; `example_columns` are the columns of any branch of the minibatch, for dtypes and shapes."""
    length = round_up(max(min_length, row_size(trees)), pad_multiple)
    row = {name: np.full(length, padding) for name, padding in _PADDING.items()}
    columns = {name: np.zeros((length, *values.shape[1:]), values.dtype) for name, values in example_columns.items()}
    routings = [branch.routed for tree in trees for branch in tree.branches if branch.routed is not None]
    if routings:
        row["routed"] = np.full((length, *routings[0].shape[1:]), -1, np.int16)
    position = 0
    for t, tree in enumerate(trees):
        row["trees"][position : position + tree.size] = t
        path = np.zeros(0, np.int64)
        for branch, num_shared in zip(tree.branches, tree.shared, strict=True):
            row["until"][path[num_shared:]] = position
            span = slice(position, position + branch.inputs - num_shared)
            path = np.concatenate([path[:num_shared], np.arange(span.start, span.stop)])
            _lay_branch(row, columns, branch, num_shared, path)
            row["lengths"][path[branch.mask[1:]]] = lengths[branch.episode]
            position = span.stop
        row["until"][path] = position
    row["until"][position:] = length
    tensors = {name: torch.from_numpy(values) for name, values in row.items()}
    return Row(**tensors, columns={name: torch.from_numpy(values) for name, values in columns.items()})


def _lay_branch(
    row: Mapping[str, npt.NDArray[Any]],
    columns: Mapping[str, npt.NDArray[Any]],
    branch: Branch,
    num_shared: int,
    path: npt.NDArray[np.int64],
) -> None:
    """Write a segment into a row: its own tokens, and its values for shared ones.

    Args:
        num_shared: number of its positions that are in the row already.
        path: index in the row of each of its positions, [inputs].
    """
    positions = path[num_shared:]
    row["token_ids"][positions] = branch.token_ids[num_shared : branch.inputs]
    row["positions"][positions] = np.arange(num_shared, branch.inputs)
    row["targets"][positions] = branch.token_ids[num_shared + 1 :]
    if num_shared and row["targets"][path[num_shared - 1]] != branch.token_ids[num_shared]:
        row["targets"][path[num_shared - 1]] = 0  # another segment goes on differently
    trained, claimed = path[branch.mask[1:]], path[branch.claims[1:]]
    row["targets"][claimed] = branch.token_ids[1:][branch.claims[1:]]
    row["mask"][trained] = True
    row["observed"][path[branch.observed[1:]]] = True
    for name in ("behaviour", "advantages", "versions", "turns"):
        row[name][trained] = getattr(branch, name)[branch.mask]
    row["segments"][trained] = branch.segment
    row["episodes"][claimed] = branch.episode
    for name, values in branch.columns.items():
        columns[name][trained] = values[branch.mask]
    if branch.routed is not None:
        # A segment may have been recomputed under other weights: the first known routing of a position is used.
        unknown = (row["routed"][path] == -1).all(axis=(1, 2))
        row["routed"][path[unknown]] = branch.routed[: branch.inputs][unknown]
