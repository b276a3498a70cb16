"""Measures a row's trained tokens: entropy, the gap to the engine, and importance ratios, overall and by source."""

from __future__ import annotations

import math

import torch

from forge_rl.algorithms.kl import MAX_LOG_RATIO, kl_estimates
from forge_rl.algorithms.logprobs import logprob_gap
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.engines.titan.measures import Measures
from forge_rl.metrics import EffectiveShare, ExplainedVariance, Max, Mean, Sum, Tail


@torch.no_grad()
def measure_tokens(inputs: LossInputs, tokens: int, measures: Measures, version: float | None) -> None:
    """Measure the trained tokens of a row; those with a non-finite logprob are left out, except in the gap.

    Tokens that no version sampled have an entropy only.

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
    for name, compared in (("logprob_gap", fresh), ("logprob_drift", sampled & ~fresh)):
        gap = logprob_gap(logprobs, inputs.behaviour, compared)
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
