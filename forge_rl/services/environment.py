"""The Environment service: worlds that show the model messages and answer its turns."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forge_rl.envs.protocol import Env, Observation, Step
from forge_rl.errors import ConfigError, ForgeError, ReplicaError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service, ServiceActor, stopped_on_error
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.tasks import task_group
from forge_rl.types import Task

EnvFactory = Callable[[Task], Env]
"""Makes the world of one episode; must pickle."""


class Environment:
    """Typed handle of the Environment service."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The environment service: its processes."""

        replicas: int = 1
        """Processes that run worlds."""
        deadline_s: float = 600.0
        """Longest time for one step of a world."""
        restart: Restart = field(default_factory=Restart)

        def __post_init__(self) -> None:
            if self.replicas < 1:
                raise ConfigError(
                    f"the environment service has {self.replicas} replicas",
                    hint="set --environment.replicas to 1 or more",
                )
            if self.deadline_s <= 0:
                raise ConfigError(f"a step may take {self.deadline_s} s", hint="set --environment.deadline-s above 0")

    def __init__(self, config: Config, service: Service) -> None:
        self._config = config
        self._service = service
        self._opened = 0
        self._abandoning: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls, config: Config, cluster: Cluster, faults: Faults, *, factory: EnvFactory, deadline_s: float
    ) -> Environment:
        """Spawn the service with a factory of worlds."""
        # A world's own processes may run what a model wrote, which may stop itself: no reason to end the replica.
        service = Service("environment", cluster, faults, descendants=False)

        async def start_one(index: int | None = None) -> None:
            replica = service.spawn(EnvironmentActor, factory, env={"OMP_NUM_THREADS": "1"}, index=index)
            await service.watch(replica, deadline_s=deadline_s)

        async with stopped_on_error(service), task_group() as group:
            for _ in range(config.replicas):
                group.create_task(start_one())
        service.supervise(start_one, config.restart)
        return cls(config, service)

    async def open(self, task: Task) -> tuple[EnvSession, Observation]:
        """Make the world of one episode and look at it. If its replica dies meanwhile, another one makes it.

        Raises:
            DeadlineError: it took longer than the config's deadline_s.
            ReplicaError: several replicas, one after another, died of it.
            ServiceError: the environment raised something; or no replica is left.
        """
        return await self._service.try_on(lambda replica: self._open(replica, task))

    async def _open(self, replica: Replica, task: Task) -> tuple[EnvSession, Observation]:
        self._opened += 1
        world = EnvSession(self, replica, self._opened, self._config.deadline_s)
        observation: Observation = await world._ask("reset", task)
        return world, observation

    def _abandon(self, world: EnvSession) -> None:
        """Close a world that nobody waits for."""

        async def close() -> None:
            with contextlib.suppress(ForgeError):  # whoever used the world was told of its first error
                await world.close()

        task = asyncio.get_running_loop().create_task(close())
        self._abandoning.add(task)
        task.add_done_callback(self._abandoning.discard)

    async def stop(self) -> None:
        """End the service."""
        await self._service.stop()
        if self._abandoning:
            await asyncio.wait(self._abandoning)

    def __repr__(self) -> str:
        return f"Environment  {len(self._service.replicas)} replica(s)  {self._opened} worlds opened"


class EnvSession:
    """One episode's world, in the replica that holds its state."""

    def __init__(self, environment: Environment, replica: Replica, key: int, deadline_s: float) -> None:
        self._environment = environment
        self._replica = replica
        self._deadline_s = deadline_s
        self._over = False
        self.key = key
        replica.held += 1

    async def step(self, answer: str) -> Step:
        """Take one answer of the model. A world that is done is gone, and so is one whose step failed.

        Raises:
            DeadlineError: it took longer than the config's deadline_s.
            ReplicaError: its replica died, and the world with it.
            ServiceError: the environment raised something.
        """
        step: Step = await self._ask("step", answer)
        if step.done:
            self._end()
        return step

    async def close(self) -> None:
        """Give up a world that is not done."""
        if not self._over:
            self._end()
            with contextlib.suppress(ReplicaError):  # it is gone
                await self._replica.ask("close", self.key, deadline_s=self._deadline_s)

    async def _ask(self, method: str, argument: object) -> Any:
        try:
            return await self._replica.ask(method, self.key, argument, deadline_s=self._deadline_s)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Close the world without waiting for it."""
        self._environment._abandon(self)

    def _end(self) -> None:
        self._over = True
        self._replica.held -= 1


class EnvironmentActor(ServiceActor):
    """One process of worlds."""

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory
        self._worlds: dict[int, Env] = {}

    async def reset(self, key: int, task: Task) -> Observation:
        """Make a world."""
        env = self._worlds[key] = self._factory(task)
        return await env.reset()

    async def step(self, key: int, answer: str) -> Step:
        """Step a world; close it when it is done."""
        step = await self._worlds[key].step(answer)
        if step.done:
            await self.close(key)
        return step

    async def close(self, key: int) -> None:
        """Close a world, if there is one."""
        close = getattr(self._worlds.pop(key, None), "close", None)
        if close is not None and inspect.isawaitable(closed := close()):
            await closed
