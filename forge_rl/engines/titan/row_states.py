"""States of layers over packed rows: linear attention, state spaces and short convolutions see each episode from its
first token on, in few calls of a kernel for the whole row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.packing.rows import Row

_Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of a kernel over segments of a row: a batch of segments, or one sequence of them with offsets."""

    tokens: torch.Tensor
    """[B, T] int64, indices of tokens in the row; the row's length stands for a token of zeros."""
    offsets: torch.Tensor | None
    """[N + 1] int32, where the N segments of a single sequence start, and its end; None for a batch of segments."""
    host_offsets: torch.Tensor | None
    """The same in host memory, so that a kernel that needs the lengths there does not wait for the device."""
    parents: torch.Tensor | None
    """[N] int64, each segment's predecessor among the segments of the level before; None for states of zeros."""
    has_children: bool
    """True if a later call continues from its states."""

    @cached_property
    def segment_ids(self) -> torch.Tensor:
        """Segment of each token of a single sequence, [1, T] int32."""
        assert self.offsets is not None, "a batch of segments has none"
        lengths = self.offsets.diff()
        ids = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return ids.repeat_interleave(lengths)[None]


Kernel: TypeAlias = Callable[
    [Sequence[torch.Tensor], torch.Tensor | None, Call], tuple[torch.Tensor, torch.Tensor | None]
]
"""Recurrence over inputs [B, T, ...] from the segments' first states [N, ...], or None for zeros; returns outputs
[B, T, ...], and the last states [N, ...] of a call that has children."""


class Schedule(NamedTuple):
    """Calls of a kernel that cover a row."""

    levels: tuple[tuple[Call, ...], ...]
    """Calls by level; those after the first level start from states of the level before."""
    places: torch.Tensor
    """[L] int64, each token's index among the outputs of all calls; their number for padding, whose output is 0."""
    recomputed_tokens: int
    """Prefix tokens that calls compute again, for a branch that begins with them."""


class Halo(NamedTuple):
    """Sequence in which every token follows the tokens that a convolution needs for it."""

    tokens: torch.Tensor
    """[T] int64, indices of tokens in the row; the row's length stands for a token of zeros."""
    places: torch.Tensor
    """[L] int64, each token's index in the sequence."""


class _TokenRun(NamedTuple):
    """Tokens that follow one another in a row and in their episode."""

    first: int
    end: int
    ancestors: _Indices
    """Tokens of the same episode before the first one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStates:
    """Where states start, continue and branch in a row.

    Args:
        row: the row.
        shared: compute the state of a shared prefix once and hand it to each branch, instead of computing the prefix
            again for each branch in one call.
    """

    row: Row
    shared: bool
    _schedules: dict[tuple[int, bool], Schedule] = field(default_factory=dict)
    _halos: dict[int, Halo] = field(default_factory=dict)

    def scan(
        self, kernel: Kernel, inputs: Sequence[torch.Tensor], *, chunk: int | None, shared: bool = True
    ) -> torch.Tensor:
        """Run a recurrence over each episode of the row; returns [1, L, ...].

        Args:
            kernel: the recurrence.
            inputs: its inputs, [1, L, ...].
            chunk: None if the kernel takes offsets, so that each level is one call; else segments are batched that have
                the same length once padded with zeros to a multiple of this, and the kernel must ignore zeros.
            shared: False if the kernel takes no first states.
        """
        levels, places, _ = self._schedule(chunk or 0, shared and self.shared)
        if chunk is not None and chunk > 1:
            inputs = [_with_zeros(value) for value in inputs]
        outputs: list[torch.Tensor] = []
        states: torch.Tensor | None = None
        for level in levels:
            level_states = []
            for call in level:
                first_states = None if states is None else states[call.parents]
                output, last_states = kernel([value[0][call.tokens] for value in inputs], first_states, call)
                outputs.append(output.flatten(0, 1))
                if last_states is not None:
                    level_states.append(last_states)
            states = torch.cat(level_states) if level_states else None
        outputs.append(torch.zeros_like(outputs[0][:1]))
        return torch.cat(outputs)[places][None]

    def convolve(
        self, convolution: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Run a causal convolution over each episode of the row; returns [1, L, C].

        Args:
            convolution: takes and returns [1, T, C].
            values: [1, L, C].
            width: number of tokens that an output depends on.
        """
        halo = self._halo(width - 1)
        return convolution(_with_zeros(values)[:, halo.tokens])[:, halo.places]

    @property
    def recomputed_tokens(self) -> int:
        """Prefix tokens computed again for branches, by the recurrence that computes most of them again."""
        return max((schedule.recomputed_tokens for schedule in self._schedules.values()), default=0)

    @cached_property
    def _runs(self) -> list[_TokenRun]:
        positions, trees, until = (
            values.cpu().numpy() for values in (self.row.positions, self.row.trees, self.row.until)
        )
        is_token = trees >= 0  # rows that were joined have padding between them
        # A row of nothing but padding gets one run, so that no call is without tokens.
        is_token[0] |= not is_token.any()
        # A run ends with its branch, with its episode, or at a jump in positions.
        is_continued = (
            is_token[1:]
            & is_token[:-1]
            & (trees[1:] == trees[:-1])
            & (until[:-1] > np.arange(1, len(until)))
            & (positions[1:] == positions[:-1] + 1)
        )
        starts = np.flatnonzero(is_token & ~np.append(False, is_continued)).tolist()
        ends = np.flatnonzero(is_token & ~np.append(is_continued, False)) + 1
        return [
            _TokenRun(first, end, np.flatnonzero(is_token[:first] & (until[:first] > first)))
            for first, end in zip(starts, ends.tolist(), strict=True)
        ]

    def _schedule(self, chunk: int, shared: bool) -> Schedule:
        if (key := (chunk, shared)) not in self._schedules:
            one_level = [[_CallSegment(run.ancestors, run.first, run.end, 0) for run in self._runs]]
            self._schedules[key] = _schedule(self._branches() if shared else one_level, self.row, chunk)
        return self._schedules[key]

    def _branches(self) -> list[list[_CallSegment]]:
        """Return the parts of runs between branches, by their distance from the root of their tree."""
        previous = {run.first: int(run.ancestors[-1]) if len(run.ancestors) else -1 for run in self._runs}
        starts = sorted(set(previous) | {token + 1 for token in previous.values() if token >= 0})
        ends = sorted({run.end for run in self._runs} | (set(starts) - previous.keys()))
        levels: list[list[_CallSegment]] = []
        locations: dict[int, tuple[int, int]] = {}  # of the segment that ends with a token: its level and index there
        # Parents precede their children in a row, so their locations are known when they are looked up.
        for first, end in zip(starts, ends, strict=True):
            level, parent = locations.get(previous.get(first, first - 1), (-1, 0))
            if level + 1 == len(levels):
                levels.append([])
            locations[end - 1] = level + 1, len(levels[level + 1])
            levels[level + 1].append(_CallSegment(np.empty(0, np.int64), first, end, parent))
        return levels

    def _halo(self, width: int) -> Halo:
        if width not in self._halos:
            size = len(self.row)
            # Index `size` stands for a token of zeros; one comes first, for padding to point at.
            places, sequences, offset = np.zeros(size, np.int64), [np.full(1, size)], 1
            for run in self._runs:
                # The last tokens before the run in its own episode, or zeros where the episode is shorter.
                context = run.ancestors[max(0, len(run.ancestors) - width) :]
                zeros = np.full(width - len(context), size)
                sequences += [zeros, context, np.arange(run.first, run.end)]
                places[run.first : run.end] = np.arange(run.end - run.first) + offset + width
                offset += width + run.end - run.first
            tokens = np.concatenate(sequences)
            self._halos[width] = Halo(
                *(torch.from_numpy(value).to(self.row.trees.device) for value in (tokens, places))
            )
        return self._halos[width]


class _CallSegment(NamedTuple):
    """Tokens of a row whose outputs a call computes."""

    context: _Indices
    """Tokens that the call computes before them, once more."""
    first: int
    end: int
    parent: int
    """Index of its predecessor in the level before; 0 in the first level."""


def _schedule(levels: list[list[_CallSegment]], row: Row, chunk: int) -> Schedule:
    size, device = len(row), row.trees.device
    places, offset = np.full(size, -1, np.int64), 0
    ranks = np.empty(0, np.int64)  # index of each segment's last state, by its index in the level before
    scheduled_levels = []
    for number, level in enumerate(levels):
        batches: dict[int, list[int]] = {}
        for index, segment in enumerate(level):
            length = len(segment.context) + segment.end - segment.first
            # Kernels that take offsets run a level in one call; others batch segments of equal padded length.
            batches.setdefault(-(-length // chunk) * chunk if chunk else 0, []).append(index)
        calls = []
        for width, members in batches.items():
            sequences = [
                np.concatenate([level[index].context, np.arange(level[index].first, level[index].end)])
                for index in members
            ]
            lengths = np.array([width or len(sequence) for sequence in sequences])
            starts = np.concatenate([[0], lengths.cumsum()])
            tokens = np.full(starts[-1], size, np.int64)
            for index, sequence, start in zip(members, sequences, starts, strict=False):
                tokens[start : start + len(sequence)] = sequence
                segment, end = level[index], start + len(sequence)
                places[segment.first : segment.end] = np.arange(end - segment.end + segment.first, end) + offset
            offsets = None if width else torch.from_numpy(starts.astype(np.int32))
            parents = ranks[[level[index].parent for index in members]] if number else None
            calls.append(
                Call(
                    tokens=torch.from_numpy(tokens).to(device).view(len(members) if width else 1, -1),
                    offsets=None if offsets is None else offsets.to(device),
                    host_offsets=offsets,
                    parents=None if parents is None else torch.from_numpy(parents).to(device),
                    has_children=number + 1 < len(levels),
                )
            )
            offset += len(tokens)
        # Calls group a level's segments by length, so the next level looks up its parents by this order.
        ranks = np.argsort(np.concatenate([np.array(members) for members in batches.values()]))
        scheduled_levels.append(tuple(calls))
    # Padding reads the zeros appended after all outputs.
    places[places < 0] = offset
    recomputed_tokens = sum(len(segment.context) for level in levels for segment in level)
    return Schedule(tuple(scheduled_levels), torch.from_numpy(places).to(device), recomputed_tokens)


def _with_zeros(values: torch.Tensor) -> torch.Tensor:
    """Append a token of zeros to values, [1, L, ...]."""
    return torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
