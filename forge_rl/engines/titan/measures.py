"""Metrics of an update, kept on the device until it ends and then read in one copy: of the loss, and of tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from forge_rl.algorithms.kl import MAX_LOG_RATIO, estimates
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_loss
from forge_rl.errors import ForgeError
from forge_rl.metrics import EffectiveShare, ExplainedVariance, Max, Mean, Sum, Tail, Value, merge_all

_KINDS: dict[type[Value], int] = {Sum: 1, Max: 1, Mean: 2, EffectiveShare: 3, ExplainedVariance: 5, Tail: 1}
"""Kinds of values, with the number of scalars that each takes; a tail takes a tensor of counts."""


class Measures:
    """Collects values that may be tensors: reading each of them separately would sync the device every time.

    measures = Measures()
    measures.add("entropy", Mean, entropy.sum(), tokens)
    metrics, (norm,) = measures.read(norm)
    """

    def __init__(self) -> None:
        self._values: list[tuple[str, type[Value]]] = []
        self._numbers: list[torch.Tensor | float] = []

    def add(self, name: str, kind: type[Value], *numbers: torch.Tensor | float) -> None:
        """Add a value of a metric from the numbers that its kind takes; tensors must be scalars, except for a tail."""
        assert len(numbers) == _KINDS[kind], f"{kind.__name__} of {len(numbers)} numbers"
        self._values.append((name, kind))
        self._numbers += numbers

    def read(self, *extra_numbers: torch.Tensor) -> tuple[dict[str, Value], Sequence[float]]:
        """Sync the device; return the merged values and the other scalars.

        Means and maxima over nothing are left out; a maximum over nothing is -inf.
        """
        numbers = [*self._numbers, *extra_numbers]
        # Joined by dtype, so that the device converts a few tensors and not each number.
        flat: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for number in numbers:
            if isinstance(number, torch.Tensor):
                flat[number.dtype].append(number.detach().reshape(-1))
        joined_values = [torch.cat(tensors).double() for tensors in flat.values()]
        values_of_dtypes = iter(torch.cat(joined_values).tolist() if joined_values else ())
        host_values = {
            dtype: iter([next(values_of_dtypes) for tensor in tensors for _ in range(len(tensor))])
            for dtype, tensors in flat.items()
        }
        # Hand the numbers back in the order in which they were added; each dtype's values come in that order.
        number_lists = [
            [next(host_values[number.dtype]) for _ in range(number.numel())]
            if isinstance(number, torch.Tensor)
            else [float(number)]
            for number in numbers
        ]
        remaining = iter(number_lists)
        values = [(name, _value(kind, [next(remaining) for _ in range(_KINDS[kind])])) for name, kind in self._values]
        scalars = [number for (number,) in remaining]
        return merge_all({name: value} for name, value in values if not _is_empty(value)), scalars


def _value(kind: type[Value], numbers: Sequence[Sequence[float]]) -> Value:
    return Tail(tuple(numbers[0])) if kind is Tail else kind(*(number for (number,) in numbers))  # type: ignore[arg-type]


def _is_empty(value: Value) -> bool:
    match value:
        case Mean(count=count) | EffectiveShare(count=count) | ExplainedVariance(count=count):
            return not count
        case Tail(counts):
            return not any(counts)
    return value == Max(-math.inf)


def measured_loss(loss: Loss, inputs: LossInputs, measures: Measures, failed: list[ForgeError]) -> torch.Tensor:
    """Compute a row's loss, and add its metrics to `measures`.

    If it raises and there are other ranks, append the error to `failed` and return NaN: the other ranks wait for this
    rank's gradient, and skip the update because it is not finite.
    """
    outputs = inputs.logprobs if inputs.values is None else inputs.values
    try:
        # Once a row has failed, the update is lost: later rows skip the loss, and only keep the passes in step.
        if failed:
            return outputs.sum() * math.nan
        total, sums = call_loss(loss, inputs)
    except ForgeError as error:
        if dist.get_world_size() == 1:
            raise
        failed.append(error)
        return outputs.sum() * math.nan
    tokens = inputs.mask.sum()
    for name, value in sums.items():
        if name == loss.equal_metric:
            continue
        if isinstance(value, tuple):
            measures.add(f"loss/{name}", Mean if len(value) == 2 else EffectiveShare, *value)
        elif name.endswith("/max"):
            measures.add(f"loss/{name}", Max, value)
        else:
            measures.add(f"loss/{name}", Mean, value, tokens)
    return total


@torch.no_grad()
def measure_tokens(inputs: LossInputs, tokens: int, measures: Measures, version: float | None) -> None:
    """Measure trained tokens of rows: entropy, the gap to the engine, and importance ratios, overall and by source.

    Tokens with a non-finite logprob are left out, except in the gap. Tokens that no version sampled have an entropy
    only.

    Args:
        tokens: number of trained tokens.
        version: the policy's version, see `LossInputs`.
    """
    measures.add("tokens/trained", Sum, tokens)
    if inputs.values is not None:
        _measure_values(inputs.values, inputs, tokens, measures)
        return
    # On tokens sampled from these weights, the gap shows whether trainer and engine agree; on others it is drift.
    mask, difference = inputs.mask, inputs.logprobs - inputs.behaviour
    # A negative version marks tokens that no engine sampled, such as given answers.
    sampled, gap = mask & (inputs.versions >= 0), difference.abs()
    fresh = torch.zeros_like(mask) if version is None else sampled & (inputs.versions == version)
    masks = torch.stack([fresh, sampled ^ fresh])
    # Tokens outside a mask become -inf: the maximum ignores them, and the clamp turns them into 0 for the sum.
    gaps = gap.where(masks, -math.inf)
    totals, counts, largest = gaps.clamp(min=0).sum(dim=1), masks.sum(dim=1), gaps.amax(dim=1)
    for index, name in enumerate(("logprob_gap", "logprob_drift")):
        measures.add(name, Mean, totals[index], counts[index])
        measures.add(f"{name}/max", Max, largest[index])
    is_finite = gap < math.inf
    _measure_sampled(inputs, mask & is_finite, sampled & is_finite, difference, measures)


def joined_rows(rows: Sequence[LossInputs]) -> LossInputs:
    """Join rows of an update as far as `measure_tokens` reads them."""
    first = rows[0]
    if len(rows) == 1:
        return first
    names = ("logprobs", "behaviour", "mask", "versions", "episodes", "entropy", "reference", "values")
    joined: dict[str, Any] = {
        name: torch.cat([getattr(row, name) for row in rows]) for name in names if getattr(first, name) is not None
    }
    columns = {name: torch.cat([row.columns[name] for row in rows]) for name in ("returns",) if name in first.columns}
    return replace(first, **joined, columns=columns)


def _measure_sampled(
    inputs: LossInputs, mask: torch.Tensor, sampled: torch.Tensor, difference: torch.Tensor, measures: Measures
) -> None:
    """Measure entropy, divergences and ratios over tokens with finite logprobs, overall and by source.

    Args:
        mask: the trained tokens.
        sampled: trained tokens that a known version sampled.
        difference: logprobs less the engine's.
    """
    zero, indicator = difference.new_zeros(()), sampled.to(difference.dtype)
    log_ratio = difference.where(sampled, zero).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, distance = log_ratio.exp() * indicator, log_ratio.abs()
    # Per-token values, 0 wherever a token does not count.
    values = {"count": indicator, "ratio": ratio, "squares": ratio.square()}
    if inputs.entropy is not None:
        values |= {"entropy": inputs.entropy.where(mask, zero), "entropies": mask.to(difference.dtype)}
    # Tokens are the engine's samples: with lag or a mismatch, the divergence from the reference is only approximate.
    divergences = {"kl_behaviour": estimates(-log_ratio)}
    if inputs.reference is not None:
        reference_ratio = (inputs.logprobs - inputs.reference).where(sampled, zero)
        divergences["kl_reference"] = estimates(reference_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    kinds = [f"{name}/{kind}" for name, kinds in divergences.items() for kind in kinds]
    values |= zip(kinds, (value for kinds in divergences.values() for value in kinds.values()), strict=True)
    # With several sources, one `index_add_` computes every sum of every source.
    names = sorted(set(inputs.sources))
    if len(names) > 1:
        source_index = {name: index for index, name in enumerate(names)}
        # Padding has group -1, which indexes the extra last entry; its values are all 0.
        group_sources = torch.tensor([*(source_index[name] for name in inputs.sources), 0], device=mask.device)
        token_sources = group_sources[inputs.groups.long().clamp(min=-1)]
        sums = difference.new_zeros(len(values), len(names)).index_add_(
            1, token_sources, torch.stack([*values.values()])
        )
        largest = difference.new_zeros(len(names)).scatter_reduce(0, token_sources, distance, "amax")
        bins = token_sources * Tail.BINS + _bin(distance)
    else:
        sums, largest, bins = torch.stack([*values.values()]).sum(dim=1, keepdim=True), distance.amax(), _bin(distance)
    tails = difference.new_zeros(max(1, len(names)) * Tail.BINS).index_add_(0, bins, indicator).view(-1, Tail.BINS)
    by_name = dict(zip(values, sums, strict=True))
    count = by_name["count"]
    # The largest |log ratio| stands for both directions: a ratio of 1/8 counts as 8.
    largest = largest.exp().where(count > 0, -math.inf)
    # All sources merge to the overall values.
    for index, suffixes in enumerate([("", f"/{name}") for name in names] if len(names) > 1 else [("",)]):
        for suffix in suffixes:
            if inputs.entropy is not None:
                measures.add(f"entropy{suffix}", Mean, by_name["entropy"][index], by_name["entropies"][index])
            for kind in kinds:
                measures.add(f"{kind}{suffix}", Mean, by_name[kind][index], count[index])
            shares = by_name["ratio"][index], by_name["squares"][index], count[index]
            measures.add(f"ratio/ess{suffix}", EffectiveShare, *shares)
            measures.add(f"ratio/max{suffix}", Max, largest[index])
            measures.add(f"ratio/p99{suffix}", Tail, tails[index])


def _measure_values(values: torch.Tensor, inputs: LossInputs, tokens: int, measures: Measures) -> None:
    """Measure a value model's output on a row, and how much it explains of the targets, if the recipe gave them."""
    measures.add("values/mean", Mean, values.where(inputs.mask, 0.0).sum(), tokens)
    returns = inputs.columns.get("returns")
    if returns is not None:
        # Explained variance subtracts sums of squares, which would cancel in float32.
        targets = returns.where(inputs.mask, 0.0).double()
        errors = (returns - values).where(inputs.mask, 0.0).double()
        measures.add("values/returns", Mean, targets.sum(), tokens)
        sums = targets.sum(), targets.square().sum(), errors.sum(), errors.square().sum()
        measures.add("values/explained_variance", ExplainedVariance, *sums, tokens)


def _bin(distance: torch.Tensor) -> torch.Tensor:
    """Return the bin of each distance from 0, see `Tail`."""
    bins = (distance.clamp(min=Tail.LEAST) / Tail.LEAST).log() / Tail.STEP
    return bins.long().clamp(0, Tail.BINS - 1)
