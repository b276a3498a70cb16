"""Advice to the user about batches that teach little."""

from __future__ import annotations

from collections.abc import Callable

from forge_rl.types import Batch, Outcome

_NEARLY_ALL = 0.9
"""Share of truncated answers above which to warn at once."""
_CUT_BATCHES = 5
"""Number of consecutive batches of mostly truncated answers after which to warn, unless rewards rise."""


class Advice:
    """Warns about batches that teach little, once until there is a better one.

    Args:
        warn: takes a line for the user.
        longest: returns the most new tokens of an answer.
    """

    def __init__(self, warn: Callable[[str], None], longest: Callable[[], int]) -> None:
        self._warn = warn
        self._longest = longest
        self._cut_rewards: list[float] = []
        """Mean rewards of the last batches, as far back as most of their answers were cut."""
        self._in_streak: set[str] = set()
        """Warnings about the last batch that the user was given, then or of earlier ones if they have held since."""

    def look_at(self, batch: Batch, number: int) -> None:
        """Check a delivered batch, and warn if it teaches little."""
        episodes = batch.episodes
        cut = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
        found = {}
        mean_reward = sum(episode.reward for episode in episodes) / len(episodes)
        self._cut_rewards = [*self._cut_rewards, mean_reward] if 2 * cut > len(episodes) else []
        # A policy whose rewards rise is learning to be brief.
        lasting = len(self._cut_rewards) >= _CUT_BATCHES and mean_reward <= self._cut_rewards[0]
        if cut > _NEARLY_ALL * len(episodes) or lasting:
            found["cut"] = (
                f"{cut} of {len(episodes)} episodes were cut, by --generator.max-new-tokens {self._longest()} or by "
                "the context: raise it if answers need more"
            )
        if all(max(group.rewards) == min(group.rewards) for group in batch.groups):
            found["uniform"] = (
                f"within each group all rewards are equal, {batch.groups[0].rewards[0]:g} in the first, so "
                "group-relative advantages are 0: tasks may be too easy or too hard for this model, or its answers not "
                "recognised; look at episodes.jsonl"
            )
        for kind in found.keys() - self._in_streak:
            self._warn(f"batch {number}: {found[kind]}")
        self._in_streak = set(found)
