"""Measures a row's trained tokens: entropy, the gap to the engine, and importance ratios, over all and by source."""

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
    """Measure the trained tokens of a row; those with a logprob that is not finite are left out, but for the gap.

    Given tokens, which no version sampled, have an entropy only.

    Args:
        tokens: number of trained tokens.
        version: of the policy, see `LossInputs`.
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
    index = {name: at for at, name in enumerate(names)}
    of_group = torch.tensor([*(index[name] for name in inputs.sources), 0], device=mask.device)
    places = of_group[inputs.groups.long().clamp(min=-1)] if names else torch.zeros_like(mask, dtype=torch.int64)
    log_ratio = (logprobs - inputs.behaviour).where(sampled, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, distance = log_ratio.exp(), log_ratio.abs()
    size, kinds = max(1, len(names)), sampled.to(logprobs.dtype)

    def sums(values: torch.Tensor, over: torch.Tensor = sampled) -> torch.Tensor:
        """Sum the values of some of the tokens by source, [sources]."""
        return values.new_zeros(size).index_add_(0, places, values.where(over, 0.0))

    counts = sums(kinds)
    means = dict[str, tuple[torch.Tensor, torch.Tensor]]()
    if entropy is not None:
        means["entropy"] = sums(entropy, mask), sums(torch.ones_like(kinds), mask)
    # Tokens are the engine's samples: with lag or a mismatch, the divergence from the reference is only approximate.
    divergences = {"kl_behaviour": kl_estimates(inputs.behaviour, logprobs)}
    if inputs.reference is not None:
        divergences["kl_reference"] = kl_estimates(logprobs, inputs.reference)
    for name, estimates in divergences.items():
        means |= {f"{name}/{kind}": (sums(values), counts) for kind, values in estimates.items()}
    of_ratio, of_squares = sums(ratio), sums(ratio.square())
    largest = logprobs.new_full((size,), -math.inf).scatter_reduce(
        0, places, distance.where(sampled, -math.inf), "amax"
    )
    tails = logprobs.new_zeros(size * Tail.BINS).index_add_(0, places * Tail.BINS + _bin(distance), kinds)
    tails = tails.view(size, Tail.BINS)
    parts = [("", slice(None))] + ([(f"/{name}", at) for name, at in index.items()] if size > 1 else [])
    for ending, at in parts:
        count = counts[at].sum()
        for name, (totals, over) in means.items():
            measures.add(f"{name}{ending}", Mean, totals[at].sum(), over[at].sum())
        measures.add(f"ratio/ess{ending}", EffectiveShare, of_ratio[at].sum(), of_squares[at].sum(), count)
        measures.add(f"ratio/max{ending}", Max, largest[at].max().exp().where(count > 0, -math.inf))
        measures.add(f"ratio/p99{ending}", Tail, tails[at].reshape(-1, Tail.BINS).sum(dim=0))


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
