"""The Reward service: scores episodes, with any Python function from (task, answer) to a number."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from monarch.actor import concurrent_endpoint

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, check_flags
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.runtime.supervision import Restart
from forge_rl.types import Task

RewardFunction = Callable[[Task, str], float | Awaitable[float]]
"""Maps a task and the model's last answer to a score; plain or async. It must pickle."""

_QUEUE_DEADLINE_S = 3600.0
"""Longest wait for a score, with those before it."""
_LAST_WORDS_S = 1.0
"""Time for a process that ends to tell the caller why."""
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
        """Longest time for one score, from when its function is called: scores that wait for others are not late."""
        restart: Restart = field(default_factory=Restart)
        """Policy for processes that die."""

        def __post_init__(self) -> None:
            check_flags(self, "--reward.", least={"replicas": 1}, above={"deadline_s": 0})

    def __init__(self, config: Config, service: Service, function: RewardFunction) -> None:
        self._config = config
        self._service = service
        self._function = function
        self.replaced: list[Callable[[], None]] = []
        """Callbacks, run after the function was replaced."""

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
            # The user's function may ask a judge that wants a key.
            env = {"OMP_NUM_THREADS": "1"}
            replica = service.spawn(RewardActor, config.deadline_s, index, env=env, secrets=True, index=index)
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
            DeadlineError: the function took longer than the config's deadline_s.
            ReplicaError: several replicas died of it, one after another.
            ForgeError: the function raised it, or returned no finite number.
            ServiceError: the function raised something else; or no replica is left.
        """
        score: float = await self._service.route("score", task, text, deadline_s=_QUEUE_DEADLINE_S)
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
        for listener in self.replaced:
            listener()

    async def stop(self) -> None:
        """End the service."""
        await self._service.stop()

    def __repr__(self) -> str:
        return f"Reward  {self._function!r}  {len(self._service.replicas)} replica(s)"


@dataclass(eq=False, slots=True)
class _Call:
    """Call of a plain function, in the thread."""

    limit: asyncio.Timeout | None
    """Ends the wait for it; None once nobody waits."""
    began: float = 0.0


class RewardActor(ServiceActor):
    """One process that scores: async functions run concurrently, plain ones in a thread, one by one.

    Args:
        deadline_s: longest time for a function. A thread cannot be ended, so the process is.
        index: its number, for errors.
    """

    def __init__(self, deadline_s: float, index: int) -> None:
        self._deadline_s = deadline_s
        self._index = index
        self._function: RewardFunction | None = None
        self._thread = ThreadPoolExecutor(1)
        self._running: _Call | None = None
        self._pending = 0
        """Calls in the thread, or waiting for it."""
        self._watch: asyncio.TimerHandle | None = None

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
        if inspect.isawaitable(result):
            try:
                async with asyncio.timeout(self._deadline_s) as limit:
                    result = await result
            except TimeoutError:
                if limit.expired():
                    raise self._late() from None
                raise
        score = float(result)
        if not math.isfinite(score):
            raise ForgeError(
                f"the reward of {task.id} is {score}", hint="return a finite number from the reward function"
            )
        return score

    async def _in_thread(self, function: RewardFunction, task: Task, text: str) -> float | Awaitable[float]:
        loop = asyncio.get_running_loop()

        def run() -> float | Awaitable[float]:
            call.began = loop.time()  # only its own time counts, not the wait for others
            self._running = call
            try:
                return function(task, text)
            finally:
                self._running = None

        limit = asyncio.timeout(None)
        call = _Call(limit)
        self._pending += 1
        if self._watch is None:
            self._watch = loop.call_later(self._deadline_s, self._look)
        try:
            async with limit:
                return await asyncio.wrap_future(self._thread.submit(run))
        except TimeoutError:
            if limit.expired():
                raise self._late() from None
            raise
        finally:
            call.limit = None
            self._pending -= 1

    def _look(self) -> None:
        """End the wait for a function that takes too long, and the process if it still does not come back."""
        loop, call, self._watch = asyncio.get_running_loop(), self._running, None
        due = loop.time() + self._deadline_s
        if call is not None and (due := call.began + self._deadline_s) <= loop.time():
            if call.limit is not None:
                call.limit.reschedule(loop.time())
            loop.call_later(_LAST_WORDS_S, self._exit_if_stuck, call)
        elif call is not None or self._pending:
            self._watch = loop.call_at(due, self._look)

    def _exit_if_stuck(self, call: _Call) -> None:
        if self._running is call:
            os._exit(REWARD_STUCK)
        if self._pending and self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._deadline_s, self._look)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"no answer within {self._deadline_s:g} s",
            service="reward",
            replica=self._index,
            call="score",
            hint="make the reward function faster, or raise --reward.deadline-s",
        )
