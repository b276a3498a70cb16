"""Packs a scored batch into rows, whose fields are described in `packing.rows`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.errors import ConfigError
from forge_rl.packing.minibatches import deal
from forge_rl.packing.rows import Layout, Minibatch, PackedBatch, Row, scattered_units
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
    # Dealt first, so that every update gets its part of the groups that it learns from.
    learns = [bool(group.trees) and not group.uniform for group in groups]
    # With one minibatch, another epoch would repeat the same rows; the trainer repeats them itself.
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
            # Nested lists hold either a number or an array of tokens for each episode.
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
        # The turn's place among all tokens that the episode generated, without the prompts between.
        segment_values[segment.turns == turn] = values[ends[turn] - len(episode.turns[turn].token_ids) : ends[turn]]
    return segment_values


def _summed(
    episodes: Sequence[Episode],
    advantages: torch.Tensor | Sequence[npt.NDArray[np.float32]],
    holders: Sequence[Sequence[tuple[int, int]]],
) -> torch.Tensor | Sequence[npt.NDArray[np.float32]]:
    """Add up the advantages of each turn that episodes share, in the first of these episodes, which trains it."""
    # The usual case: no world forked, and an advantage for the whole episode stays one number.
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
                # `np.split` returns views, so this adds to `token_advantages`.
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
        # An earlier episode trains these turns; here they are only what later turns have seen.
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
        # Generated here, but not trained: the engine gave no finite logprob.
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
    # Groups with and without a gradient never share a row, so that the latter's rows can be left out.
    parts = [
        [tree for group in groups if (drop_uniform and group.uniform) == is_spared for tree in group.trees]
        for is_spared in (False, True)
    ]
    row_lists = [assign_rows(trees, seq_len=layout.longest, shares=layout.shares) for trees in parts]
    rows, trees = row_lists[0] + row_lists[1], parts[0] + parts[1]
    episodes = [{branch.episode for tree in row for branch in tree.branches} for row in rows]
    columns = trees[0].branches[0].columns if trees else {}
    # Each of the devices that split a row gets a multiple of the block size, of which tensor parallelism takes equal
    # parts.
    multiple = math.lcm(layout.pad_multiple, layout.tensor_parallel_degree) * layout.context_parallel_degree
    min_length = layout.least_tokens * layout.context_parallel_degree
    return Minibatch(
        rows=tuple(_row(row, multiple, min_length, lengths, columns) for row in rows),
        tokens=sum(lengths.values()) + sum(group.repeated for group in groups),
        sequences=len(lengths),
        observations=sum(group.observations for group in groups),
        group_size=group_size,
        sources=sources,
        scattered=scattered_units(episodes, group_size),
        uniform_rows=len(row_lists[1]),
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
            # The branch before ends here: what it did not share with this one is seen no further.
            row["until"][path[num_shared:]] = position
            span = slice(position, position + branch.inputs - num_shared)
            # path[i] is where the branch's token i lies in the row: in its own range, or in the one of an earlier
            # branch.
            path = np.concatenate([path[:num_shared], np.arange(span.start, span.stop)])
            _lay_branch(row, columns, branch, num_shared, path)
            row["lengths"][path[branch.mask[1:]]] = lengths[branch.episode]
            position = span.stop
        # The last branch closes what is still open, down to the tree's root.
        row["until"][path] = position
    # Padding sees itself and the padding before it: a softmax over nothing would be NaN.
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
    # Position t predicts token t + 1, hence masks without their first entry.
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
