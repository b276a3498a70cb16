"""Explains the gap between the engines' and the trainer's logprobs: by position, probability, source, expert, layer
and version lag."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from forge_rl.errors import ConfigError
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import PackedBatch
from forge_rl.types import Batch, Episode, Group

if TYPE_CHECKING:
    import torch

    from forge_rl.services.generator import Generator
    from forge_rl.services.trainer import Trainer

_GAP_BOUNDS = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 5e-2}
"""Mean gap between trainer and engine logprobs above which a step warns, by dtype. If their dtypes differ, the larger
bound applies."""
_MOST_ROWS = 8
"""Rows of a table; experts with the largest gap come first."""
_LEAST_TOKENS = 20
"""Tokens that an expert must have had to be listed."""


@dataclass(frozen=True)
class GapGroup:
    """Tokens with a common property, and the gap of their logprobs."""

    name: str
    tokens: int
    mean: float
    """Mean absolute difference of the logprobs."""
    max: float
    """Largest absolute difference."""


@dataclass(frozen=True)
class GapReport:
    """Sources of the difference between the engines' and the trainer's logprobs."""

    fresh: GapGroup
    """Tokens sampled just now from the trainer's own weights: on these the two should agree."""
    tables: Mapping[str, Sequence[GapGroup]]
    """Groups of the fresh tokens by "position", "probability", "source" and "expert", and of the last batch's tokens by
    "lag". The gap by lag is drift, as the weights have changed since these tokens were sampled."""
    layers: Sequence[float]
    """For each layer, the mean change of a fresh token's logprob if this layer's output alone is off by one rounding of
    the engines' dtype."""

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=100, no_color=True)
        fresh = self.fresh
        console.print(f"gap of {fresh.tokens} tokens sampled now: {fresh.mean:.2e} on average, {fresh.max:.2e} at most")
        for title, groups in self.tables.items():
            table = Table(title=f"by {title}", title_justify="left", box=None)
            for column in (title, "tokens", "mean", "most"):
                table.add_column(column, justify="left" if column == title else "right")
            for group in groups:
                table.add_row(group.name, str(group.tokens), f"{group.mean:.2e}", f"{group.max:.2e}")
            console.print(table)
        if self.layers:
            worst = sorted(range(len(self.layers)), key=lambda layer: -self.layers[layer])[:_MOST_ROWS]
            table = Table(title="change of a logprob by rounding one layer's output", title_justify="left", box=None)
            table.add_column("layer")
            table.add_column("mean", justify="right")
            for layer in worst:
                table.add_row(str(layer), f"{self.layers[layer]:.2e}")
            console.print(table)
        return out.getvalue().rstrip()


def describe_gap(gap: float, *, engines: str, trainer: str) -> str:
    """Describe a logprob gap that is too large for the dtypes of engines and trainer; "" if it is not too large."""
    bound = max(_GAP_BOUNDS[engines], _GAP_BOUNDS[trainer])
    if gap <= bound:
        return ""
    text = f"trainer's and engines' logprobs differ by {gap:.2g} on average, more than {bound:g}"
    if engines == "bfloat16" != trainer:
        text += (
            f": updates that bfloat16 rounds away reach only the {trainer} trainer; set --trainer.dtype bfloat16, or "
            "--generator.dtype float32"
        )
    return text


async def explain_gap(generator: Generator, trainer: Trainer, batch: Batch, prompts: int) -> GapReport:
    """Sample answers from the trainer's own weights, let the trainer score them and the batch, and compare.

    Args:
        batch: the last step's batch; the answers are to prompts of its groups.
        prompts: number of prompts to answer.

    Raises:
        ConfigError: the engines do not have the trainer's weights, or no episode begins with a prompt.
    """
    import torch

    # With different weights on both sides, their change would be taken for a gap.
    if generator.version != trainer.version:
        raise ConfigError(
            f"engines have version {generator.version}, the trainer {trainer.version}",
            hint="call this between steps, once the weights are published",
        )
    groups = [group for group in batch.groups if group.episodes[0].turns][:prompts]
    if not groups:
        raise ConfigError("no episode of the last batch has a prompt to answer", hint="the agent called no policy")
    turns = await generator.sample([group.episodes[0].turns[0].prompt_ids for group in groups])
    answer_groups = [
        Group(task=group.task, episodes=(Episode(task=group.task, turns=(turn,)),))
        for group, turn in zip(groups, turns, strict=True)
    ]
    layout, temperature = replace(trainer.layout, minibatches=1), generator.sampling.temperature
    scores = []
    # Fresh answers show the gap of equal weights; the last batch's tokens add the drift since they were sampled.
    for scored_batch in (Batch(groups=tuple(answer_groups), version=trainer.version), batch):
        ones = torch.ones(len(scored_batch.groups), len(scored_batch.groups[0].episodes))
        packed = await asyncio.to_thread(pack, scored_batch, ones, layout, drop_uniform=False)
        scores.append((packed, await trainer.logprobs(packed, temperature=temperature)))
    # One rounding: the distance from 1 to the next number of the engines' dtype.
    relative = torch.finfo(getattr(torch, generator.dtype)).eps
    # How far one rounding in each layer moves the logprobs of the fresh answers.
    layers = await trainer.layer_noise(scores[0][0], temperature=temperature, relative=relative)
    return await asyncio.to_thread(explain, scores[0], scores[1], layers)


def explain(
    fresh: tuple[PackedBatch, Sequence[torch.Tensor]],
    last: tuple[PackedBatch, Sequence[torch.Tensor]],
    layers: Sequence[float],
) -> GapReport:
    """Group tokens by what may explain their gap.

    Args:
        fresh: tokens sampled from the trainer's weights, and the trainer's logprobs of each row's targets.
        last: likewise for the last batch.
        layers: see `GapReport.layers`.
    """
    fresh_tokens = _tokens(*fresh)
    gap = fresh_tokens["gap"]
    # [N], positions in powers of two: a gap that grows with the context shows over the whole length.
    positions = np.exp2(np.floor(np.log2(np.maximum(1, fresh_tokens["position"])))).astype(int)
    # [N], tenths of the probability that the engine gave each token; probability 1 counts with the last tenth.
    deciles = np.floor(np.exp(fresh_tokens["behaviour"]) * 10).clip(0, 9).astype(int)
    last_tokens = _tokens(*last)
    tables = {
        "position": _groups(gap, positions, lambda position: f"{position} to {2 * position - 1}"),
        "probability": _groups(gap, deciles, lambda decile: f"{decile / 10:.1f} to {(decile + 1) / 10:.1f}"),
        "source": _groups(gap, fresh_tokens["source"], str),
        "lag": _groups(last_tokens["gap"], last_tokens["lag"], str),
    }
    if "routed" in fresh_tokens:
        tables["expert"] = _by_expert(gap, fresh_tokens["routed"])
    everything = GapGroup("all", len(gap), float(gap.mean()) if len(gap) else 0.0, float(gap.max(initial=0.0)))
    return GapReport(fresh=everything, tables=tables, layers=layers)


def _tokens(packed: PackedBatch, logprobs: Sequence[torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Return each trained token's gap and its possible causes, [N] each; routed experts are [N, layers, top_k]."""
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    (minibatch, *_) = packed.minibatches
    for row, scored in zip(packed.rows, logprobs, strict=True):
        # [L], True for trained targets; the rest of a row is prompts, observations and padding.
        mask = row.mask.numpy()
        # float64, so that the difference itself adds no rounding.
        behaviour = row.behaviour.numpy()[mask].astype(np.float64)
        # Episodes are numbered through the batch, group by group: this is the index of the group, and of its source.
        groups = row.episodes.numpy()[mask] // minibatch.group_size
        parts: dict[str, npt.NDArray[Any]] = {
            "gap": abs(scored.double().numpy()[mask] - behaviour),
            "behaviour": behaviour,
            "position": row.positions.numpy()[mask],
            "lag": packed.version - row.versions.numpy()[mask],
            "source": np.array([minibatch.sources[group] for group in groups], dtype=object),
        }
        if row.routed is not None:
            parts["routed"] = row.routed.numpy()[mask]
        for name, values in parts.items():
            columns.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in columns.items()}


def _groups(gap: npt.NDArray[np.float64], keys: npt.NDArray[Any], name: Any) -> list[GapGroup]:
    """Return the groups of equal keys, in the order of the keys."""
    groups = []
    for key in sorted(set(keys.tolist())):
        gaps = gap[keys == key]
        groups.append(GapGroup(name(key), len(gaps), float(gaps.mean()), float(gaps.max())))
    return groups


def _by_expert(gap: npt.NDArray[np.float64], routed: npt.NDArray[Any]) -> list[GapGroup]:
    """Return the experts whose tokens have the largest gaps; `routed` is [N, layers, top_k], -1 where unknown."""
    experts = []
    for layer in range(routed.shape[1]):
        for expert in np.unique(routed[:, layer]):
            # A token counts for each of the top_k experts that it had in this layer.
            gaps = gap[(routed[:, layer] == expert).any(axis=1)]
            if expert >= 0 and len(gaps) >= _LEAST_TOKENS:
                experts.append(GapGroup(f"{expert} of layer {layer}", len(gaps), float(gaps.mean()), float(gaps.max())))
    return sorted(experts, key=lambda group: -group.mean)[:_MOST_ROWS]
