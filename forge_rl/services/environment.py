"""The Environment service: worlds that show the model messages and answer its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from monarch.actor import concurrent_endpoint

from forge_rl.envs.protocol import Env, Observation, Step
from forge_rl.errors import ConfigError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.router import least_loaded
from forge_rl.runtime.service import Replica, Service, ServiceActor
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

        def __post_init__(self) -> None:
            if self.replicas < 1:
                raise ConfigError(
                    f"the environment service has {self.replicas} replicas",
                    mend="set --environment.replicas to 1 or more",
                )
            if self.deadline_s <= 0:
                raise ConfigError(f"a step may take {self.deadline_s} s", mend="set --environment.deadline-s above 0")

    def __init__(self, config: Config, service: Service) -> None:
        self._config = config
        self._service = service
        self._opened = 0

    @classmethod
    async def start(
        cls, config: Config, cluster: Cluster, faults: Faults, *, factory: EnvFactory, deadline_s: float
    ) -> Environment:
        """Spawn the service with a factory of worlds."""
        service = Service("environment", cluster, faults)
        for _ in range(config.replicas):
            replica = service.spawn(EnvironmentActor, factory, env={"OMP_NUM_THREADS": "1"})
            await service.watch(replica, deadline_s=deadline_s)
        return cls(config, service)

    async def open(self, task: Task) -> tuple[World, Observation]:
        """Make the world of one episode and look at it."""
        replica = self._service.replicas[least_loaded("environment", self._service.replicas)]
        self._opened += 1
        world = World(self._service, replica, self._opened, self._config.deadline_s)
        observation: Observation = await self._service.call(
            replica, "reset", world.key, task, deadline_s=self._config.deadline_s
        )
        return world, observation

    async def stop(self) -> None:
        """End the service."""
        await self._service.stop()

    def __repr__(self) -> str:
        return f"Environment  {len(self._service.replicas)} replica(s)  {self._opened} worlds opened"


class World:
    """One episode's world, in the replica that holds its state."""

    def __init__(self, service: Service, replica: Replica, key: int, deadline_s: float) -> None:
        self._service = service
        self._replica = replica
        self._deadline_s = deadline_s
        self.key = key

    async def step(self, answer: str) -> Step:
        """Take one answer of the model. A world that is done is gone."""
        step: Step = await self._service.call(self._replica, "step", self.key, answer, deadline_s=self._deadline_s)
        return step

    async def close(self) -> None:
        """Give up a world that is not done."""
        await self._service.call(self._replica, "close", self.key, deadline_s=self._deadline_s)


class EnvironmentActor(ServiceActor):
    """One process of worlds."""

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory
        self._worlds: dict[int, Env] = {}

    @concurrent_endpoint
    async def reset(self, key: int, task: Task) -> Observation:
        """Make a world."""
        env = self._factory(task)
        observation = await env.reset()
        self._worlds[key] = env
        return observation

    @concurrent_endpoint
    async def step(self, key: int, answer: str) -> Step:
        """Step a world; forget it when it is done."""
        step = await self._worlds[key].step(answer)
        if step.done:
            del self._worlds[key]
        return step

    @concurrent_endpoint
    async def close(self, key: int) -> None:
        """Forget a world."""
        self._worlds.pop(key, None)
