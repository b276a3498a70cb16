"""Scores of the episodes of a group that a reward compares with one another."""

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
        """Return the episodes that the reward scores together with the one that ended with `result`, which is last."""
        if self._reward is None or self._reward.form != "group":
            return (result,)
        mates = (mate.result for mate in episode.group.episodes if mate is not episode)
        return (*(mate for mate in mates if mate is not None), result)

    async def score(self, episode: InflightEpisode, result: Episode) -> Episode:
        """Score a group's episodes together, if needed, once its last one ended with `result`; return that one's."""
        mates = [mate for mate in episode.group.episodes if mate is not episode]
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
        for mate, mates_result in zip(unscored_mates, scored, strict=False):
            mate.result = mates_result
            if episode.group.batch != EVALUATION:
                self._on_score(mates_result)
        return scored[-1] if result.unscored else result
