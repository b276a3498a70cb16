"""Rows of a batch, in which the segments of a group share every common prefix.

Segments of a group form a tree: a prefix of several segments is stored and computed once, at every level. A tree is
laid out depth first, so that the positions after a prefix are one range (`Row.until`), which the attention mask
(`attends`) needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.errors import ConfigError, check_flags
from forge_rl.packing.trees import round_up


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
    """int64, next token; 0 where there is none, or where segments continue differently."""
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
        # Whether an episode or group still lies in several rows depends on the rows that stay.
        rows = self.rows[: len(self.rows) - self.uniform_rows]
        episodes = [set(np.unique(row.episodes.numpy()[row.mask.numpy()]).tolist()) for row in rows]
        return replace(self, rows=rows, uniform_rows=0, scattered=scattered_units(episodes, self.group_size))


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
    """Part of `sequence_tokens` that lies in `Minibatch.uniform_rows`."""
    unscored_tokens: int
    """Completion tokens that are masked because the engine returned no finite logprob for them."""
    uniform_share: float
    """Share of groups whose advantages are all 0."""
    version: int
    """Version of the batch: a target's lag is this minus the target's version."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the first epoch: each trained token is a target in exactly one of them."""
        # Every epoch deals the same groups, so the first has all tokens once.
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


def scattered_units(episodes: Sequence[set[int]], group_size: int) -> frozenset[str]:
    """Return "episode" if an episode lies in several rows, and "group" if a group does, given each row's episodes."""
    groups = [{episode // group_size for episode in row} for row in episodes]
    return frozenset(
        name
        for name, parts in (("episode", episodes), ("group", groups))
        if sum(map(len, parts)) > len(set().union(*parts))
    )
