"""The Environment service's actor: holds environments in a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from forge_rl.envs.protocol import (
    Env,
    EnvFactory,
    Exchange,
    Observation,
    Parsed,
    SharesFiles,
    Step,
    close_env,
    fork_env,
    make_env_beside,
    prepare_env,
    replay_env,
    reset_env,
    step_env,
)
from forge_rl.errors import ForgeError
from forge_rl.runtime.addresses import HostNetwork
from forge_rl.runtime.service import ServiceActor
from forge_rl.services.user_thread import StuckError, UserThread
from forge_rl.types import Task

CONSTRUCTOR_STUCK = 73
"""Exit status of a process in which the constructor of an environment did not return."""


class EnvironmentActor(ServiceActor):
    """One process that runs environments."""

    def __init__(self, factory: EnvFactory, deadline_s: float) -> None:
        self._factory = factory
        self._envs: dict[int, Env] = {}
        self._constructors = UserThread(deadline_s, exit_status=CONSTRUCTOR_STUCK)

    async def reset(self, key: int, task: Task) -> tuple[Observation, bool, bool]:
        env = self._envs[key] = await self._make(task)
        # Whether the session can be rebuilt or copied must be known before this process dies.
        return await reset_env(env), bool(getattr(env, "replayable", True)), hasattr(env, "fork")

    async def _make(self, task: Task) -> Env:
        # A constructor is the user's synchronous code and may block: it must not hold up other environments.
        in_thread = functools.partial(self._constructors.call, in_hand=self._link_end.in_hand)
        try:
            return await make_env_beside(self._factory, task, in_thread)
        except StuckError as stuck:
            raise ForgeError(
                f"the constructor of the environment of {task.source} {task.id} did not return{stuck}",
                hint="make it faster, or raise --environment.deadline-s",
            ) from None

    async def prepare(self, tasks: Sequence[Task]) -> dict[str, float]:
        return dict(prepare_env(self._factory, tasks))

    async def network(self) -> HostNetwork:
        return HostNetwork.of_this_host()

    async def serve_files(self, address: str, key: str) -> Sequence[str]:
        assert isinstance(self._factory, SharesFiles)
        return self._factory.serve_files(address, key)

    async def ask_peers(self, urls: Sequence[str], key: str) -> None:
        assert isinstance(self._factory, SharesFiles)
        self._factory.ask_peers(urls, key)

    async def fork(self, key: int, copy: int) -> None:
        self._envs[copy] = await fork_env(self._envs[key])

    async def replay(self, key: int, task: Task, observation: Observation, log: Sequence[Exchange]) -> str:
        env = self._envs[key] = await self._make(task)
        return await replay_env(env, observation, log)

    async def step(self, key: int, answer: str, truncated: bool, parsed: Parsed | None) -> Step:
        step = await step_env(self._envs[key], answer, truncated, parsed)
        # Closed here, in the same call: a done environment's session makes no further ones.
        if step.done:
            await self.close(key)
        return step

    async def close(self, key: int) -> None:
        await close_env(self._envs.pop(key, None))
