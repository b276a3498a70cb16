"""A comparison's batch as episodes of several turns, packed into rows and given to a loss as the trainer does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from benchmarks.conformance.batches import Batch
from forge_rl.algorithms.logprobs import TokenScores
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_loss
from forge_rl.engines.titan.update import Update, minibatch_statistics
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Minibatch, PackedBatch, Row
from forge_rl.types import Batch as Episodes
from forge_rl.types import Episode, Group, Task, Turn

_SEQ_LEN = 100
"""Tokens of a row: a batch fills several, which are not the shares of the peers' ranks."""


def packed_batch(
    batch: Batch, loss: Loss, columns: Mapping[str, Any], *, group_size: int, minibatches: int
) -> PackedBatch:
    """Pack a batch: token t of episode n is n * T + t + 1, so that rows lead back to it.

    Tokens of the batch that are not trained are the world's, between two turns, in every other episode, and in the
    others the model's, without a finite logprob.

    Args:
        columns: [N, T] or [N, T, k] by name, what the loss needs of each token.
    """
    lengths = [int(mask.nonzero()[0].max(initial=0)) + 1 for mask in batch["mask"]]
    episodes = [_episode(batch, number, length) for number, length in enumerate(lengths)]
    answered = [np.array([token - 1 for turn in episode.turns for token in turn.token_ids]) for episode in episodes]

    def of_tokens(values: npt.NDArray[Any]) -> list[list[npt.NDArray[Any]]]:
        flat = values.reshape(-1, *values.shape[2:])
        rows = [flat[places] for places in answered]
        return [rows[first : first + group_size] for first in range(0, len(rows), group_size)]

    firsts = range(0, len(episodes), group_size)
    groups = tuple(Group(task=_TASK, episodes=tuple(episodes[first : first + group_size])) for first in firsts)
    return pack(
        Episodes(groups=groups, version=0),
        of_tokens(batch["advantages"]),
        Layout(seq_len=_SEQ_LEN, minibatches=minibatches),
        columns={name: of_tokens(values) for name, values in columns.items()},
    )


_TASK = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))


def _episode(batch: Batch, number: int, length: int) -> Episode:
    mask, size = batch["mask"][number, :length], batch["mask"].shape[1]
    ids = number * size + np.arange(length) + 1
    logprobs = np.where(mask, batch["behaviour"][number, :length], np.nan)
    # Runs of trained and of other tokens alternate; each trained run becomes a turn.
    runs = np.split(np.arange(length), np.diff(mask).nonzero()[0] + 1)
    if number % 2 or not mask.any():
        runs = [np.arange(length)]
    turns = [
        Turn(
            prompt_ids=(batch["mask"].size + 1, *ids[: run[0]].tolist()),
            token_ids=ids[run],
            logprobs=logprobs[run],
            versions=np.zeros(len(run), np.int32),
            text="",
        )
        for run in runs
        if len(runs) == 1 or mask[run[0]]
    ]
    return Episode(task=_TASK, turns=tuple(turns))


def minibatch_loss(minibatch: Minibatch, loss: Loss, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a minibatch as the trainer computes it: a sum over rows, divided by one number.

    Args:
        leaves: float64 with gradient, [N, T], or [N, T, k] of "top_logprobs", what a model would have found of each
            token. Rows see NaN where nothing is trained.
    """
    if not loss.keeps_uniform:
        minibatch = minibatch.without_uniform()
    references, proximals = (
        [_lookup(row, leaves, name) for row in minibatch.rows] if name in loss.needs else ()
        for name in ("reference", "proximal")
    )
    update = Update(minibatch=minibatch, loss=loss, references=references, proximals=proximals, version=0.0)
    needed, total = loss.scope == "minibatch" or loss.scope in minibatch.scattered, torch.zeros((), dtype=torch.float64)
    statistics: list[Mapping[str, torch.Tensor]] = [{} for _ in minibatch.rows]
    if needed and minibatch.rows:
        places = [(row.mask.nonzero()[:, 0], len(row)) for row in minibatch.rows]
        parts = [_inputs(update, index, leaves, {}).at(tokens) for index, (tokens, _) in enumerate(places)]
        with _alone(), torch.no_grad():
            statistics = minibatch_statistics(loss, parts, places, peers=1)
    for index, row_statistics in enumerate(statistics):
        total = total + call_loss(loss, _inputs(update, index, leaves, row_statistics))[0]
    return total / update.divisor


def _inputs(
    update: Update, index: int, leaves: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]
) -> LossInputs:
    row = update.minibatch.rows[index]
    logprobs = _lookup(row, leaves, "logprobs")
    if "top_logprobs" in leaves:
        logprobs = torch.cat([logprobs[:, None], _lookup(row, leaves, "top_logprobs")], dim=1)
    values = _lookup(row, leaves, "values") if "values" in update.loss.needs else None
    scores = TokenScores(logprobs, _lookup(row, leaves, "entropy"), None, values)
    return update.inputs(index, row, scores, statistics)


def _lookup(row: Row, leaves: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    # A row's targets are token numbers, which lead back to their place in the batch.
    tokens = torch.where(row.mask, row.targets - 1, 0)
    values = leaves[name].flatten(0, 1)[tokens]
    return values.where(row.mask if values.ndim == 1 else row.mask[:, None], torch.nan)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Have a process group, of this process alone, as statistics are gathered from all ranks."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
