"""An update on a minibatch: its rows, the inputs that a loss gets from them, and statistics over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.logprobs import Scoring, TokenScores
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_statistics, spread
from forge_rl.engines.titan.measures import Measures
from forge_rl.errors import ForgeError
from forge_rl.packing.rows import Minibatch, Row


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """Rows and settings of one update.

    update = Update(minibatch=minibatch, loss=loss, temperature=0.7)
    metrics = engine.optimizer_step(engine.forward_backward(update), lr=1e-5)
    """

    minibatch: Minibatch
    """This share's rows."""
    loss: Loss
    temperature: float = 1.0
    """Sampling temperature of the episodes."""
    references: Sequence[torch.Tensor] = ()
    """[L] for each row, its logprobs under the frozen reference; () if the loss does not need them."""
    proximals: Sequence[torch.Tensor] = ()
    """[L] for each row, its logprobs under the policy before the batch's first update; () if the loss does not need
    them."""
    version: float | None = None
    """Version of the weights before the update, see `LossInputs`."""
    keeps_scores: bool = False
    """Whether to keep the rows' logprobs and entropies."""
    on_row: Callable[[], None] = lambda: None
    """Called after the backward pass of each row."""

    @property
    def counts(self) -> Counts:
        """Numbers of tokens and sequences in the minibatch of all shares."""
        minibatch = self.minibatch
        return Counts(tokens=minibatch.tokens, sequences=minibatch.sequences, observations=minibatch.observations)

    @property
    def divisor(self) -> float:
        """Number that divides the loss's sum over all rows."""
        return self.loss.divisor(self.counts)

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss needs statistics over several rows."""
        # If every episode or group lies within one row, the loss sees all of it at once.
        scope, minibatch = self.loss.scope, self.minibatch
        return bool(minibatch.rows) and (scope == "minibatch" or (bool(scope) and scope in minibatch.scattered))

    @property
    def scoring(self) -> Scoring:
        """Quantities to compute from each target's distribution."""
        needs = self.loss.needs
        return Scoring(
            temperature=self.temperature, entropy_gradient="entropy_gradient" in needs, squares="squares" in needs
        )

    def inputs(self, index: int, row: Row, scores: TokenScores, statistics: Mapping[str, torch.Tensor]) -> LossInputs:
        """Return the loss's inputs for one of the minibatch's rows.

        Args:
            row: the row, on the scores' device.
            scores: [L], with logprobs [L, 1 + k] if the row has a column of k "top_ids".
            statistics: the row's part of `minibatch_statistics`.
        """
        logprobs = scores.first
        # Inputs follow the scores' dtype, so the loss of a float64 model is float64 throughout.
        dtype = logprobs.dtype
        columns = {
            name: column.to(dtype) if column.is_floating_point() else column for name, column in row.columns.items()
        }
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
            group_size=self.minibatch.group_size,
            sources=self.minibatch.sources,
            version=self.version,
            entropy=scores.entropy,
            squares=scores.squares,
            reference=self.references[index] if self.references else None,
            proximal=self.proximals[index] if self.proximals else None,
            values=scores.values,
            observed=row.observed if "observations" in self.loss.needs else None,
            # Column 0 is the sampled token; the others are the teacher's top tokens.
            top_logprobs=scores.logprobs[:, 1:] if scores.logprobs.ndim == 2 else None,
            columns=columns,
            statistics=statistics,
        )


@dataclass(eq=False)
class RowResults:
    """Results of both passes over an update's rows, besides the gradients that they add up."""

    rows: int
    """Number of this share's rows."""
    measures: Measures = field(default_factory=Measures)
    errors: list[ForgeError] = field(default_factory=list)
    """Errors of the loss on this rank. Collected only if there are other ranks, see `measured_loss`."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """[L, 2] for each row, its logprobs and entropies, if the update keeps them."""
    expert_counts: list[torch.Tensor] = field(default_factory=list)
    """[layers with experts, experts + 3] for each row, see `routing_counts`; empty for dense models."""
    unmeasured: list[tuple[LossInputs, int]] = field(default_factory=list)
    """Rows not measured yet, each with its number of trained tokens."""
    rank_loads: list[torch.Tensor] = field(default_factory=list)
    """For each row, see `least_loaded.rank_loads`; empty unless expert-parallel ranks lend experts."""


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
        peers: number of consecutive ranks that have the same rows.
        group: ranks that compute the loss; all by default.

    Returns:
        The statistics of each of this share's rows, see `spread`.
    """
    local_tokens = _concatenated(rows)
    # Peers of a share hold identical rows, so one of them stands for all.
    shares = _gathered(local_tokens, group)[::peers]
    tokens = _concatenated(shares)
    # In the order of the batch, whatever the layout: a loss may choose tokens at random, or by their rank.
    order = (tokens.episodes.long() * 2**32 + tokens.segments.long()).argsort(stable=True)
    statistics = call_statistics(loss, tokens.at(order))
    # The inverse permutation finds each local token's place in the sorted statistics.
    inverse_order = torch.empty_like(order).index_put((order,), torch.arange(len(order), device=order.device))
    # The first of this share's tokens in the gathered order.
    first = sum(len(share.mask) for share in shares[: dist.get_rank(group) // peers])
    results: list[Mapping[str, torch.Tensor]] = []
    for positions, length in places:
        sorted_positions = inverse_order[first : first + len(positions)]
        first += len(positions)
        results.append(
            spread(
                {name: value[sorted_positions] if value.ndim else value for name, value in statistics.items()},
                positions,
                length,
            )
        )
    return results


def _concatenated(parts: Sequence[LossInputs]) -> LossInputs:
    """Join tokens of the same minibatch."""
    joined: dict[str, Any] = {name: torch.cat([vars(part)[name] for part in parts]) for name in parts[0].per_token()}
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    return replace(parts[0], **joined, columns=columns)


def _gathered(local_tokens: LossInputs, group: dist.ProcessGroup | None) -> list[LossInputs]:
    """Return the tokens of each rank of a group, in one collective of float64, which holds their values exactly."""
    world = dist.get_world_size(group)
    if world == 1:
        return [local_tokens]
    tensors: dict[str, torch.Tensor] = local_tokens.per_token() | {
        f".{name}": column for name, column in local_tokens.columns.items()
    }
    # int64, float32 and bool share one matrix: float64 holds all of their values here exactly.
    flat = torch.cat([tensor.double().reshape(len(tensor), _width(tensor)) for tensor in tensors.values()], 1)
    counts = [torch.zeros(1, dtype=torch.int64, device=flat.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(flat)], device=flat.device), group=group)
    longest = max(int(count) for count in counts)
    # all_gather needs equal shapes, so shorter parts are padded with zeros, which the counts cut off again.
    padded = torch.cat([flat, flat.new_zeros(longest - len(flat), flat.shape[1])])
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    rank_tokens = []
    for count, values in zip(counts, gathered, strict=True):
        parts = values[: int(count)].split([_width(tensor) for tensor in tensors.values()], 1)
        fields: dict[str, Any] = {
            name: part.reshape(-1, *tensor.shape[1:]).to(tensor.dtype)
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }
        columns = {name: fields.pop(f".{name}") for name in local_tokens.columns}
        rank_tokens.append(replace(local_tokens, **fields, columns=columns))
    return rank_tokens


def _width(values: torch.Tensor) -> int:
    return values.shape[1] if values.ndim > 1 else 1
