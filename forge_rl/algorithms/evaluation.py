"""Evaluation scores with standard errors: avg@k, pass@k, maj@k, and the comparison of two models.

Episodes of one task are correlated, so a score is a mean over tasks, and its standard error is clustered by task
(Miller 2024, arXiv 2411.00640). Rewards are `[N][k]`: k episodes for each of N tasks, fewer for some.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rewards = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks."""

    value: float
    """NaN without tasks."""
    stderr: float
    """Standard error; NaN for fewer than two tasks."""


def mean_over_tasks(scores: Sequence[float]) -> Estimate:
    """Average task scores, `[N]`; the standard error is s / sqrt(N), for N independent values."""
    if not scores:
        return Estimate(value=math.nan, stderr=math.nan)
    values = np.asarray(scores, np.float64)
    spread = float(values.std(ddof=1)) if len(values) > 1 else math.nan
    return Estimate(value=float(values.mean()), stderr=spread / math.sqrt(len(values)))


def avg_at_k(rewards: Rewards) -> Estimate:
    """Average all rewards with equal weight per task: avg@k. Tasks without episodes are left out."""
    return mean_over_tasks([float(np.mean(each)) for each in rewards if len(each)])


def pass_at_k(rewards: Rewards, k: int, *, success: float = 1.0) -> Estimate:
    """Estimate the share of tasks with at least one success in k episodes: pass@k.

    For a task with n episodes, c of which succeed, the unbiased estimate is 1 - C(n-c, k) / C(n, k) (Chen et al. 2021,
    arXiv 2107.03374, equation 1). Tasks with fewer than k episodes are left out.

    Args:
        k: at least 1.
        success: minimum reward of a successful episode.
    """
    assert k >= 1, f"pass@{k}"
    found = []
    for each in rewards:
        n, c = len(each), sum(reward >= success for reward in each)
        if n >= k:
            found.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return mean_over_tasks(found)


def maj_at_k(rewards: Rewards, answers: Sequence[Sequence[str]]) -> Estimate:
    """Average the rewards of each task's most frequent answer: maj@k.

    Ties count equally, as if one answer was drawn at random. Episodes without an answer, "", only vote if no episode of
    the task has one. Equal answers with different rewards count with their mean.

    Args:
        answers: extracted answer of each episode, aligned with the rewards.
    """
    found = []
    for each, texts in zip(rewards, answers, strict=True):
        votes: dict[str, list[float]] = defaultdict(list)
        for reward, text in zip(each, texts, strict=True):
            votes[text.strip()].append(reward)
        named = {text: given for text, given in votes.items() if text} or votes
        if named:
            most = max(map(len, named.values()))
            found.append(float(np.mean([np.mean(given) for given in named.values() if len(given) == most])))
    return mean_over_tasks(found)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a second model with a first one, on the same tasks."""

    difference: float
    """Mean over tasks of the second model's score minus the first's."""
    low: float
    """Lower end of the difference's 95% confidence interval."""
    high: float
    won: int
    """Number of tasks on which the second model scores higher."""
    lost: int
    tasks: int
    """N."""


def compare_paired(
    first: Sequence[float], second: Sequence[float], *, seed: int, resamples: int = 10_000
) -> Comparison:
    """Compare two models by their scores on the same tasks, `[N]` each, with a paired bootstrap over tasks.

    The interval spans the 2.5th to 97.5th percentile of the mean difference over `resamples` draws of N tasks with
    replacement (Efron and Tibshirani 1993, section 13.3); equal seeds return equal intervals.
    """
    assert len(first) == len(second) > 0, f"{len(first)} and {len(second)} tasks are no pairs"
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    drawn, count = np.random.default_rng(seed), len(differences)
    means = [differences[drawn.integers(count, size=count)].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return Comparison(
        difference=float(differences.mean()),
        low=float(low),
        high=float(high),
        won=int((differences > 0).sum()),
        lost=int((differences < 0).sum()),
        tasks=len(differences),
    )
