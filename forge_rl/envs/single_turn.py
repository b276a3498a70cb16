"""The simplest environment: the model sees the task and replies once; the verifier scores the completion."""

from __future__ import annotations

from forge_rl.envs.protocol import Observation, Step
from forge_rl.types import Task


class SingleTurn:
    """An episode of one turn. The class is its own EnvFactory."""

    in_process = True

    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self) -> Observation:
        return Observation(messages=self._task.messages)

    async def step(self, completion: str, *, truncated: bool = False) -> Step:
        return Step(done=True)
