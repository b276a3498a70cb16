"""Scores episodes, with retries, as a score costs less than another rollout; validates and applies the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forge_rl.errors import (
    ForgeError,
    HangError,
    InfrastructureError,
    JudgeError,
    PoisonError,
    ReplicaError,
    SpendingError,
)
from forge_rl.rewards.protocol import Form
from forge_rl.system.encodable import encodable
from forge_rl.types import Episode, Outcome, Score

_TRIES = 3


class Scorer(Protocol):
    """Interface of the Reward service for scoring episodes."""

    @property
    def form(self) -> Form: ...

    async def score(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        """Return one score per episode; all episodes are of one task."""


async def scored(episode: Episode, scorer: Scorer, own_score: Score | None) -> Episode:
    """Score an episode: with its own score, from its environment or agent, else by the scorer, unless that needs its
    group. A failure becomes the episode's outcome: an environment error if its own score is not finite or does not fit.

    Raises:
        SpendingError: a judge's spending limit is reached.
    """
    if own_score is not None:
        try:
            return with_score(episode, own_score)
        except ForgeError as error:
            return episode.updated(outcome=Outcome.ENVIRONMENT_ERROR, problem=str(error))
    try:
        # A reward of a group is called once all of its episodes are there.
        if scorer.form == "group":
            return episode
        return (await score_again(scorer, [episode]))[0]
    except Exception as error:
        return not_scored(episode, error)


def not_scored(episode: Episode, error: Exception) -> Episode:
    """Return an episode whose outcome is an error of its reward or of the infrastructure. Raises a SpendingError."""
    if isinstance(error, SpendingError):
        raise error
    # A lost replica says nothing about the answer, so it must not count as the judge's failure.
    infrastructure = isinstance(error, ReplicaError | InfrastructureError)
    outcome = Outcome.INFRASTRUCTURE_ERROR if infrastructure else Outcome.JUDGE_ERROR
    return episode.updated(outcome=outcome, problem=str(error))


async def score_again(scorer: Scorer, episodes: Sequence[Episode]) -> list[Episode]:
    """Score episodes of one task, with retries unless the reward hangs or kills its process.

    Returns:
        The episodes with their scores; `problem` describes the last failure before a successful retry.

    Raises:
        ForgeError: the last failure; see `Reward.score`.
    """
    problem = ""
    for tries in range(_TRIES):
        try:
            scores = await scorer.score(episodes)
            scored_episodes = [with_score(episode, score) for episode, score in zip(episodes, scores, strict=True)]
        except Exception as error:
            # A judge retries itself; a reward that hangs or kills its process would do so again.
            if tries == _TRIES - 1 or isinstance(error, JudgeError | HangError | PoisonError):
                raise
            problem = f"scored again after: {error}"
        else:
            break
    return [episode.updated(problem=problem) for episode in scored_episodes] if problem else scored_episodes


def with_score(episode: Episode, score: Score) -> Episode:
    """Return an episode with its score.

    Raises:
        ForgeError: the score is not finite, or does not have one value per turn or per token.
    """
    task, total = episode.task, float(score.total)
    parts = {name: float(value) for name, value in score.parts.items()}
    if not all(map(math.isfinite, (total, *parts.values(), *score.turns))):
        details = f", of parts {parts} and turns {list(score.turns)}" if parts or score.turns else ""
        raise ForgeError(
            f"the reward of {task.id} is {total}{details}",
            hint="return a finite number from the reward function",
        )
    for name, entries in (("turns", score.turns), ("tokens", score.tokens)):
        if len(entries) not in (0, len(episode.turns)):
            raise ForgeError(
                f"the reward of {task.id} has {len(entries)} entries in `{name}`, for {len(episode.turns)} turns",
                hint=f"set Score.{name} to one entry per turn of the episode, or leave it empty",
            )
    for place, (turn, values) in enumerate(zip(episode.turns, score.tokens, strict=False)):
        if len(values) != len(turn.token_ids):
            raise ForgeError(
                f"the reward of {task.id} has {len(values)} values for turn {place}, of {len(turn.token_ids)} tokens",
                hint="set Score.tokens[i] to one value for each of episode.turns[i].token_ids, NaN for none",
            )
    turns = tuple(map(float, score.turns))
    tokens = tuple(np.asarray(values, np.float32) for values in score.tokens)
    # Names of metrics, and texts that teachers may be shown.
    texts = {"parts": encodable(parts), "answer": encodable(score.answer), "feedback": encodable(score.feedback)}
    return episode.updated(score=score.updated(total=total, turns=turns, tokens=tokens, **texts))
