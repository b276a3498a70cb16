"""Scores of episodes: tried again where they fail, as a score costs less than another answer; checked and applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forge_rl.errors import ForgeError, HangError, JudgeError, PoisonError
from forge_rl.types import Episode, Score

_TRIES = 3


class Scorer(Protocol):
    """Scores episodes, as the Reward service does."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        """Return a score for each of some episodes of one task."""


async def score_again(scorer: Scorer, episodes: Sequence[Episode]) -> list[Episode]:
    """Score episodes of one task, and try again where that fails, but for what hangs or kills its process.

    Returns:
        The episodes with their scores; `problem` says what failed before, if anything did.

    Raises:
        ForgeError: the last failure; see `Reward.score`.
    """
    problem = ""
    for tries in range(_TRIES):
        try:
            scores = await scorer.score(episodes)
            scored = [with_score(episode, score) for episode, score in zip(episodes, scores, strict=True)]
        except Exception as error:
            # A judge was asked again already; what hangs or kills a process would do so again.
            if tries == _TRIES - 1 or isinstance(error, JudgeError | HangError | PoisonError):
                raise
            problem = f"scored again after: {error}"
        else:
            break
    return [each.updated(problem=problem) for each in scored] if problem else scored


def with_score(episode: Episode, score: Score) -> Episode:
    """Return an episode with its score.

    Raises:
        ForgeError: the score is not finite, or its values are not one for each turn, or for each token.
    """
    task, total = episode.task, float(score.total)
    parts = {name: float(value) for name, value in score.parts.items()}
    if not all(map(math.isfinite, (total, *parts.values(), *score.turns))):
        beside = f", of parts {parts} and turns {list(score.turns)}" if parts or score.turns else ""
        raise ForgeError(
            f"the reward of {task.id} is {total}{beside}",
            hint="return a finite number from the reward function",
        )
    for name, given in (("turns", score.turns), ("tokens", score.tokens)):
        if len(given) not in (0, len(episode.turns)):
            raise ForgeError(
                f"the reward of {task.id} has {len(given)} entries in `{name}`, for {len(episode.turns)} turns",
                hint=f"give Score.{name} an entry for each turn of the episode, or leave it out",
            )
    for place, (turn, values) in enumerate(zip(episode.turns, score.tokens, strict=False)):
        if len(values) != len(turn.token_ids):
            raise ForgeError(
                f"the reward of {task.id} has {len(values)} values for turn {place}, of {len(turn.token_ids)} tokens",
                hint="give Score.tokens one value for each of episode.turns[i].token_ids, NaN for none",
            )
    return episode.updated(
        reward=total,
        parts=parts,
        turn_values=tuple(map(float, score.turns)),
        token_values=tuple(np.asarray(values, np.float32) for values in score.tokens),
        answer=score.answer,
    )
