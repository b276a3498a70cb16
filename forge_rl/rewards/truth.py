"""Reads a task's true answers, for rewards that compare with them."""

from __future__ import annotations

from forge_rl.errors import TaskError
from forge_rl.types import Task


def true_answers(task: Task, key: str, reward: str) -> list[str]:
    """Return the true answers: `task.truth[key]`, or each of its items if it is a list.

    If a solution ends with `#### 72`, as in GSM8K, only the text after the mark is the answer.

    Args:
        reward: name of the reward, for errors.

    Raises:
        TaskError: the task has no such entry, or it is not a string, number, bool or list of these.
    """
    found = task.truth.get(key)
    several = found if isinstance(found, list | tuple) else [found]
    if not several or not all(isinstance(each, str | int | float) for each in several):
        seen = (
            f"{found!r:.80}" if key in task.truth else f"missing; it has {', '.join(sorted(task.truth)) or 'nothing'}"
        )
        raise TaskError(
            f"--reward {reward}: the truth of task {task.id!r} of {task.source!r} has no answer to compare with: "
            f"{key!r} is {seen}",
            hint=f"set the column of the answers with --tasks FILE:answer=COLUMN, the entry of the truth with --reward "
            f"{reward}:key=NAME, or write your own reward for --reward FILE.py:FUNCTION",
        )
    return [str(each).rpartition("#### ")[2].strip() for each in several]
