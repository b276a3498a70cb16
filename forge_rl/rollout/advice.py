"""Warnings to the user about batches with little learning signal."""

from __future__ import annotations

from forge_rl.types import Batch, Outcome

_NEARLY_ALL = 0.9
"""Warn at once above this share of truncated episodes."""
_CUT_BATCHES = 5
"""Warn after this many consecutive batches of mostly truncated episodes, unless rewards rise."""


class Advice:
    """Finds batches with little learning signal, once per streak."""

    def __init__(self) -> None:
        self._cut_rewards: list[float] = []
        """Mean rewards of the current streak of batches with mostly truncated episodes."""
        self._in_streak: set[str] = set()
        """Kinds of warnings that apply to the last batch; not repeated while they keep applying."""

    def look_at(self, batch: Batch, *, max_tokens: int) -> list[str]:
        """Return warnings about a delivered batch with little learning signal.

        `max_tokens` is the maximum of a completion.
        """
        episodes = batch.episodes
        cut = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
        found = {}
        mean_reward = sum(episode.reward for episode in episodes) / len(episodes)
        self._cut_rewards = [*self._cut_rewards, mean_reward] if 2 * cut > len(episodes) else []
        # Rising rewards mean that the policy is learning to be brief.
        lasting = len(self._cut_rewards) >= _CUT_BATCHES and mean_reward <= self._cut_rewards[0]
        if cut > _NEARLY_ALL * len(episodes) or lasting:
            found["cut"] = (
                f"{cut} of {len(episodes)} episodes were truncated, by --generator.max-tokens {max_tokens} or "
                "by the context: raise it if answers need more"
            )
        if all(max(group.rewards) == min(group.rewards) for group in batch.groups):
            found["uniform"] = (
                f"all rewards within each group are equal, {batch.groups[0].rewards[0]:g} in the first, so "
                "group-relative advantages are 0: tasks may be too easy or too hard for this model, or its answers not "
                "recognised; see episodes.jsonl"
            )
        new = [text for kind, text in found.items() if kind not in self._in_streak]
        self._in_streak = set(found)
        return new
