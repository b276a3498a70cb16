"""An environment for each source of a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forge_rl.envs.protocol import Env, EnvFactory
from forge_rl.errors import TaskError
from forge_rl.types import Task


@dataclass(frozen=True)
class BySource:
    """Makes the environment that belongs to a task's source.

        environment = BySource({"math": SingleTurn, "game": Game()})

    Raises:
        TaskError: a task is of a source that is not named.
    """

    environments: Mapping[str, EnvFactory]
    """Factories by the names of sources."""

    @property
    def in_process(self) -> bool:
        """True if all of them are."""
        return all(getattr(each, "in_process", False) for each in self.environments.values())

    def __call__(self, task: Task) -> Env:
        if task.source not in self.environments:
            raise TaskError(
                f"the source {task.source!r} has no environment", hint=f"there are: {', '.join(self.environments)}"
            )
        return self.environments[task.source](task)
