"""The Reward service: scores episodes with any Python function of a task and its episode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from forge_rl.errors import ConfigError, ReplicaError, check_flags
from forge_rl.flags.categories import Operational
from forge_rl.rewards import protocol
from forge_rl.rewards.composition import WeightedSum, described
from forge_rl.rewards.peers import as_reward
from forge_rl.rewards.protocol import Form, form_of
from forge_rl.rewards.scorer import with_score
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.seats import Seats, ServiceHosts
from forge_rl.runtime.service import Service
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.reward_actor import REWARD_STUCK, RewardActor
from forge_rl.services.service_start import ServiceStart
from forge_rl.system.listeners import Listeners
from forge_rl.system.tasks import task_group
from forge_rl.types import Episode, Score, Task

RewardFunction: TypeAlias = protocol.RewardFunction | WeightedSum
"""A reward function in any form, or a weighted sum of several."""

_QUEUE_DEADLINE_S = 3600.0
"""Timeout of a score, including time in the queue."""


class RewardService:
    """Typed handle of the Reward service.

    [score] = await reward.score([episode])
    await reward.replace(lambda task, text: float(len(text)))  # in the middle of a run
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The reward service: its processes, and the behaviour of a run when the reward fails."""

        replicas: Operational[int] = 1
        """Number of processes that score."""
        deadline_s: Operational[float] = 60.0
        """Timeout of one score, from the call of its function; time in the queue does not count."""
        wait_for_another_s: Operational[float] = 1800.0
        """Time for which a reward whose scores all fail is asked again, in training and in evaluations, before the run
        ends; an attached client or run.reward.replace may set another meanwhile. 0 ends the run immediately."""
        restart: Restart = field(default_factory=Restart)
        """Policy for processes that die."""

        def __post_init__(self) -> None:
            minimums = {"replicas": 1, "wait_for_another_s": 0}
            check_flags(self, "--reward.", minimum=minimums, above={"deadline_s": 0})

    def __init__(self, setting: _Setting, function: RewardFunction) -> None:
        self.form: Form = form_of(function)
        """Form of the function: whether it scores single episodes or whole groups."""
        shared_parts, own_parts = _divided(function)
        self._setting = setting
        self.function = function
        """The current function."""
        self._made = itertools.count(1)
        """Numbers of the next pools of parts."""
        self._shared = _ReplicaPool(setting, "reward", shared_parts, replicas=setting.config.replicas)
        self._own = {name: self._own_pool(name, part) for name, part in own_parts.items()}
        """Pools of the parts that have their own replicas, by part name."""
        self.replaced = Listeners[[]]()
        """Callbacks that run after the function was replaced."""
        self._samples: Callable[[], Sequence[Sequence[Episode]]] = tuple
        self._replacing = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        config: Config,
        start: ServiceStart,
        *,
        function: RewardFunction,
        folder: Path | None = None,
    ) -> RewardService:
        """Spawn the service with a reward function, and a pool for each part that requests its own replicas.

        Args:
            folder: storage for functions, such as for a judge's replies.

        Raises:
            ConfigError: the function cannot be called as a reward.
            ForgeError: raised by a function's `load`.
        """
        reward = cls(_Setting(config, start, folder), function)
        try:
            async with task_group() as group:
                for pool in (reward._shared, *reward._own.values()):
                    group.create_task(pool.start())
        except BaseException:
            await reward.stop()
            raise
        return reward

    @property
    def description(self) -> str:
        """The current function, as a user named it."""
        return described(self.function)

    async def score(self, episodes: Sequence[Episode]) -> Sequence[Score]:
        """Score episodes of one task, on another replica if one dies meanwhile.

        Raises:
            DeadlineError: the function took longer than the config's deadline_s.
            PoisonError: it killed several replicas, one after another.
            ForgeError: the function raised it, or did not return a score for each episode.
            ServiceError: the function raised another error, or no replica is left.
        """
        # All read at once, so that a replacement meanwhile does not mix two functions in one score.
        return await self._score(episodes, self.function, self.form, self._shared.version, self._own)

    async def _score(
        self,
        episodes: Sequence[Episode],
        function: RewardFunction,
        form: Form,
        version: int,
        pools: Mapping[str, _ReplicaPool],
    ) -> Sequence[Score]:
        """Score episodes with a function that has this version in the shared replicas."""
        task = episodes[0].task
        # A whole episode is pickled only for functions that look at it.
        answers_suffice = form == "text" and not any(map(protocol.sees_thoughts, parts_of(function).values()))
        inputs = [episode.text for episode in episodes] if answers_suffice else list(episodes)
        # A sum whose parts all have their own replicas leaves nothing to the shared ones.
        requests = [(self._shared, version)] if self._shared.functions_by_version[version] else []
        requests += [(pool, pool.version) for pool in pools.values()]
        if len(requests) == 1:  # a task of its own would take as long as everything else here
            [(pool, pool_version)] = requests
            scores = await pool.score(pool_version, task, inputs)
        else:
            async with task_group() as group:
                calls = [group.create_task(pool.score(pool_version, task, inputs)) for pool, pool_version in requests]
            scores = {name: scored for call in calls for name, scored in call.result().items()}
        if not isinstance(function, WeightedSum):
            [only_scores] = scores.values()
            return only_scores
        return function.combine_all(scores)

    def try_on(self, samples: Callable[[], Sequence[Sequence[Episode]]]) -> None:
        """Try each new function, before it is adopted, on the groups of episodes that `samples` then returns."""
        self._samples = samples

    async def replace(self, function: RewardFunction) -> None:
        """Score with another function from now on. Unchanged parts keep their own replicas.

        It scores the samples of `try_on` first; if that fails, the current function stays.

        Raises:
            ConfigError: the function cannot be called as a reward, or failed on episodes of the last batch.
            ServiceError: the function cannot be pickled, or cannot be imported in the replicas.
        """
        function = as_reward(function)
        form, (shared_parts, own_parts) = form_of(function), _divided(function)
        async with self._replacing:
            # A part whose function is equal keeps its replicas, with whatever they have loaded.
            kept_pools = {
                name: pool
                for name, pool in self._own.items()
                if pool.functions_by_version[pool.version] == {name: own_parts.get(name)}
            }
            new_pools = {name: self._own_pool(name, part) for name, part in own_parts.items() if name not in kept_pools}
            try:
                async with task_group() as group:
                    for pool in new_pools.values():
                        group.create_task(pool.start())
                version = await self._shared.give(shared_parts)
                await self._try(function, form, version, kept_pools | new_pools)
            except BaseException:
                # Whatever failed, the current function goes on as if nothing had been sent.
                self._shared.keep()
                for pool in new_pools.values():
                    await pool.service.stop()
                raise
            old_pools = [pool for name, pool in self._own.items() if name not in kept_pools]
            # Switch atomically, so that each score comes from either the old function or the new one.
            self._shared.version, self.function, self._own, self.form = version, function, kept_pools | new_pools, form
            try:
                self.replaced.tell()
            finally:
                for pool in old_pools:
                    await pool.service.stop()

    async def _try(self, function: RewardFunction, form: Form, version: int, pools: Mapping[str, _ReplicaPool]) -> None:
        """Score samples with a function that is not in use yet.

        Raises:
            ConfigError: it fails, or returns scores that are not finite.
        """
        for episodes in self._samples():
            task = episodes[0].task
            try:
                scores = await self._score(episodes, function, form, version, pools)
                for episode, score in zip(episodes, scores, strict=True):
                    with_score(episode, score)
            except Exception as error:
                raise ConfigError(
                    f"the new reward fails on {task.source} {task.id}, so the current one stays: {error}",
                    hint="fix it, and set it again",
                ) from error

    def _own_pool(self, name: str, part: protocol.RewardFunction) -> _ReplicaPool:
        """Create the pool of a part with its own replicas."""
        number = next(self._made)
        return _ReplicaPool(
            self._setting,
            f"reward-{name}" + f"-{number}" * (number > 1),
            {name: part},
            replicas=part.replicas,  # type: ignore[union-attr]
            threads=getattr(part, "threads", 1),
        )

    def pop_metrics(self) -> dict[str, float]:
        """Return the number of sandbox sessions opened for functions since the last call, by how they started; {} if
        there were none."""
        metrics = {name: float(value) for name, value in self._setting.metrics.items()}
        self._setting.metrics.clear()
        return metrics

    async def stop(self) -> None:
        """Stop the service."""
        await asyncio.gather(*(pool.service.stop() for pool in (self._shared, *self._own.values())))

    def __repr__(self) -> str:
        suffix = "".join(f", {len(pool.service.replicas)} of {pool.service.name}" for pool in self._own.values())
        return f"Reward  {self.description}  {len(self._shared.service.replicas)} replica(s){suffix}"


def parts_of(function: RewardFunction) -> dict[str, protocol.RewardFunction]:
    """Return a reward's functions by part name; a single function is called "alone"."""
    if isinstance(function, WeightedSum):
        return {name: part for name, (part, _) in function.parts.items()}
    return {"alone": function}


def _divided(
    function: RewardFunction,
) -> tuple[dict[str, protocol.RewardFunction], dict[str, protocol.RewardFunction]]:
    """Return the functions that share replicas, and the functions with their own replicas, by part name."""
    if isinstance(function, protocol.Shaping):
        raise ConfigError(
            f"the reward {type(function).__name__} depends on another reward and cannot score alone",
            hint='give a sum, such as WeightedSum({"correct": (correct, 1.0), "shaping": (shaping, 1.0)})',
        )
    parts = parts_of(function)
    own_parts = {name: part for name, part in parts.items() if isinstance(getattr(part, "replicas", None), int)}
    return {name: part for name, part in parts.items() if name not in own_parts}, own_parts


@dataclass(frozen=True)
class _Setting:
    """Settings and counters that all pools share."""

    config: RewardService.Config
    start: ServiceStart
    folder: Path | None
    metrics: Counter[str] = field(default_factory=Counter)
    """Sums of what the processes counted since the last `Reward.pop_metrics`."""


class _ReplicaPool:
    """Replicas that score with the same functions."""

    def __init__(
        self,
        setting: _Setting,
        name: str,
        functions: Mapping[str, protocol.RewardFunction],
        *,
        replicas: int,
        threads: int = 1,
    ) -> None:
        self.version = 0
        """Version of the current functions."""
        self.functions_by_version = {0: functions}
        """Functions by part name, by version: the current ones, and their replacements."""
        self._versions = itertools.count(1)
        self.service = Service(
            name,
            setting.start.cluster,
            setting.start.faults,
            descendants=False,
            blames=True,
            exit_meanings={REWARD_STUCK: "its reward function did not come back within its deadline"},
        )
        self._setting = setting
        self._replicas = replicas
        self._threads = threads

    async def start(self) -> None:
        """Spawn the replicas, with the functions loaded."""
        config, start = self._setting.config, self._setting.start
        seats = Seats(start.cluster, start.hosts or ServiceHosts())

        async def start_one(index: int) -> None:
            # The user's function may call a judge that needs an API key.
            env = {"OMP_NUM_THREADS": str(self._threads)}
            host = seats.take(index).host
            replica = self.service.spawn(
                RewardActor, config.deadline_s, index, env=env, secrets=True, host=host, index=index
            )
            await self.service.watch(replica, deadline_s=start.deadline_s)
            functions_by_version = None
            # `give` passes over replicas that do not serve yet, so functions sent meanwhile are sent here.
            while functions_by_version is not self.functions_by_version:  # replaced meanwhile
                functions_by_version = self.functions_by_version
                await self._tell(replica)

        await Supervisor(self.service, start_one, config.restart).start(self._replicas)

    async def score(self, version: int, task: Task, inputs: Sequence[str | Episode]) -> dict[str, list[Score]]:
        """Score episodes with each function of a version."""
        answer: tuple[dict[str, list[Score]], dict[str, float]] = await self.service.route(
            "score", version, task, inputs, deadline_s=_QUEUE_DEADLINE_S, about=f"scoring {task.source} {task.id}"
        )
        scores, metrics = answer
        self._setting.metrics.update(metrics)
        return scores

    async def give(self, functions: Mapping[str, protocol.RewardFunction]) -> int:
        """Send new functions to the replicas; returns their version. The current functions score until `version` is
        set."""
        # Both stay until the switch: scores that are under way still name the current version.
        version = next(self._versions)
        self.functions_by_version = {self.version: self.functions_by_version[self.version], version: functions}
        for replica in list(self.service.replicas):
            if replica.serving:  # a starting replica gets the functions before it serves
                with contextlib.suppress(ReplicaError):
                    await self._tell(replica)
        return version

    def keep(self) -> None:
        """Discard functions that were sent but are not in use yet."""
        self.functions_by_version = {self.version: self.functions_by_version[self.version]}

    async def _tell(self, replica: Replica) -> None:
        start = self._setting.start
        deadline_s = max(start.deadline_s, self._setting.config.deadline_s)
        folder = self._setting.folder if start.cluster.shares_files(replica.host) else None
        await replica.call("replace", self.functions_by_version, folder, deadline_s=deadline_s)
