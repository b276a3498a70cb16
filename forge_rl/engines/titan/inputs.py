"""Makes a loss's inputs from rows and their scores, and statistics over all rows of a minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.logprobs import Scoring, TokenScores
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_statistics, spread
from forge_rl.packing.rows import Minibatch, Row


class RowInputs:
    """Makes the inputs that a loss needs of the rows of a minibatch; for `version` see `LossInputs`."""

    def __init__(self, minibatch: Minibatch, loss: Loss, version: float | None = None) -> None:
        self.loss = loss
        self._version = version
        self.counts = Counts(
            tokens=minibatch.tokens, sequences=minibatch.sequences, observations=minibatch.observations
        )
        self._minibatch = minibatch

    def scoring(self, temperature: float) -> Scoring:
        """Return what to compute of each target's distribution."""
        needs = self.loss.needs
        return Scoring(
            temperature=temperature, entropy_gradient="entropy_gradient" in needs, squares="squares" in needs
        )

    def of(
        self,
        row: Row,
        scores: TokenScores,
        reference: torch.Tensor | None,
        proximal: torch.Tensor | None,
        statistics: Mapping[str, torch.Tensor],
    ) -> LossInputs:
        """Return a row's inputs; `scores` are [L], with logprobs [L, 1 + k] if it has a column of k "top_ids"."""
        logprobs = scores.first
        dtype = logprobs.dtype
        columns = {name: each.to(dtype) if each.is_floating_point() else each for name, each in row.columns.items()}
        return LossInputs(
            logprobs=logprobs,
            behaviour=row.behaviour.to(dtype),
            advantages=row.advantages.to(dtype),
            weights=self.loss.aggregation.weights(row.lengths.to(dtype)),
            mask=row.mask,
            versions=row.versions,
            episodes=row.episodes,
            turns=row.turns,
            segments=row.segments,
            lengths=row.lengths,
            counts=self.counts,
            group_size=self._minibatch.group_size,
            sources=self._minibatch.sources,
            version=self._version,
            entropy=scores.entropy,
            squares=scores.squares,
            reference=reference,
            proximal=proximal,
            values=scores.values,
            observed=row.observed if "observations" in self.loss.needs else None,
            top_logprobs=scores.logprobs[:, 1:] if scores.logprobs.ndim == 2 else None,
            columns=columns,
            statistics=statistics,
        )


def minibatch_statistics(
    loss: Loss,
    rows: Sequence[LossInputs],
    places: Sequence[tuple[torch.Tensor, int]],
    *,
    peers: int,
    group: dist.ProcessGroup | None = None,
) -> list[Mapping[str, torch.Tensor]]:
    """Compute a loss's statistics over all rows of a minibatch on all ranks.

    Args:
        rows: the trained tokens of each of this share's rows, see `LossInputs.at`.
        places: their positions in the row, and the row's length.
        peers: ranks that have the same rows, in succession.
        group: the ranks that have rows; all by default.

    Returns:
        The statistics of each of this share's rows, see `spread`.
    """
    own = _concatenated(rows)
    shares = _gathered(own, group)[::peers]
    tokens = _concatenated(shares)
    # In the order of the batch, whatever the layout: a loss may choose tokens at random, or by their rank.
    order = (tokens.episodes.long() * 2**32 + tokens.segments.long()).argsort(stable=True)
    found = call_statistics(loss, tokens.at(order))
    back = torch.empty_like(order).index_put((order,), torch.arange(len(order), device=order.device))
    first = sum(len(each.mask) for each in shares[: dist.get_rank(group) // peers])
    results: list[Mapping[str, torch.Tensor]] = []
    for positions, length in places:
        mine = back[first : first + len(positions)]
        first += len(positions)
        results.append(spread({n: each[mine] if each.ndim else each for n, each in found.items()}, positions, length))
    return results


def _concatenated(parts: Sequence[LossInputs]) -> LossInputs:
    """Join tokens of the same minibatch."""
    joined: dict[str, Any] = {name: torch.cat([vars(each)[name] for each in parts]) for name in parts[0].per_token()}
    columns = {name: torch.cat([each.columns[name] for each in parts]) for name in parts[0].columns}
    return replace(parts[0], **joined, columns=columns)


def _gathered(own: LossInputs, group: dist.ProcessGroup | None) -> list[LossInputs]:
    """Return the tokens of each rank of a group, in one collective of float64 values, which hold all others exactly."""
    world = dist.get_world_size(group)
    if world == 1:
        return [own]
    tensors: dict[str, torch.Tensor] = own.per_token() | {f".{name}": each for name, each in own.columns.items()}
    flat = torch.cat([each.double().reshape(len(each), _width(each)) for each in tensors.values()], 1)
    counts = [torch.zeros(1, dtype=torch.int64, device=flat.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(flat)], device=flat.device), group=group)
    longest = max(int(each) for each in counts)
    padded = torch.cat([flat, flat.new_zeros(longest - len(flat), flat.shape[1])])
    everyone = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(everyone, padded, group=group)
    found = []
    for count, values in zip(counts, everyone, strict=True):
        parts = values[: int(count)].split([_width(each) for each in tensors.values()], 1)
        read: dict[str, Any] = {
            name: part.reshape(-1, *like.shape[1:]).to(like.dtype)
            for (name, like), part in zip(tensors.items(), parts, strict=True)
        }
        columns = {name: read.pop(f".{name}") for name in own.columns}
        found.append(replace(own, **read, columns=columns))
    return found


def _width(values: torch.Tensor) -> int:
    return values.shape[1] if values.ndim > 1 else 1
