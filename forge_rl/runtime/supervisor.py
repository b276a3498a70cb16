"""Supervisor: keeps a service at its number of replicas by restarting dead ones and starting or retiring others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from forge_rl.errors import ConfigError, ServiceError
from forge_rl.runtime.processes import is_by_signal
from forge_rl.runtime.replica import Replica, ReplicaState
from forge_rl.runtime.seats import Seats
from forge_rl.runtime.service import Service
from forge_rl.runtime.supervision import Restart
from forge_rl.system.tasks import task_group

_RETIRED_S = 30.0
"""Time for a retired replica to finish its work; unfinished calls are repeated on other replicas."""


async def start_first(service: Service, count: int, start_one: Callable[[int], Awaitable[object]]) -> None:
    """Start a service's first `count` replicas concurrently, and one that a signal ends meanwhile once more.

    The more processes a run has, the more likely one of them crashes in a library while it starts.

    Args:
        start_one: see Supervisor.

    Raises:
        ForgeError: a replica did not start; the others are left running.
    """

    async def start(index: int) -> None:
        try:
            await start_one(index)
        except ServiceError:
            replica = service.at(index)
            # Only a crash is retried; an error that the replica reports itself is raised at once.
            if replica is None or replica.alive or not is_by_signal(replica.death.result()):
                raise
            await service.processes.clean_up(replica)
            await start_one(index)
            service.faults.recovered(service.name, index)

    # No supervisor listens yet: without this flag, the service would record a death in here as fatal.
    service.recoverable = True
    try:
        async with task_group() as group:
            for index in range(count):
                group.create_task(start(index))
    finally:
        service.recoverable = False


class Supervisor:
    """Restarts a service's dead replicas, and starts or retires replicas as hosts come and go.

        supervisor = Supervisor(service, start_one, Restart(), seats=seats)
        await supervisor.start(2)
        seats.scale(3)
        supervisor.rescale()

    Args:
        start_one: starts the replica of an index, in place of a dead one if there is one (`Service.spawn` with `index`,
            and `watch`), and makes it ready to serve. An exception counts as a death.
        restart: restart policy.
        seats: decide how many replicas there are; by default the number stays.
        uniform: all work is alike, so give up if a cause of death repeats before any replica has answered.
        sleep: sleeps for a number of seconds.
    """

    def __init__(
        self,
        service: Service,
        start_one: Callable[[int], Coroutine[Any, Any, None]],
        restart: Restart,
        *,
        seats: Seats | None = None,
        uniform: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._service = service
        self._start_one = start_one
        self._restart = restart
        self._seats = seats
        self._uniform = uniform
        self._sleep = sleep
        self._deaths: dict[int, int] = defaultdict(int)
        """Consecutive deaths by index."""
        self._removals: dict[int, asyncio.Task[None]] = {}
        """Tasks that clean up after dismissed replicas, by index."""
        self._answered = False
        self._causes: set[str] = set()
        """Causes of death so far."""

    async def start(self, count: int) -> None:
        """Start `count` replicas concurrently, then supervise them; if one does not start, the service is stopped."""
        service = self._service
        try:
            await start_first(service, count, self._start_one)
        except BaseException:
            await service.stop()
            raise
        service.wanted.update(range(count))
        self.supervise()
        for replica in service.replicas:
            if not replica.alive:  # it died while others were still starting
                self._on_end(replica)
        self.rescale()  # a host may have gone meanwhile

    def supervise(self) -> None:
        """Restart every replica that dies from now on."""
        self._service.supervise(self._on_end, self.rescale)

    def rescale(self) -> None:
        """Start or retire replicas, in the background, until there are as many as the seats want.

        Dead replicas are retired first, then replicas on hosts that leave, then the highest index.
        """
        service, seats = self._service, self._seats
        if seats is None or service.stopping or service.faults.closing:
            return
        indices = [index for index in service.wanted if index >= seats.first]
        surplus = len(indices) - seats.wanted

        # False sorts first: the dead, then those that do not stay, then the highest index.
        def by_use(index: int) -> tuple[bool, bool, int]:
            replica = service.at(index)
            stays = replica is not None and service.cluster.leaving.isdisjoint(replica.hosts)
            return replica is not None and replica.alive, stays, -index

        for index in sorted(indices, key=by_use)[: max(0, surplus)]:
            self._dismiss(index)
        for _ in range(-surplus):
            # Wanted before it has started, so that the next iteration picks another index.
            index = next(index for index in itertools.count() if self._is_free(index))
            service.wanted.add(index)
            service.begin_start(index, self._start_more)

    async def leave(self, host: str) -> None:
        """Move the replicas off a host that is about to go.

        Retires them, starts replacements where there is room, and waits until the host has none left.
        """
        self.rescale()
        while host_replicas := [
            replica for replica in self._service.replicas if replica.alive and host in replica.hosts
        ]:
            # A replica that is still starting there is retired by a later pass, once it serves.
            for replica in host_replicas:
                if replica.serving or replica.state is ReplicaState.AWAY:
                    self._retire_later(replica)
            await self._service.change()

    def _on_end(self, replica: Replica) -> None:
        """Replace a replica that has died, or that was retired and whose index is still wanted; else clean up."""
        service, index = self._service, replica.index
        if replica.state is ReplicaState.RETIRED:
            if index not in service.wanted:
                if index not in self._removals:  # else it died while being removed
                    self._begin_removal(index)
            elif not service.faults.closing:
                service.begin_start(index, self._start_more)
        elif index not in service.starting:  # else it died while starting
            healthy = self._restart.recovered(service.faults.clock() - replica.serving_since)
            # A replica that has worked was started correctly, so this death counts as its first.
            if replica.answered or healthy:
                self._deaths[index] = 0
            service.begin_start(index, self._recover)

    def _is_free(self, index: int) -> bool:
        """Return whether an index is not wanted, and has no replica that is still finishing its work."""
        replica = self._service.at(index)
        return index not in self._service.wanted and (replica is None or not replica.alive)

    def _dismiss(self, index: int) -> None:
        """Retire the replica of an index, or cancel its start."""
        self._service.wanted.discard(index)
        start_task, replica = self._service.starting.pop(index, None), self._service.at(index)
        if start_task is not None:
            start_task.cancel()
        if replica is not None and replica.serving:
            self._retire_later(replica)
        elif index not in self._removals:  # else its start still waits for the removal, and no replica is left
            self._begin_removal(index, start_task)

    def _retire_later(self, replica: Replica) -> None:
        """Route no more work to a replica, and stop it once its work is done."""
        replica.ends_by = replica.clock() + _RETIRED_S
        self._service.set_state(replica, ReplicaState.RETIRED)

    def _begin_removal(self, index: int, start_task: asyncio.Task[None] | None = None) -> None:
        """Clean up after the dismissed replica of an index in the background; until then, no other is started there."""
        removal = self._remove(index, start_task)
        self._removals[index] = self._service.in_background(removal, index, "it cannot be stopped")

    async def _remove(self, index: int, start_task: asyncio.Task[None] | None = None) -> None:
        """Clean up after a dismissed replica, or one that was still starting."""
        # A cancelled start may still spawn a process until its task has really ended.
        if start_task is not None:
            await asyncio.wait([start_task])
        if (replica := self._service.at(index)) is not None:
            if replica.alive:
                self._service.retire(replica, "it is not needed any more")
            self._service.set_state(replica, ReplicaState.RETIRED)
            await self._service.processes.clean_up(replica)
        if self._seats is not None:
            self._seats.free(index)
        del self._removals[index]
        self.rescale()  # another replica may have been waiting for the seat

    async def _start_more(self, index: int) -> None:
        """Start a replica at an index that has none, or a retired one."""
        # A removal frees the seat at its end, which must not be the new replica's.
        if (removal := self._removals.get(index)) is not None:
            await asyncio.wait([removal])
        if (old_replica := self._service.at(index)) is not None:
            await self._service.processes.clean_up(old_replica)
        if await self._replace(index):
            return
        if self._service.at(index) is old_replica:
            self._service.wanted.discard(index)  # no process was started; the next change of hosts tries again
            self._service.notify()
        else:
            await self._recover(index)

    async def _recover(self, index: int) -> None:
        """Replace the dead replica of an index until the new one serves or is abandoned."""
        service, max_restarts = self._service, self._restart.max_restarts
        counts = not service.replicas[index].blamed or not max_restarts  # a blamed call has its own budget
        while True:
            await service.processes.clean_up(service.replicas[index])
            self._deaths[index] += counts
            # Only the first death can be blamed on a call; a restart that fails counts.
            counts = True
            if (hopeless := self._is_hopeless(index)) or self._deaths[index] > max_restarts:
                service.abandon(service.replicas[index])
                if service.abandoned:
                    service.faults.record(service.name, None, service.causes_of_end())
                # While others serve, an abandoned replica is tried again after each long pause of `Restart.delay_s`.
                if hopeless or service.abandoned or not max_restarts:
                    return
            await self._sleep(self._restart.delay_s(self._deaths[index]))
            await self._host_for(index)
            if await self._replace(index):
                return

    async def _host_for(self, index: int) -> None:
        """Wait until a host has room for the replica of an index, or no further host is expected."""
        seats, cluster = self._seats, self._service.cluster
        if seats is None or index < seats.first:
            return
        while cluster.awaited:
            # Taken at once, so that another replica that waits for the same room goes on waiting.
            with contextlib.suppress(ConfigError):
                seats.take(index)
                return
            await cluster.change()

    async def _replace(self, index: int) -> bool:
        """Start a replica at an index without a living one; return whether it serves."""
        service, failure = self._service, ""
        dead = service.at(index)
        try:
            await self._start_one(index)
        except (Exception, asyncio.CancelledError) as error:  # any error means that the replica does not serve
            # A CancelledError may also come from inside, as when Monarch cancels the calls of a mesh that has stopped.
            # Only one that is meant for this task ends it.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            failure = f"it did not restart: {type(error).__name__}: {error}".splitlines()[0]
        replica = service.at(index)
        # No process was spawned, so there is none to mark as failed.
        if replica is None or replica is dead:
            service.faults.record(service.name, index, failure, fatal=False)
            return False
        if failure:
            service.mark_failed(replica, failure)
        if replica.alive:
            service.start_serving(replica)
            service.faults.recovered(service.name, index)
        return replica.alive

    def _is_hopeless(self, index: int) -> bool:
        """Return True if a cause of death has repeated before any replica answered; external kills do not count."""
        replicas = self._service.replicas
        self._answered |= any(replica.answered for replica in replicas)
        # PIDs, ports and addresses differ between two deaths of the same cause.
        cause = re.sub(r"\d+", "#", replicas[index].death.result())
        is_repeated, is_external = cause in self._causes, "SIGKILL" in cause or cause.startswith("hung")
        self._causes.add(cause)
        return self._uniform and is_repeated and not is_external and not self._answered
