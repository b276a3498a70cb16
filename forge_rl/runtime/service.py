"""A named set of replicas, each an actor on its own process mesh, called with deadlines and named errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from forge_rl.errors import ReplicaError, ServiceError
from forge_rl.runtime.actor import ServiceActor
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults, cause_of, describe_exit, exit_status
from forge_rl.runtime.link import Link
from forge_rl.runtime.processes import kill, process_space, state_of
from forge_rl.runtime.replica import Replica, State
from forge_rl.runtime.router import least_loaded
from forge_rl.runtime.rpc import ReplicaCaller
from forge_rl.runtime.supervision import Restart, Supervisor
from forge_rl.runtime.watchdog import Watchdog

__all__ = ["Replica", "Service", "ServiceActor", "stopped_on_error"]

_KILL_S = 5.0
"""How long processes may take to end once they are killed."""
_ATTEMPTS = 3
"""A routed call is tried so often at least: what kills each replica that it meets must end."""
_MARK = "FORGE_RL_REPLICA"
"""In the environment of a replica's processes, and so of all that they start."""

T = TypeVar("T")


class Service(ReplicaCaller):
    """Spawns replicas, calls them, and brings them back if they die.

    Args:
        name: of the service, in errors and logs.
        cluster: where its processes run.
        faults: where its calls and failures are noted.
        clock: monotonic seconds.
        descendants: a replica hangs also when a process that it started is stopped. Not where such processes run what
            a model wrote, which may stop itself.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        faults: Faults,
        *,
        clock: Callable[[], float] = time.monotonic,
        descendants: bool = True,
    ) -> None:
        super().__init__(name, faults, clock)
        self.listeners: list[Callable[[], None]] = []
        """Called after every change of the set of serving replicas."""
        self._cluster = cluster
        self._id = uuid.uuid4().hex[:12]
        self._supervisor: Supervisor | None = None
        self._watchdog = Watchdog(self.replicas, descendants=descendants, mark_failed=self.mark_failed)
        self._watching: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while a replica serves, and when none will again."""
        self._stopping = False
        self.recoverable = False
        """Whether the owner brings a dead replica back itself, so that a death is not fatal without `supervise` too."""

    def spawn(
        self,
        actor: type,
        *args: object,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        host: str = THIS_HOST,
        index: int | None = None,
    ) -> Replica:
        """Spawn a replica: `ranks` processes with one actor in each.

        Args:
            actor: a ServiceActor class, importable in the children.
            args: of its constructor, which should only keep them: Monarch calls it lazily.
            ranks: processes of the replica.
            env: added to their environment.
            imports: modules that they import first; see Cluster.spawn.
            host: where they run.
            index: of the dead replica that it replaces; the next one by default.

        Raises:
            ConfigError: there is no such host.
        """
        dead = None if index is None else self.replicas[index]
        assert dead is None or not dead.alive, f"replica {index} of {self.name} lives"
        number = len(self.replicas) if index is None else index
        incarnation = 0 if dead is None else dead.incarnation + 1
        suffix = f".{incarnation}" if incarnation else ""
        mesh_name = f"{self.name}-{number}{suffix}"
        name, _, value = self._mark_of(mesh_name).partition("=")
        mesh = self._cluster.spawn(mesh_name, ranks=ranks, env={**(env or {}), name: value}, imports=imports, host=host)
        # Monarch tells of a failure late, by this name: it must be no other's by then.
        actor_name = f"{self.name}_{number}_{incarnation}_{self._id}"
        handle = mesh.spawn(actor_name, actor, *args)
        log = self._cluster.log_file(mesh_name)

        def error(kind: type[ServiceError], method: str, message: str) -> ServiceError:
            return self._error(kind, replica, method, message)

        def lost(error: Exception) -> None:
            self._on_death(replica, cause_of(str(error)))

        replica = Replica(
            index=number,
            incarnation=incarnation,
            ranks=ranks,
            mesh_name=mesh_name,
            mesh=mesh,
            actor=handle,
            link=Link(handle.slice(ranks=0) if ranks > 1 else handle, error=error, lost=lost),
            log=log,
            host=host,
        )
        self._faults.on_failure(actor_name, functools.partial(self._on_death, replica))
        if dead is None:
            self.replicas.append(replica)
        else:
            replica.busy_s = dead.busy_s
            self.replicas[number] = replica
        self._settle()
        return replica

    async def watch(self, replica: Replica, *, deadline_s: float) -> None:
        """Wait until a replica's processes run, and from then on notice at once when one ends, and soon when one hangs.

        It then serves, if it is the first of its index; one that replaces another serves once its respawn is over.
        """
        # On another machine the same number is a stranger's process. A death there is told by Monarch's supervision,
        # after seconds, as it is told to the calls that are in flight.
        near = replica.host == THIS_HOST or process_space() == await self.call(
            replica, "process_space", deadline_s=deadline_s, rank=0
        )
        for rank in range(replica.ranks):
            pid = await self.call(replica, "process_id", deadline_s=deadline_s, rank=rank)
            if not near:
                continue
            state = state_of(pid)
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._on_death(replica, describe_exit(None))
                return
            if state is not None:
                replica.roots[pid] = replica.family[pid] = state[1]
            replica.watched.append(fd)
            asyncio.get_running_loop().add_reader(fd, self._on_process_end, replica, rank, fd)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watchdog.run())
            self._watching.add_done_callback(self._on_watchdog_end)
        if replica.incarnation == 0 or self._supervisor is None:
            self.serve(replica)

    def supervise(
        self,
        respawn: Callable[[int], Awaitable[None]],
        config: Restart,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """From now on a replica that dies is brought back.

        Args:
            respawn: spawns a new incarnation for an index (`spawn` with `index`, and `watch`) and makes it ready to
                serve. If it raises, that counts as a death.
            config: how often and when.
            sleep: waits for so many seconds between restarts.
        """
        self._supervisor = Supervisor(self, respawn, config, faults=self._faults, clock=self._clock, sleep=sleep)

    async def route(self, method: str, *args: object, deadline_s: float) -> Any:
        """Ask the serving replica with the least load, and another one if that one dies; raises as `ask` and `try_on`.

        While none serves it waits for one. That ends, as restarts do; `deadline_s` is for the method.
        """
        return await self.try_on(lambda replica: self.ask(replica, method, *args, deadline_s=deadline_s))

    async def try_on(self, attempt: Callable[[Replica], Awaitable[T]]) -> T:
        """Do something on the serving replica with the least load, and again on another one if that one dies.

        Raises:
            ReplicaError: several replicas, one after another, died of it.
            ServiceError: no replica is left.
        """
        attempts = max(_ATTEMPTS, len(self.replicas) + 1)  # they may all have died at once, unseen until it is tried
        while True:
            await self.available()
            replica = least_loaded(self.name, self.replicas)
            attempts -= 1
            try:
                return await attempt(replica)
            except ReplicaError:
                if replica.alive or not attempts:
                    raise

    async def available(self) -> None:
        """Wait until a replica serves.

        Raises:
            ServiceError: none will; names the causes.
        """
        while not any(replica.serving for replica in self.replicas):
            if self._stopping or all(replica.state is State.GIVEN_UP for replica in self.replicas):
                raise ServiceError(self.causes, service=self.name, hint="see the replicas' logs in the run folder")
            with self._faults.calling(self.name, None, "available"):
                await self._settled.wait()

    @property
    def causes(self) -> str:
        """Why no replica is left."""
        if self._stopping or not self.replicas:
            return "the service has been stopped" if self._stopping else "no replica is alive"
        died = [f"replica {r.index}: {r.death.result()}" for r in self.replicas if r.death.done()]
        return f"no replica is left; {'; '.join(died)}"

    def mark_failed(self, replica: Replica, cause: str) -> None:
        """Count a replica as dead, and kill it: it hangs, or what it answers is garbage."""
        for fd in replica.watched:
            with contextlib.suppress(ProcessLookupError):  # it just ended
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        self._on_death(replica, cause)

    async def end(self, replica: Replica) -> None:
        """End what is left of a dead replica: its tasks here, and all processes that it or they started."""
        for fd in list(replica.watched):
            self._unwatch(replica, fd)
        await replica.link.close()
        await asyncio.to_thread(kill, replica.family, self._mark_of(replica.mesh_name), wait_s=_KILL_S)
        await self._cluster.stop(replica.mesh_name)

    def serve(self, replica: Replica) -> None:
        """Route to a replica from now on."""
        replica.serving_since = self._clock()
        self._set_state(replica, State.SERVING)

    def give_up(self, replica: Replica) -> None:
        """Never bring a dead replica back."""
        self._set_state(replica, State.GIVEN_UP)

    async def stop(self) -> None:
        """End all replicas' processes. What is in flight fails."""
        self._stopping = True
        self._settle()
        if self._supervisor is not None:
            await self._supervisor.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._stop(replica))
        self.replicas.clear()

    async def _stop(self, replica: Replica) -> None:
        for fd in list(replica.watched):
            self._unwatch(replica, fd)
        await replica.link.close()
        await self._cluster.stop(replica.mesh_name)
        # What did not end, as it hangs or Monarch does not know of it.
        await asyncio.to_thread(kill, replica.family, self._mark_of(replica.mesh_name), wait_s=_KILL_S)

    def _mark_of(self, mesh_name: str) -> str:
        return f"{_MARK}={self._id}/{mesh_name}"

    def _on_process_end(self, replica: Replica, rank: int, fd: int) -> None:
        cause = describe_exit(exit_status(fd))
        self._unwatch(replica, fd)
        self._on_death(replica, f"rank {rank}: {cause}" if replica.ranks > 1 else cause)

    def _on_death(self, replica: Replica, cause: str) -> None:
        if replica.death.done():
            return
        replica.death.set_result(cause)
        replica.link.fail(cause, died=True)
        if self._stopping:
            return
        supervisor = None if self._faults.closing else self._supervisor
        fatal = supervisor is None and not self.recoverable
        fault = self._faults.record(self.name, replica.index, cause, fatal=fatal)
        self._set_state(replica, State.GIVEN_UP if fatal else State.QUARANTINED)
        if supervisor is not None:
            supervisor.on_death(replica, fault)

    def _on_watchdog_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults.record(self.name, None, f"nobody notices any more when it hangs: {error!r}")

    def _set_state(self, replica: Replica, state: State) -> None:
        served, replica.state = replica.serving, state
        self._settle()
        if served != replica.serving:
            for listener in list(self.listeners):
                listener()

    def _settle(self) -> None:
        """Wake who waits for a replica that serves, if one does or none will."""
        given_up = all(replica.state is State.GIVEN_UP for replica in self.replicas)
        if given_up or self._stopping or any(replica.serving for replica in self.replicas):
            self._settled.set()
        else:
            self._settled.clear()

    def _unwatch(self, replica: Replica, fd: int) -> None:
        if fd in replica.watched:
            replica.watched.remove(fd)
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)


@contextlib.asynccontextmanager
async def stopped_on_error(service: Service) -> AsyncIterator[None]:
    """Stop a service whose start failed, as its handle, which would, is never seen."""
    try:
        yield
    except BaseException:
        await service.stop()
        raise
