"""Warnings to the user about batches of truncated answers."""

from __future__ import annotations

from collections import deque

from forge_rl.types import Batch, Outcome

_NEARLY_ALL = 0.9
"""Warn at once above this share of truncated episodes."""
_CUT_BATCHES = 5
"""Warn after this many consecutive batches of mostly truncated episodes, unless rewards rise."""
_GROWTH = 2.5
"""A larger factor between the mean lengths of episodes two batches apart is a sign of divergence."""
_CUT_MORE = 0.2
"""A larger growth of the share of truncated episodes, while rewards fall, is a sign of divergence."""
_SHORT_TOKENS = 32
"""Mean tokens up to which changes of length are ignored, as short episodes vary more."""


class Advice:
    """Warns of batches whose answers are mostly truncated or change length suddenly, once per streak."""

    def __init__(self) -> None:
        self._cut_rewards: list[float] = []
        """Mean rewards of the current streak of batches with mostly truncated episodes."""
        self._earlier: deque[tuple[float, float, float]] = deque(maxlen=2)
        """Mean tokens of an episode, share of truncated ones, and mean reward, of the last two batches."""
        self._told = ""
        """Kind of the warning that applies to the last batch; not repeated while it keeps applying."""

    def look_at(self, batch: Batch, *, max_tokens: int) -> str:
        """Return a warning about a delivered batch, or "".

        `max_tokens` is the maximum of a completion.
        """
        episodes = batch.episodes
        num_truncated = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
        mean_reward = sum(episode.reward for episode in episodes) / len(episodes)
        self._cut_rewards = [*self._cut_rewards, mean_reward] if 2 * num_truncated > len(episodes) else []
        # Rising rewards mean that the policy is learning to be brief.
        lasting = len(self._cut_rewards) >= _CUT_BATCHES and mean_reward <= self._cut_rewards[0]
        kind = text = ""
        if num_truncated > _NEARLY_ALL * len(episodes) or lasting:
            kind = "cut"
            text = (
                f"{num_truncated} of {len(episodes)} episodes were truncated, by --generator.max-tokens {max_tokens} "
                "or by the context: raise it if answers need more"
            )
        tokens = sum(episode.response_tokens for episode in episodes) / len(episodes)
        old_tokens, old_share, old_reward = self._earlier[0] if self._earlier else (tokens, 1.0, 0.0)
        self._earlier.append((tokens, num_truncated / len(episodes), mean_reward))
        # Sudden changes of length count only where nearly all is cut or no group differs in reward: longer answers that
        # earn more are learning.
        is_longer = tokens > _GROWTH * old_tokens and tokens > _SHORT_TOKENS
        is_shorter = old_tokens > _GROWTH * tokens and old_tokens > _SHORT_TOKENS
        is_cut = num_truncated > max(_NEARLY_ALL, old_share + _CUT_MORE) * len(episodes) and mean_reward < old_reward
        is_uniform = all(max(group.rewards) == min(group.rewards) for group in batch.groups)
        if (kind or is_uniform) and (is_longer or is_shorter or is_cut or self._told == "diverged"):
            kind = "diverged"
            text = (
                f"answers went from {old_tokens:.0f} to {tokens:.0f} tokens on average within two batches, "
                f"{num_truncated} of {len(episodes)} are truncated: the policy may have diverged; lower "
                "--trainer.optimizer.lr before you change --generator.max-tokens or the tasks"
            )
        is_new, self._told = kind != self._told, kind
        return text if is_new else ""
