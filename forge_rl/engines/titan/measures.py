"""Metrics of an update, kept on the device until it ends and then read in one copy: of the loss, and of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from forge_rl.algorithms.kl import MAX_LOG_RATIO, kl_estimates
from forge_rl.algorithms.logprobs import logprob_gap
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

        Means and maxima over nothing are left out; such a maximum is -inf.
        """
        numbers = [*self._numbers, *extra_numbers]
        tensors = [number.detach().double().reshape(-1) for number in numbers if isinstance(number, torch.Tensor)]
        host_values = iter(torch.cat(tensors).tolist() if tensors else ())
        number_lists = [
            [next(host_values) for _ in range(number.numel())] if isinstance(number, torch.Tensor) else [float(number)]
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
    """Measure a row's trained tokens: entropy, the gap to the engine, and importance ratios, overall and by source.

    Tokens with a non-finite logprob are left out, except in the gap. Tokens that no version sampled have an entropy
    only.

    Args:
        tokens: number of trained tokens.
        version: the policy's version, see `LossInputs`.
    """
    mask, logprobs, entropy = inputs.mask, inputs.logprobs, inputs.entropy
    measures.add("tokens/trained", Sum, tokens)
    if inputs.values is not None:
        _measure_values(inputs.values, inputs, tokens, measures)
        return
    # On tokens sampled from these weights, the gap shows whether trainer and engine agree; on others it is drift.
    sampled = mask & (inputs.versions >= 0)
    fresh = torch.zeros_like(mask) if version is None else sampled & (inputs.versions == version)
    for name, token_mask in (("logprob_gap", fresh), ("logprob_drift", sampled & ~fresh)):
        gap = logprob_gap(logprobs, inputs.behaviour, token_mask)
        measures.add(name, Mean, gap["abs_sum"], gap["count"])
        measures.add(f"{name}/max", Max, torch.where(gap["count"] > 0, gap["max"], -math.inf))
    mask = mask & logprobs.isfinite() & inputs.behaviour.isfinite()
    sampled = sampled & mask
    names = sorted(set(inputs.sources))
    source_index = {name: i for i, name in enumerate(names)}
    group_sources = torch.tensor([*(source_index[name] for name in inputs.sources), 0], device=mask.device)
    token_sources = (
        group_sources[inputs.groups.long().clamp(min=-1)] if names else torch.zeros_like(mask, dtype=torch.int64)
    )
    log_ratio = (logprobs - inputs.behaviour).where(sampled, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, distance = log_ratio.exp(), log_ratio.abs()
    size, indicator = max(1, len(names)), sampled.to(logprobs.dtype)

    def sums(values: torch.Tensor, token_mask: torch.Tensor = sampled) -> torch.Tensor:
        """Sum the values of some of the tokens by source, [sources]."""
        return values.new_zeros(size).index_add_(0, token_sources, values.where(token_mask, 0.0))

    counts = sums(indicator)
    means = dict[str, tuple[torch.Tensor, torch.Tensor]]()
    if entropy is not None:
        means["entropy"] = sums(entropy, mask), sums(torch.ones_like(indicator), mask)
    # Tokens are the engine's samples: with lag or a mismatch, the divergence from the reference is only approximate.
    divergences = {"kl_behaviour": kl_estimates(inputs.behaviour, logprobs)}
    if inputs.reference is not None:
        divergences["kl_reference"] = kl_estimates(logprobs, inputs.reference)
    for name, estimates in divergences.items():
        means |= {f"{name}/{kind}": (sums(values), counts) for kind, values in estimates.items()}
    ratio_sums, square_sums = sums(ratio), sums(ratio.square())
    largest = logprobs.new_full((size,), -math.inf).scatter_reduce(
        0, token_sources, distance.where(sampled, -math.inf), "amax"
    )
    tails = logprobs.new_zeros(size * Tail.BINS).index_add_(0, token_sources * Tail.BINS + _bin(distance), indicator)
    tails = tails.view(size, Tail.BINS)
    parts = [("", slice(None))] + ([(f"/{name}", i) for name, i in source_index.items()] if size > 1 else [])
    for suffix, source in parts:
        count = counts[source].sum()
        for name, (totals, token_counts) in means.items():
            measures.add(f"{name}{suffix}", Mean, totals[source].sum(), token_counts[source].sum())
        measures.add(f"ratio/ess{suffix}", EffectiveShare, ratio_sums[source].sum(), square_sums[source].sum(), count)
        measures.add(f"ratio/max{suffix}", Max, largest[source].max().exp().where(count > 0, -math.inf))
        measures.add(f"ratio/p99{suffix}", Tail, tails[source].reshape(-1, Tail.BINS).sum(dim=0))


def _measure_values(values: torch.Tensor, inputs: LossInputs, tokens: int, measures: Measures) -> None:
    """Measure a value model's output on a row, and how much it explains of the targets, if the recipe gave them."""
    measures.add("values/mean", Mean, values.where(inputs.mask, 0.0).sum(), tokens)
    returns = inputs.columns.get("returns")
    if returns is not None:
        targets = returns.where(inputs.mask, 0.0).double()
        errors = (returns - values).where(inputs.mask, 0.0).double()
        measures.add("values/returns", Mean, targets.sum(), tokens)
        sums = targets.sum(), targets.square().sum(), errors.sum(), errors.square().sum()
        measures.add("values/explained_variance", ExplainedVariance, *sums, tokens)


def _bin(distance: torch.Tensor) -> torch.Tensor:
    """Return the bin of each distance from 0, see `Tail`."""
    bins = (distance.clamp(min=Tail.LEAST) / Tail.LEAST).log() / Tail.STEP
    return bins.long().clamp(0, Tail.BINS - 1)
