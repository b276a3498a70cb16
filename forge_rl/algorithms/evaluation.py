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
import numpy.typing as npt

Rewards = Sequence[Sequence[float]]
_Z = 1.959964
"""97.5th percentile of the normal distribution."""
_ROUNDING = 1e-9
"""Largest error of a sum of weighted rewards in float64."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks."""

    value: float
    """NaN without tasks."""
    stderr: float
    """Standard error; NaN for fewer than two tasks."""
    low: float
    """Lower end of the value's 95% confidence interval, within 0 and 1 if all scores are."""
    high: float


def mean_over_tasks(scores: Sequence[float]) -> Estimate:
    """Average task scores, `[N]`; the standard error is s / sqrt(N), for N independent values."""
    if not scores:
        return Estimate(value=math.nan, stderr=math.nan, low=math.nan, high=math.nan)
    values = np.asarray(scores, np.float64)
    stderr = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    low, high = _interval(values, stderr)
    return Estimate(value=float(values.mean()), stderr=stderr, low=low, high=high)


def avg_at_k(rewards: Rewards) -> Estimate:
    """Average all rewards with equal weight per task: avg@k. Tasks without episodes are left out."""
    return mean_over_tasks([float(np.mean(task_rewards)) for task_rewards in rewards if len(task_rewards)])


def pass_at_k(rewards: Rewards, k: int, *, success: float = 1.0) -> Estimate:
    """Estimate the share of tasks with at least one success in k episodes: pass@k.

    For a task with n episodes, c of which succeed, the unbiased estimate is 1 - C(n-c, k) / C(n, k) (Chen et al. 2021,
    arXiv 2107.03374, equation 1). Tasks with fewer than k episodes are left out.

    Args:
        k: at least 1.
        success: minimum reward of a successful episode, to rounding: weights of a sum that add up to 1 may miss it.
    """
    assert k >= 1, f"pass@{k}"
    scores = []
    for task_rewards in rewards:
        n, c = len(task_rewards), sum(reward >= success - _ROUNDING for reward in task_rewards)
        # Fewer episodes than k have no unbiased estimate.
        if n >= k:
            scores.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return mean_over_tasks(scores)


def maj_at_k(rewards: Rewards, answers: Sequence[Sequence[str]]) -> Estimate:
    """Average the rewards of each task's most frequent answer: maj@k.

    Ties count equally, as if one answer was drawn at random. Episodes without an answer, "", only vote if no episode of
    the task has one. Equal answers with different rewards count with their mean.

    Args:
        answers: extracted answer of each episode, aligned with the rewards.
    """
    scores = []
    for task_rewards, texts in zip(rewards, answers, strict=True):
        votes: dict[str, list[float]] = defaultdict(list)
        for reward, text in zip(task_rewards, texts, strict=True):
            votes[text.strip()].append(reward)
        # Missing answers are no vote, unless there is nothing else.
        candidates = {text: answer_rewards for text, answer_rewards in votes.items() if text} or votes
        if candidates:
            max_votes = max(map(len, candidates.values()))
            winners = [answer_rewards for answer_rewards in candidates.values() if len(answer_rewards) == max_votes]
            scores.append(float(np.mean([np.mean(answer_rewards) for answer_rewards in winners])))
    return mean_over_tasks(scores)


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


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two models by their scores on the same tasks, `[N]` each.

        compare_paired([0.0, 0.5, 1.0], [0.5, 0.5, 1.0]).low

    The interval is computed with one more task on each side, of the largest difference that was seen (1 if all are 0).
    For scores of 0 and 1 it is Bonett and Price's adjusted interval of paired proportions (2012,
    doi:10.3102/1076998611411915). Unlike a bootstrap, it has a width where all differences are equal, and covers rare
    successes of few tasks; docs/running/evaluation.md has its coverage. Within -1 and 1 for scores within 0 and 1.
    """
    assert len(first) == len(second) > 0, f"{len(first)} and {len(second)} tasks are no pairs"
    first_scores, second_scores = np.asarray(first, np.float64), np.asarray(second, np.float64)
    differences = second_scores - first_scores
    largest = float(abs(differences).max()) or 1.0
    # One more task on each side keeps the interval open where all differences are equal.
    widened = np.array([*differences, largest, -largest])
    middle, half = float(widened.mean()), _Z * float(widened.std()) / math.sqrt(len(widened))
    bound = 1.0 if _within_unit(first_scores) and _within_unit(second_scores) else math.inf
    return Comparison(
        difference=float(differences.mean()),
        low=max(-bound, middle - half),
        high=min(bound, middle + half),
        won=int((differences > 0).sum()),
        lost=int((differences < 0).sum()),
        tasks=len(differences),
    )


def _interval(values: npt.NDArray[np.float64], stderr: float) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean of scores of independent tasks, [N].

    For scores within 0 and 1 it is Wilson's (1927) with the number of independent episodes that the tasks are worth,
    p (1 - p) / stderr^2, for which one more task of successes and failures only is assumed, and with Student's t
    (Korn and Graubard 1998, Survey Methodology 24:2). Others have the normal distribution's.
    """
    mean, count = float(values.mean()), len(values)
    if not _within_unit(values):
        return mean - _Z * stderr, mean + _Z * stderr
    binary = mean * (1 - mean)
    # (n - 1) n stderr^2 is the sum of squared deviations; the assumed task adds p (1 - p) to it.
    variance = ((count - 1) * count * stderr**2 + binary) / count**2 if count > 1 else binary
    # Independent episodes with the same variance; where all scores are 0, or all 1, one for each task.
    episodes = binary / variance if binary else count
    freedom = max(1, count - 1)  # Student's t by its expansion in 1 / freedom
    episodes /= (1 + (_Z**2 + 1) / (4 * freedom) + (5 * _Z**4 + 16 * _Z**2 + 3) / (96 * freedom**2)) ** 2
    middle = (mean + _Z**2 / (2 * episodes)) / (1 + _Z**2 / episodes)
    half = _Z / (1 + _Z**2 / episodes) * math.sqrt(binary / episodes + _Z**2 / (4 * episodes**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _within_unit(scores: npt.NDArray[np.float64]) -> bool:
    return bool((scores >= 0).all() and (scores <= 1).all())
