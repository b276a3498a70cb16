"""Stacks of published tensors: a layer's experts that are adjacent in memory, read and copied as one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from forge_rl.weights.manifest import ALIGN, TensorEntry

_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")


class Stack(NamedTuple):
    """Published tensors of one shape at equal distances in memory; a tensor without such neighbours is a stack of
    one."""

    entries: tuple[TensorEntry, ...]
    values: torch.Tensor
    """`[tensors, *shape]`, a view of their memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.entries), *self.entries[0].shape

    @property
    def expert(self) -> int | None:
        """Number of the first tensor's expert; None if it is not an expert's."""
        match = _EXPERT.fullmatch(self.entries[0].name)
        return int(match[2]) if match else None


def stacks_of(entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> Iterator[Stack]:
    """Yield entries as stacks: the same weight of consecutive experts forms one if its tensors are adjacent in memory.

    Args:
        entries: in the order in which they lie in a bucket.
        tensors: their values by name.
    """
    run: list[TensorEntry] = []
    for entry in entries:
        if run and not _continues(run, entry, tensors):
            yield _stack(run, tensors)
            run = []
        run.append(entry)
    if run:
        yield _stack(run, tensors)


def _continues(run: Sequence[TensorEntry], entry: TensorEntry, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether an entry continues the stack of a run of entries."""
    last, match, last_match = run[-1], _EXPERT.fullmatch(entry.name), _EXPERT.fullmatch(run[-1].name)
    if match is None or last_match is None or (entry.shape, entry.dtype) != (last.shape, last.dtype):
        return False
    # Same layer and weight, and the next expert's number.
    follows = (match[1], int(match[2]), match[3]) == (last_match[1], int(last_match[2]) + 1, last_match[3])
    values, last_values = tensors[entry.name], tensors[last.name]
    # A view over several tensors must stay within one storage.
    if not follows or values.untyped_storage().data_ptr() != last_values.untyped_storage().data_ptr():
        return False
    # Distance in elements. All distances of a stack are equal, as one stride describes them.
    step = values.storage_offset() - last_values.storage_offset()
    if len(run) > 1 and step != last_values.storage_offset() - tensors[run[-2].name].storage_offset():
        return False
    # Adjacent up to the padding with which a bucket aligns its tensors.
    return 0 <= step * values.itemsize - values.nbytes < ALIGN and values.stride() == last_values.stride()


def _stack(run: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> Stack:
    first = tensors[run[0].name]
    if len(run) == 1:
        return Stack((run[0],), first[None])
    step = tensors[run[1].name].storage_offset() - first.storage_offset()
    return Stack(tuple(run), first.as_strided((len(run), *first.shape), (step, *first.stride())))
