"""Metrics of a batch: rewards, lengths, outcomes, lag."""

from __future__ import annotations

from collections.abc import Sequence

from forge_rl.metrics.sinks import Metric
from forge_rl.metrics.values import lag_histogram
from forge_rl.types import Batch, Episode

_LOOP_TOKENS = 64
"""Tokens at the end of an episode that repeat a piece of at most a quarter of them."""


def batch_metrics(batch: Batch) -> dict[str, Metric]:
    """Computes the metrics of a batch: `reward/mean`, `tokens/completion_max`, `lag/hist`, ...

    Rewards are left out if no episode has a score; lags, and `episodes/repeated`, the share of episodes that end in a
    loop, if no token was sampled, as of given examples; `tools/errors`, the share of tool calls with an error, if there
    were none; and `tools/cache_hits`, the share of calls of pure tools that were answered by kept results, likewise.
    """
    episodes, lags = batch.episodes, lag_histogram(batch)
    lengths = [episode.response_tokens for episode in episodes]
    found: dict[str, Metric] = {
        "tokens/completion_mean": sum(lengths) / len(lengths),
        "tokens/completion_max": float(max(lengths)),
    }
    if any(episode.score is not None for episode in episodes):
        rewards = [episode.reward for episode in episodes]
        found |= {"reward/mean": sum(rewards) / len(rewards), "reward/max": max(rewards), "reward/min": min(rewards)}
        found |= reward_parts(episodes) | rewards_by_source("reward", episodes)
    if lags.counts:
        found["episodes/truncated"] = sum(episode.outcome == "truncated" for episode in episodes) / len(episodes)
        found["episodes/repeated"] = sum(map(_repeats, episodes)) / len(episodes)
        found["lag/mean"] = sum(lag * tokens for lag, tokens in lags.counts.items()) / lags.total
        found |= {"lag/max": float(max(lags.counts)), "lag/hist": lags}
    calls = [call for each in episodes for turn in each.turns for call in turn.calls]
    if calls:
        found["tools/errors"] = sum(bool(call.error) for call in calls) / len(calls)
    cached = [call.cached for each in episodes for turn in each.turns for call in turn.calls if call.cached is not None]
    if cached:
        found["tools/cache_hits"] = sum(cached) / len(cached)
    return found


def _repeats(episode: Episode) -> bool:
    """Return whether the last tokens of an episode are a short piece over and over."""
    if not episode.turns:
        return False
    end = episode.turns[-1].token_ids[-_LOOP_TOKENS:]
    if len(end) < _LOOP_TOKENS:
        return False
    return any(bool((end[period:] == end[:-period]).all()) for period in range(1, _LOOP_TOKENS // 4 + 1))


def reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean of each part of the rewards, as `reward_parts/NAME`, over the episodes that have it."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.score.parts.items() if episode.score else ():
            found.setdefault(name, []).append(value)
    return {f"reward_parts/{name}": sum(values) / len(values) for name, values in found.items()}


def rewards_by_source(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward of each source, as `NAME/SOURCE`; empty if all episodes come from one source."""
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        rewards.setdefault(episode.task.source, []).append(episode.reward)
    if len(rewards) == 1:
        return {}
    return {f"{name}/{source}": sum(found) / len(found) for source, found in rewards.items()}
