"""Scores the episodes of a group together, for rewards that compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forge_rl.rewards.scorer import not_scored, score_again
from forge_rl.rollout.state import EVALUATION, InflightEpisode

if TYPE_CHECKING:
    from forge_rl.rewards.scorer import Scorer
    from forge_rl.types import Episode


class GroupScores:
    """Scores the episodes of a group together once all of them have ended.

    Args:
        reward: scores episodes that have no score yet; None if each comes with one.
        on_score: called with each episode of a batch that had ended earlier, once it is scored.
    """

    def __init__(self, reward: Scorer | None, on_score: Callable[[Episode], None]) -> None:
        self._reward = reward
        self._on_score = on_score

    def scored_with(self, episode: InflightEpisode, result: Episode) -> tuple[Episode, ...]:
        """Return the episodes that the reward scores together, the last of which is `result`."""
        if self._reward is None or self._reward.form != "group":
            return (result,)
        mates = (mate.result for mate in episode.group.episodes if mate is not episode)
        return (*(mate for mate in mates if mate is not None), result)

    async def score(self, episode: InflightEpisode, result: Episode) -> Episode:
        """Score a group's episodes together, if needed, once the last one has ended with `result`.

        Returns:
            The result of that episode, with its score.
        """
        mates = [mate for mate in episode.group.episodes if mate is not episode]
        # No await separates this check from the caller's record of the result unless a reward is called, so of two
        # episodes that end together, the second finds the first one's result.
        if any(mate.result is None for mate in mates):
            return result
        unscored_mates = [mate for mate in mates if mate.result is not None and mate.result.unscored]
        unscored = [mate.result for mate in unscored_mates if mate.result is not None]
        if result.unscored:
            unscored.append(result)
        if not unscored:
            return result
        assert self._reward is not None, "episodes that come without a score need a reward"
        try:
            scored = await score_again(self._reward, unscored)
        except Exception as error:
            return not_scored(result, error) if result.outcome.scored else result
        # `scored` is one longer if `result` was unscored, too: that one is last.
        for mate, mates_result in zip(unscored_mates, scored, strict=False):
            mate.result = mates_result
            if episode.group.batch != EVALUATION:
                self._on_score(mates_result)
        return scored[-1] if result.unscored else result
