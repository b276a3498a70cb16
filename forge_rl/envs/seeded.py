"""Task source for environments that generate problems from a number, such as games."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from forge_rl.errors import TaskError
from forge_rl.types import Task

_HELD_OUT_SHARE = 0.25


class SeededTasks:
    """Endless stream of tasks by number; implements data.sources.Source.

        SeededTasks("guess", seed=0, problems=range(1, 101), make=task_of_number)

    A quarter of the numbers is held out; which ones depends only on the number and the name.

    Args:
        make: makes the task of a number; must be deterministic.

    Raises:
        TaskError: there are fewer than two problems.
    """

    def __init__(self, name: str, *, seed: int, problems: range, make: Callable[[int], Task]) -> None:
        self.name = name
        self._seed, self._problems, self._make, self._drawn = seed, problems, make, 0
        if len(problems) < 2:
            raise TaskError(f"{name} has {len(problems)} problems", hint="choose options that allow more")

    def __repr__(self) -> str:
        return f"{self.name} seed {self._seed}, {self._drawn} drawn"

    def draw(self) -> Task:
        """Return the next task to train on."""
        while True:
            self._drawn += 1
            number = self._problem(f"train {self._seed} {self._drawn}")
            if not self._is_held_out(number):
                return self._make(number)

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return the first held-out tasks, or all if there are fewer; the same for every seed."""
        found: dict[int, Task] = {}
        for attempt in range(tasks * 40):
            number = self._problem(f"held out {attempt}")
            if len(found) < tasks and number not in found and self._is_held_out(number):
                found[number] = self._make(number)
        return tuple(found.values())

    def state(self) -> dict[str, object]:
        """Return the position in the stream, as JSON."""
        return {"name": self.name, "seed": self._seed, "drawn": self._drawn}

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved position.

        Raises:
            TaskError: the position belongs to another stream.
        """
        drawn = state.get("drawn")
        if not isinstance(drawn, int) or dict(state) != {**self.state(), "drawn": drawn}:
            raise TaskError(
                f"the saved state of source {self.name!r} belongs to another stream: {dict(state)}",
                hint="resume with the original environment and seed, or start a new run",
            )
        self._drawn = drawn

    def _problem(self, key: str) -> int:
        return self._problems[_number(f"{self.name} {key}") % len(self._problems)]

    def _is_held_out(self, number: int) -> bool:
        # The first problem is always trained on and the last always held out, so neither part is empty.
        if number in (self._problems[0], self._problems[-1]):
            return number == self._problems[-1]
        return _number(f"{self.name} {number}") < _HELD_OUT_SHARE * 2**64


def _number(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
