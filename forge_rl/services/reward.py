"""The Reward service: scores episodes, with any Python function from (task, answer) to a number."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from monarch.actor import concurrent_endpoint

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.types import Task

RewardFunction = Callable[[Task, str], float | Awaitable[float]]
"""From a task and the model's last answer to a score; plain or async. It must pickle."""


class Reward:
    """Typed handle of the Reward service."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The reward service: its processes."""

        replicas: int = 1
        """Processes that score."""
        deadline_s: float = 60.0
        """Longest time for one score."""

        def __post_init__(self) -> None:
            if self.replicas < 1:
                raise ConfigError(
                    f"the reward service has {self.replicas} replicas", mend="set --reward.replicas to 1 or more"
                )
            if self.deadline_s <= 0:
                raise ConfigError(f"a score may take {self.deadline_s} s", mend="set --reward.deadline-s above 0")

    def __init__(self, config: Config, service: Service) -> None:
        self._config = config
        self._service = service

    @classmethod
    async def start(
        cls, config: Config, cluster: Cluster, faults: Faults, *, function: RewardFunction, deadline_s: float
    ) -> Reward:
        """Spawn the service with a reward function."""
        service = Service("reward", cluster, faults)
        for _ in range(config.replicas):
            replica = service.spawn(RewardActor, env={"OMP_NUM_THREADS": "1"})
            await service.watch(replica, deadline_s=deadline_s)
        reward = cls(config, service)
        await reward.replace(function)
        return reward

    async def score(self, task: Task, text: str) -> float:
        """Score an answer."""
        score: float = await self._service.route("score", task, text, deadline_s=self._config.deadline_s)
        return score

    async def replace(self, function: RewardFunction) -> None:
        """Score with another function from now on, also in the middle of a run."""
        for replica in self._service.replicas:
            await self._service.call(replica, "replace", function, deadline_s=self._config.deadline_s)
        self._function = function

    async def stop(self) -> None:
        """End the service."""
        await self._service.stop()

    def __repr__(self) -> str:
        return f"Reward  {self._function!r}  {len(self._service.replicas)} replica(s)"


class RewardActor(ServiceActor):
    """One process that scores."""

    def __init__(self) -> None:
        self._function: RewardFunction | None = None

    @concurrent_endpoint
    async def replace(self, function: RewardFunction) -> None:
        """Score with this function from now on."""
        self._function = function

    @concurrent_endpoint
    async def score(self, task: Task, text: str) -> float:
        """Score an answer; a score that is no finite number is the function's bug."""
        assert self._function is not None, "replace comes first"
        result = self._function(task, text)
        score = float(await result if inspect.isawaitable(result) else result)
        if not math.isfinite(score):
            raise ForgeError(
                f"the reward of {task.id} is {score}", mend="return a finite number from the reward function"
            )
        return score
