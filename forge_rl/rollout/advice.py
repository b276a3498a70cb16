"""Warnings to the user about batches with little learning signal."""

from __future__ import annotations

from collections.abc import Callable

from forge_rl.types import Batch, Outcome

_NEARLY_ALL = 0.9
"""Warn at once above this share of truncated episodes."""
_CUT_BATCHES = 5
"""Warn after this many consecutive batches of mostly truncated episodes, unless rewards rise."""


class Advice:
    """Warns about batches with little learning signal, once per streak.

    Args:
        warn: called with a line for the user.
        longest: returns the maximum number of new tokens per completion.
    """

    def __init__(self, warn: Callable[[str], None], longest: Callable[[], int]) -> None:
        self._warn = warn
        self._longest = longest
        self._cut_rewards: list[float] = []
        """Mean rewards of the current streak of batches with mostly truncated episodes."""
        self._in_streak: set[str] = set()
        """Kinds of warnings that apply to the last batch; not repeated while they keep applying."""

    def look_at(self, batch: Batch, number: int) -> None:
        """Check a delivered batch, and warn if it has little learning signal."""
        episodes = batch.episodes
        cut = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
        found = {}
        mean_reward = sum(episode.reward for episode in episodes) / len(episodes)
        self._cut_rewards = [*self._cut_rewards, mean_reward] if 2 * cut > len(episodes) else []
        # Rising rewards mean that the policy is learning to be brief.
        lasting = len(self._cut_rewards) >= _CUT_BATCHES and mean_reward <= self._cut_rewards[0]
        if cut > _NEARLY_ALL * len(episodes) or lasting:
            found["cut"] = (
                f"{cut} of {len(episodes)} episodes were truncated, by --generator.max-tokens {self._longest()} or "
                "by the context: raise it if answers need more"
            )
        if all(max(group.rewards) == min(group.rewards) for group in batch.groups):
            found["uniform"] = (
                f"all rewards within each group are equal, {batch.groups[0].rewards[0]:g} in the first, so "
                "group-relative advantages are 0: tasks may be too easy or too hard for this model, or its answers not "
                "recognised; see episodes.jsonl"
            )
        for kind in found.keys() - self._in_streak:
            self._warn(f"batch {number}: {found[kind]}")
        self._in_streak = set(found)
