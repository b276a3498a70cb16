"""Metrics of a batch: rewards, lengths, outcomes, lag."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from forge_rl.metrics.sinks import Metric
from forge_rl.metrics.values import lag_histogram
from forge_rl.types import Batch, Episode

_LOOP_TOKENS = 64
"""Number of last tokens that count as a loop if they repeat a piece of at most a quarter of their length."""


def batch_metrics(batch: Batch) -> dict[str, Metric]:
    """Compute the metrics of a batch: `reward/mean`, `tokens/completion_max`, `lag/hist`, ...

    docs/running/metrics.md describes them. Rewards are left out if no episode has a score; `lag/...` and `episodes/...`
    if no token was sampled, as in given examples; `tools/...` without calls.
    """
    episodes, lags = batch.episodes, lag_histogram(batch)
    lengths = sorted(episode.response_tokens for episode in episodes)
    metrics: dict[str, Metric] = {
        "tokens/completion_mean": sum(lengths) / len(lengths),
        "tokens/completion_p50": float(_percentile(lengths, 50)),
        "tokens/completion_p95": float(_percentile(lengths, 95)),
        "tokens/completion_max": float(lengths[-1]),
    }
    if any(episode.score is not None for episode in episodes):
        rewards = [episode.reward for episode in episodes]
        metrics |= {"reward/mean": sum(rewards) / len(rewards), "reward/max": max(rewards), "reward/min": min(rewards)}
        metrics["reward/std"] = _spread(batch)
        metrics |= reward_parts(episodes) | rewards_by_source("reward", episodes)
    if lags.counts:
        metrics["episodes/truncated"] = sum(episode.outcome == "truncated" for episode in episodes) / len(episodes)
        metrics["episodes/repeated"] = sum(map(_repeats, episodes)) / len(episodes)
        metrics["episodes/turns"] = sum(len(episode.turns) for episode in episodes) / len(episodes)
        metrics["episodes/segments"] = sum(len(episode.runs) for episode in episodes) / len(episodes)
        metrics["lag/mean"] = sum(lag * tokens for lag, tokens in lags.counts.items()) / lags.total
        metrics |= {"lag/max": float(max(lags.counts)), "lag/hist": lags}
    calls = [call for episode in episodes for turn in episode.turns for call in turn.calls]
    if calls:
        metrics["tools/calls"] = len(calls) / len(episodes)
        metrics["tools/errors"] = sum(bool(call.error) for call in calls) / len(calls)
    cached = [
        call.cached for episode in episodes for turn in episode.turns for call in turn.calls if call.cached is not None
    ]
    if cached:
        metrics["tools/cache_hits"] = sum(cached) / len(cached)
    return metrics


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest value that at least this share of the values does not exceed."""
    # The nearest rank, without interpolation: a length that an episode really has.
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def _spread(batch: Batch) -> float:
    """Return the mean over groups of their rewards' standard deviation, without episodes that have no score."""
    groups = [[episode.reward for episode in group.episodes if episode.score is not None] for group in batch.groups]
    return statistics.fmean(statistics.pstdev(rewards) for rewards in groups if rewards)


def _repeats(episode: Episode) -> bool:
    """Return whether an episode ends in a loop, that is, in a short piece that is repeated over and over."""
    if not episode.turns:
        return False
    end = episode.turns[-1].token_ids[-_LOOP_TOKENS:].tolist()
    if len(end) < _LOOP_TOKENS:
        return False
    # Comparing one token first rules out most periods cheaply.
    return any(
        end[-1 - period] == end[-1] and end[period:] == end[:-period] for period in range(1, _LOOP_TOKENS // 4 + 1)
    )


def reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean of each part of the rewards, as `reward_parts/NAME`, over the episodes that have it."""
    values_by_part: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.score.parts.items() if episode.score else ():
            values_by_part.setdefault(name, []).append(value)
    return {f"reward_parts/{name}": sum(values) / len(values) for name, values in values_by_part.items()}


def rewards_by_source(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward of each source, as `NAME/SOURCE`; empty if all episodes come from one source."""
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        rewards.setdefault(episode.task.source, []).append(episode.reward)
    if len(rewards) == 1:
        return {}
    return {f"{name}/{source}": sum(values) / len(values) for source, values in rewards.items()}
