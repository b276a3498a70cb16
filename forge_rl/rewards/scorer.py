"""Scores that are tried again where they fail: a score costs less than another answer."""

from __future__ import annotations

from typing import Protocol

from forge_rl.types import Task

_TRIES = 3


class Scorer(Protocol):
    """Scores answers, as the Reward service does."""

    async def score(self, task: Task, text: str) -> float: ...


async def score_again(scorer: Scorer, task: Task, text: str) -> tuple[float, str]:
    """Score an answer, and try again where that fails.

    Returns:
        The score, and what failed before, if anything did.

    Raises:
        ForgeError: the last failure; see `Reward.score`.
    """
    problem = ""
    for _ in range(_TRIES - 1):
        try:
            return await scorer.score(task, text), problem
        except Exception as error:
            problem = f"scored again after: {error}"
    return await scorer.score(task, text), problem
