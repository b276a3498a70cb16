"""Protocol of rewards: any function of a task and the text of a completion."""

from __future__ import annotations

from typing import Protocol

from forge_rl.types import Task


class Reward(Protocol):
    """Scores a completion. It must pickle, so that it can be called in another process.

    def exact(task: Task, text: str) -> float:
        return float(text.strip() == task.truth["answer"])
    """

    def __call__(self, task: Task, text: str) -> float:
        """Return a score from 0 to 1. Bad output scores 0.0; a bug, or a task without its truth, raises."""
