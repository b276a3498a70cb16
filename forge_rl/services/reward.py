"""The Reward service: scores episodes, with any Python function from (task, answer) to a number."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from monarch.actor import concurrent_endpoint

from forge_rl.errors import ForgeError, ReplicaError, check_flags
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.runtime.supervision import Restart
from forge_rl.types import Task

RewardFunction = Callable[[Task, str], float | Awaitable[float]]
"""Maps a task and the model's last answer to a score; plain or async. It must pickle."""

REWARD_STUCK = 72
"""Exit status of a process that ended because its reward function did not come back."""


class Reward:
    """Typed handle of the Reward service.

    score = await reward.score(task, "the answer is 5")
    await reward.replace(lambda task, text: float(len(text)))  # in the middle of a run
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The reward service: its processes."""

        replicas: int = 1
        """Number of processes that score."""
        deadline_s: float = 60.0
        """Longest time for one score."""
        restart: Restart = field(default_factory=Restart)
        """Policy for processes that die."""

        def __post_init__(self) -> None:
            check_flags(self, "--reward.", least={"replicas": 1}, above={"deadline_s": 0})

    def __init__(self, config: Config, service: Service, function: RewardFunction) -> None:
        self._config = config
        self._service = service
        self._function = function

    @classmethod
    async def start(
        cls, config: Config, cluster: Cluster, faults: Faults, *, function: RewardFunction, deadline_s: float
    ) -> Reward:
        """Spawn the service with a reward function."""
        service = Service(
            "reward",
            cluster,
            faults,
            descendants=False,
            exit_meanings={REWARD_STUCK: "its reward function did not come back within its deadline"},
        )
        reward = cls(config, service, function)

        async def start_one(index: int) -> None:
            replica = service.spawn(RewardActor, config.deadline_s, env={"OMP_NUM_THREADS": "1"}, index=index)
            await service.watch(replica, deadline_s=deadline_s)
            given = None
            while given is not reward._function:  # replaced meanwhile
                given = reward._function
                await replica.call("replace", given, deadline_s=config.deadline_s)

        await service.start(config.replicas, start_one, config.restart)
        return reward

    async def score(self, task: Task, text: str) -> float:
        """Score an answer. If the replica dies meanwhile, another one scores it.

        Raises:
            DeadlineError: it took longer than the config's deadline_s.
            ReplicaError: several replicas died of it, one after another.
            ForgeError: the function raised it, or returned no finite number.
            ServiceError: the function raised something else; or no replica is left.
        """
        score: float = await self._service.route("score", task, text, deadline_s=self._config.deadline_s)
        return score

    async def replace(self, function: RewardFunction) -> None:
        """Score with another function from now on.

        Raises:
            ServiceError: the function cannot be pickled, or not imported in the replicas.
        """
        previous, self._function = self._function, function
        try:
            for replica in list(self._service.replicas):
                if replica.serving:  # one that starts takes the function before it serves
                    with contextlib.suppress(ReplicaError):
                        await replica.call("replace", function, deadline_s=self._config.deadline_s)
        except BaseException:
            self._function = previous
            raise

    async def stop(self) -> None:
        """End the service."""
        await self._service.stop()

    def __repr__(self) -> str:
        return f"Reward  {self._function!r}  {len(self._service.replicas)} replica(s)"


class RewardActor(ServiceActor):
    """One process that scores: async functions run concurrently, plain ones in a thread, one by one.

    Args:
        deadline_s: longest time for a plain function. A thread cannot be ended, so the process is.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._function: RewardFunction | None = None
        self._thread = ThreadPoolExecutor(1)
        self._began = 0.0

    @concurrent_endpoint
    async def replace(self, function: RewardFunction) -> None:
        self._function = function

    async def score(self, task: Task, text: str) -> float:
        function = self._function
        assert function is not None, "replace comes first"
        call = getattr(function, "__call__", None)  # noqa: B004  of an object whose call is async
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
            result = function(task, text)
        else:
            result = await self._in_thread(function, task, text)
        score = float(await result if inspect.isawaitable(result) else result)
        if not math.isfinite(score):
            raise ForgeError(
                f"the reward of {task.id} is {score}", hint="return a finite number from the reward function"
            )
        return score

    async def _in_thread(self, function: RewardFunction, task: Task, text: str) -> float | Awaitable[float]:
        loop = asyncio.get_running_loop()

        def run() -> float | Awaitable[float]:
            self._began = loop.time()
            return function(task, text)

        running = self._thread.submit(run)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.running():  # only its own time counts, not the wait for others
                loop.call_at(self._began + self._deadline_s, _exit_if_stuck, running)
            raise


def _exit_if_stuck(running: Future[float | Awaitable[float]]) -> None:
    if running.running():
        os._exit(REWARD_STUCK)
