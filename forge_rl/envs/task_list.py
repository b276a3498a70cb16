"""A source of tasks that an environment brings itself."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from forge_rl.errors import TaskError
from forge_rl.types import Message, Task


class TaskList:
    """Draws tasks in an order by the seed, epoch after epoch; a source as `data.sources.Source` says.

        source = TaskList("verifiers:gsm8k", train, held_out, seed=0)
        train, held_out = split(tasks, 0.1, key=lambda task: task.prompt)

    Args:
        train: tasks to draw; fewer than those of a batch come again within it.
        held_out: tasks to evaluate on.
    """

    def __init__(self, name: str, train: Sequence[Task], held_out: Sequence[Task], *, seed: int) -> None:
        if not train:
            raise TaskError(f"{name} has no tasks to train on", hint="hold out a smaller share of them")
        self._name = name
        self._train = train
        self._held_out = tuple(held_out)
        self._seed = seed
        self._drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])
        """An epoch, and its order."""

    @property
    def name(self) -> str:
        """Identifies the source in logs and in the mixture."""
        return self._name

    @property
    def epoch(self) -> float:
        """Passes over the tasks so far."""
        return self._drawn / len(self._train)

    def draw(self) -> Task:
        """Return the next task to train on."""
        epoch, place = divmod(self._drawn, len(self._train))
        if self._order[0] != epoch:
            order = list(range(len(self._train)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = epoch, order
        self._drawn += 1
        return self._train[self._order[1][place]]

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return the first held-out tasks, or all if there are fewer."""
        return self._held_out[:tasks]

    def state(self) -> dict[str, object]:
        """Position of the stream, and how many tasks there are."""
        return {"drawn": self._drawn, "tasks": len(self._train)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved position.

        Raises:
            TaskError: it is of another list.
        """
        drawn = state.get("drawn")
        if not isinstance(drawn, int) or drawn < 0 or state.get("tasks") != len(self._train):
            raise TaskError(
                f"the saved state of {self._name} is {dict(state)}, and it has {len(self._train)} tasks",
                hint="resume with the environment of the first start, or start a new run",
            )
        self._drawn = drawn


def split(tasks: Sequence[Task], share: float, key: Callable[[Task], str]) -> tuple[list[Task], list[Task]]:
    """Split tasks into those to train on and those held out, of which there is one or more if there are two tasks.

    Args:
        share: of all tasks that is held out; which ones depends on their keys alone.
        key: content of a task: tasks of the same content stay together, and only the first of them is held out.
    """
    by_key: dict[str, list[Task]] = {}
    for task in tasks:
        by_key.setdefault(hashlib.sha256(key(task).encode()).hexdigest(), []).append(task)
    digests = sorted(by_key)
    cut = [each for each in digests if int(each[:8], 16) < share * 2**32]
    cut = (cut or digests[:1])[: len(digests) - 1] if share else []
    held_out = [by_key[each][0] for each in cut]
    left = set(cut)
    return [task for each, same in by_key.items() if each not in left for task in same], held_out


def seeded(name: str, *, tasks: int, held_out: int, prompt: str, seed: int) -> TaskList:
    """Make a source of tasks that are nothing but a seed of their world, in `truth`: those held out come first.

    Args:
        prompt: system message of each task; "" for none.
    """
    messages: tuple[Message, ...] = ({"role": "system", "content": prompt},) if prompt else ()
    made = [
        Task(id=f"seed/{place}", source=name, messages=messages, truth={"seed": place})
        for place in range(held_out + tasks)
    ]
    return TaskList(name, made[held_out:], made[:held_out], seed=seed)
