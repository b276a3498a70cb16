"""What a reward is: any function of a task and the text of an answer."""

from __future__ import annotations

from typing import Protocol

from forge_rl.types import Task


class Reward(Protocol):
    """Scores an answer. It must pickle, so that it can be called in another process."""

    def __call__(self, task: Task, text: str) -> float:
        """From 0 to 1. A bad answer scores 0.0; a bug, or a task without what is needed, raises."""
