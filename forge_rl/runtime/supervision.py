"""Brings dead replicas back, ever later if they keep dying, and gives them up in the end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError
from forge_rl.runtime.faults import Fault, Faults
from forge_rl.runtime.replica import Replica, State

if TYPE_CHECKING:
    from forge_rl.runtime.service import Service

_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What happens when a replica dies."""

    max_restarts: int = 5
    """Most restarts of a replica that keeps dying; then it is given up, and without any left the run stops."""
    backoff_s: float = 1.0
    """Wait before the second restart in a row, doubled for each further one up to a minute. The first is at once."""
    healthy_s: float = 60.0
    """A replica that served this long had recovered: its next death counts as the first."""

    def __post_init__(self) -> None:
        for flag, value in vars(self).items():
            if value < 0:
                name = flag.replace("_", "-")
                raise ConfigError(f"restart.{name} is {value}", hint=f"set restart.{name} to 0 or more")

    def delay_s(self, deaths: int) -> float:
        """Wait before a restart after so many deaths in a row."""
        return 0.0 if deaths < 2 else min(_LONGEST_BACKOFF_S, self.backoff_s * 2.0 ** (deaths - 2))


class Supervisor:
    """Respawns the replicas of one service.

    Args:
        service: whose replicas.
        respawn: spawns a new incarnation for an index and makes it ready to serve.
        config: how often and when.
        faults: where recoveries are noted.
        clock: monotonic seconds.
        sleep: waits for so many of them.
    """

    def __init__(
        self,
        service: Service,
        respawn: Callable[[int], Awaitable[None]],
        config: Restart,
        *,
        faults: Faults,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._service = service
        self._respawn = respawn
        self._config = config
        self._faults = faults
        self._clock = clock
        self._sleep = sleep
        self._deaths: dict[int, int] = defaultdict(int)
        self._open: dict[int, list[Fault]] = defaultdict(list)
        """Faults of each index that it has not recovered from."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def on_death(self, replica: Replica, fault: Fault) -> None:
        """Bring a replica back, unless that is being done already: then it died while it started."""
        index = replica.index
        self._open[index].append(fault)
        if index in self._tasks:
            return
        if self._clock() - replica.serving_since >= self._config.healthy_s:
            self._deaths[index] = 0
        task = asyncio.get_running_loop().create_task(self._recover(index))
        self._tasks[index] = task
        task.add_done_callback(lambda task: self._on_end(index, task))

    async def close(self) -> None:
        """Bring nothing back any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _recover(self, index: int) -> None:
        try:
            await self._restart(index)
        finally:
            del self._tasks[index]  # at once: from here on a death starts another

    async def _restart(self, index: int) -> None:
        while True:
            dead = self._service.replicas[index]
            await self._service.end(dead)
            self._deaths[index] += 1
            if self._deaths[index] > self._config.max_restarts:
                self._give_up(dead)
                return
            await self._sleep(self._config.delay_s(self._deaths[index]))
            failure = ""
            try:
                await self._respawn(index)
            except (Exception, asyncio.CancelledError) as error:  # whatever it is, the replica does not serve
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                failure = f"it did not start again: {type(error).__name__}: {error}".splitlines()[0]
            replica = self._service.replicas[index]
            if replica is dead:
                self._open[index].append(self._faults.record(self._service.name, index, failure, fatal=False))
                continue
            if failure:
                self._service.mark_failed(replica, failure)
            if replica.alive:
                self._service.serve(replica)
                for fault in self._open.pop(index, []):
                    self._faults.recovered(fault)
                return

    def _give_up(self, replica: Replica) -> None:
        self._service.give_up(replica)
        if all(other.state is State.GIVEN_UP for other in self._service.replicas):
            self._faults.record(self._service.name, None, self._service.causes)

    def _on_end(self, index: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults.record(self._service.name, index, f"it cannot be restarted: {error!r}")
