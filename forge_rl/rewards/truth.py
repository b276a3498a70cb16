"""True answers of a task, for rewards that compare with them."""

from __future__ import annotations

from forge_rl.errors import TaskError
from forge_rl.types import Task


def true_answers(task: Task, key: str, reward: str) -> list[str]:
    """Return the texts that are right: `task.truth[key]`, or each of its items if it is a list.

    Of a solution that ends as GSM8K's do, with `#### 72`, only what follows the mark is the answer.

    Args:
        reward: name of the reward that asks, for errors.

    Raises:
        TaskError: the task has no such entry, or it is no text, number, truth value or list of those.
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
            hint=f"name the column of the answers in --tasks FILE:answer=COLUMN, the entry of the truth in --reward "
            f"{reward}:key=NAME, or write a --reward FILE.py:FUNCTION of your own",
        )
    return [str(each).rpartition("#### ")[2].strip() for each in several]
