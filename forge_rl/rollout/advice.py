"""Warnings to the user about batches of answers that are cut."""

from __future__ import annotations

from forge_rl.types import Batch, Outcome

_NEARLY_ALL = 0.9
"""Warn at once above this share of truncated episodes."""
_CUT_BATCHES = 5
"""Warn after this many consecutive batches of mostly truncated episodes, unless rewards rise."""


class Advice:
    """Finds batches whose answers are mostly truncated, once per streak."""

    def __init__(self) -> None:
        self._cut_rewards: list[float] = []
        """Mean rewards of the current streak of batches with mostly truncated episodes."""
        self._in_streak = False
        """Whether the warning applies to the last batch; it is not repeated while it keeps applying."""

    def look_at(self, batch: Batch, *, max_tokens: int) -> str:
        """Return a warning about a delivered batch, or "".

        `max_tokens` is the maximum of a completion.
        """
        episodes = batch.episodes
        cut = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
        mean_reward = sum(episode.reward for episode in episodes) / len(episodes)
        self._cut_rewards = [*self._cut_rewards, mean_reward] if 2 * cut > len(episodes) else []
        # Rising rewards mean that the policy is learning to be brief.
        lasting = len(self._cut_rewards) >= _CUT_BATCHES and mean_reward <= self._cut_rewards[0]
        was_in_streak, self._in_streak = self._in_streak, cut > _NEARLY_ALL * len(episodes) or lasting
        if was_in_streak or not self._in_streak:
            return ""
        return (
            f"{cut} of {len(episodes)} episodes were truncated, by --generator.max-tokens {max_tokens} or by the "
            "context: raise it if answers need more"
        )
