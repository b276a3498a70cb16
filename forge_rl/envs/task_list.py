"""Task source for environments with a fixed list of tasks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from forge_rl.errors import TaskError
from forge_rl.types import Message, Task


class TaskList:
    """Draws tasks epoch after epoch, each shuffled by the seed; implements `data.sources.Source`.

        source = TaskList("verifiers:gsm8k", train, held_out, seed=0)
        train, held_out = split(tasks, 0.1, key=lambda task: task.prompt)

    Args:
        name: name of the source in logs and in the mixture.
        train: tasks to draw; if there are fewer than a batch needs, they repeat within it.
        held_out: evaluation tasks.
    """

    def __init__(self, name: str, train: Sequence[Task], held_out: Sequence[Task], *, seed: int) -> None:
        if not train:
            raise TaskError(f"{name} has no tasks to train on", hint="hold out a smaller share")
        self.name = name
        self._train = train
        self._held_out = tuple(held_out)
        self._seed = seed
        self._drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])
        """Current epoch and its order of task indices."""

    @property
    def epoch(self) -> float:
        """Number of passes over the tasks so far."""
        return self._drawn / len(self._train)

    def draw(self) -> Task:
        """Return the next task to train on."""
        epoch, index = divmod(self._drawn, len(self._train))
        if self._order[0] != epoch:
            self._order = epoch, self._order_of(epoch)
        self._drawn += 1
        return self._train[self._order[1][index]]

    def coming(self, tasks: int) -> list[Task]:
        """Return the next tasks, each once, without drawing them."""
        epoch, index = divmod(self._drawn, len(self._train))
        order = self._order[1] if self._order[0] == epoch else self._order_of(epoch)
        indices = order[index : index + tasks]
        if missing := tasks - len(indices):
            # A short list comes around again within one look ahead.
            indices = list(dict.fromkeys([*indices, *self._order_of(epoch + 1)[:missing]]))
        return [self._train[index] for index in indices]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        # The order follows from the seed and the epoch, so that a resumed run needs only the number of tasks drawn.
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return the first held-out tasks, or all if there are fewer."""
        return self._held_out[:tasks]

    def reseed(self, seed: int) -> None:
        """Begin again, in the order of another seed."""
        self._seed, self._drawn, self._order = seed, 0, (-1, [])

    def state(self) -> dict[str, object]:
        """Return the position in the stream, as JSON."""
        return {"drawn": self._drawn, "tasks": len(self._train), "seed": self._seed}

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved position.

        Raises:
            TaskError: the position belongs to another list.
        """
        # In another list, or under another seed, the position would point to other tasks.
        num_drawn = state.get("drawn")
        if not isinstance(num_drawn, int) or num_drawn < 0 or dict(state) != {**self.state(), "drawn": num_drawn}:
            raise TaskError(
                f"the saved state of {self.name} is {dict(state)}, but it has {len(self._train)} tasks and the seed "
                f"{self._seed}",
                hint="resume with the original environment and seed, or start a new run",
            )
        self._drawn = num_drawn


def split(tasks: Sequence[Task], share: float, key: Callable[[Task], str]) -> tuple[list[Task], list[Task]]:
    """Split tasks into training and held-out tasks; holds out at least one if there are two or more.

    Args:
        share: share of tasks to hold out; which ones depends only on their keys. 0 holds out none.
        key: returns a task's content. Tasks with equal content stay together; only the first of them is held out.
    """
    by_key: dict[str, list[Task]] = {}
    for task in tasks:
        by_key.setdefault(hashlib.sha256(key(task).encode()).hexdigest(), []).append(task)
    digests = sorted(by_key)
    # Each digest decides on its own: tasks that are added later move no other to the other side.
    held_out_digests = [digest for digest in digests if int(digest[:8], 16) < share * 2**32]
    # At least one is held out, and at least one is left to train on.
    held_out_digests = (held_out_digests or digests[:1])[: len(digests) - 1] if share else []
    held_out = [by_key[digest][0] for digest in held_out_digests]
    held_out_set = set(held_out_digests)
    return [
        task for digest, same_tasks in by_key.items() if digest not in held_out_set for task in same_tasks
    ], held_out


def check_own_task(task: Task, key: str, flag: str) -> None:
    """Check that a task is one of an environment's own, whose truth has a key.

    Raises:
        TaskError: it is not; names the flag of the environment.
    """
    if key not in task.truth:
        raise TaskError(
            f"the task {task.id!r} of {task.source!r} is none of {flag}",
            hint=f"omit --tasks and --eval-tasks: {flag} has its own tasks",
        )


def seeded(name: str, *, tasks: int, held_out: int, prompt: str, seed: int) -> TaskList:
    """Make a source of tasks that consist of an environment seed in `truth`; the held-out tasks have the first seeds.

    Args:
        prompt: system message of each task, if not empty.
    """
    messages: tuple[Message, ...] = ({"role": "system", "content": prompt},) if prompt else ()
    seed_tasks = [
        Task(id=f"seed/{index}", source=name, messages=messages, truth={"seed": index})
        for index in range(held_out + tasks)
    ]
    return TaskList(name, seed_tasks[held_out:], seed_tasks[:held_out], seed=seed)
