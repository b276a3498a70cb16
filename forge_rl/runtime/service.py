"""A named set of replicas, each an actor on its own process mesh, called with deadlines and named errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults, cause_of, describe_exit, exit_status
from forge_rl.runtime.router import least_loaded

if TYPE_CHECKING:
    from monarch.actor import ProcMesh


_KILL_S = 5.0
"""How long a process may take to end once it is killed."""


class ServiceActor(Actor):
    """Base of every service's actor. All endpoints are concurrent: Monarch cannot mix them with plain ones."""

    @concurrent_endpoint
    async def process_id(self) -> int:
        """Of the process that the actor lives in."""
        return os.getpid()

    @concurrent_endpoint
    async def process_space(self) -> str:
        """Where that number means this process."""
        return _process_space()


@dataclass(kw_only=True)
class Replica:
    """One replica: what is routed to, restarted and replaced as one."""

    index: int
    ranks: int
    mesh: ProcMesh
    actor: Any  # Monarch's actor mesh has no useful type; typed handles stand before it
    log: Path
    host: str = THIS_HOST
    in_flight: int = 0
    busy_s: float = 0.0
    busy_since: float = 0.0
    death: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done, with the cause, as soon as one of its processes has ended."""
    watched: list[int] = field(default_factory=list)
    """File descriptors of its processes."""

    @property
    def alive(self) -> bool:
        return not self.death.done()


class Service:
    """Spawns replicas and calls them.

    Args:
        name: of the service, in errors and logs.
        cluster: where its processes run.
        faults: where its calls and failures are noted.
        clock: monotonic seconds.
    """

    def __init__(
        self, name: str, cluster: Cluster, faults: Faults, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.replicas: list[Replica] = []
        self._cluster = cluster
        self._faults = faults
        self._clock = clock

    def spawn(
        self,
        actor: type,
        *args: object,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        host: str = THIS_HOST,
    ) -> Replica:
        """Spawn the next replica: `ranks` processes with one actor in each.

        Args:
            actor: a Monarch actor class, importable in the children.
            args: of its constructor, which should only keep them: Monarch calls it lazily.
            ranks: processes of the replica.
            env: added to their environment.
            imports: modules that they import first; see Cluster.spawn.
            host: where they run.

        Raises:
            ConfigError: there is no such host.
        """
        index = len(self.replicas)
        mesh_name = f"{self.name}-{index}"
        mesh = self._cluster.spawn(mesh_name, ranks=ranks, env=env, imports=imports, host=host)
        actor_name = f"{self.name}_{index}"
        self._faults.name_mesh(actor_name, self.name, index)
        replica = Replica(
            index=index,
            ranks=ranks,
            mesh=mesh,
            actor=mesh.spawn(actor_name, actor, *args),
            log=self._cluster.log_file(mesh_name),
            host=host,
        )
        self.replicas.append(replica)
        return replica

    async def call(
        self, replica: Replica, method: str, *args: object, deadline_s: float, rank: int | None = None
    ) -> Any:
        """Call one process of a replica: its only one, or the given rank.

        Raises:
            ForgeError: what the actor raised, if it was one.
            DeadlineError: no answer in time.
            ReplicaError: the process died.
            ServiceError: the actor raised something else; see the replica's log.
        """
        actor = replica.actor if rank is None else replica.actor.slice(ranks=rank)
        if replica.death.done():
            raise self._error(ReplicaError, replica, method, replica.death.result())
        if replica.in_flight == 0:
            replica.busy_since = self._clock()
        replica.in_flight += 1
        try:
            with self._faults.calling(self.name, replica.index, method):
                answer = asyncio.ensure_future(_await(getattr(actor, method).call_one(*args)))
                try:
                    done, _ = await asyncio.wait(
                        (answer, replica.death), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    answer.cancel()
            if answer in done:
                return answer.result()
            if replica.death in done:
                raise self._error(ReplicaError, replica, method, replica.death.result())
            raise self._error(DeadlineError, replica, method, f"no answer within {deadline_s:g} s")
        except ForgeError:
            raise
        except Exception as error:
            raise self._translate(error, replica, method) from error
        finally:
            replica.in_flight -= 1
            if replica.in_flight == 0:
                replica.busy_s += self._clock() - replica.busy_since

    async def watch(self, replica: Replica, *, deadline_s: float) -> None:
        """Wait until a replica's processes run, and from then on notice at once when one of them ends."""
        # On another machine the same number is a stranger's process. A death there is told by Monarch's supervision,
        # after seconds, as it is told to the calls that are in flight.
        near = replica.host == THIS_HOST or _process_space() == await self.call(
            replica, "process_space", deadline_s=deadline_s, rank=0
        )
        for rank in range(replica.ranks):
            pid = await self.call(replica, "process_id", deadline_s=deadline_s, rank=rank)
            if not near:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._on_death(replica, describe_exit(None))
                return
            replica.watched.append(fd)
            asyncio.get_running_loop().add_reader(fd, self._on_process_end, replica, fd)

    async def call_ranks(
        self, replica: Replica, method: str, args_of_rank: Callable[[int], Sequence[object]], *, deadline_s: float
    ) -> list[Any]:
        """Call every rank of a replica side by side; the results are in the order of ranks.

        The first failure ends the wait: the other ranks may then hang in a collective for ever.
        """
        calls = [
            asyncio.ensure_future(self.call(replica, method, *args_of_rank(rank), deadline_s=deadline_s, rank=rank))
            for rank in range(replica.ranks)
        ]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def route(self, method: str, *args: object, deadline_s: float) -> Any:
        """Call the living replica with the fewest requests in flight; raises as `call` does."""
        if self.replicas and not any(replica.alive for replica in self.replicas):
            first = min(self.replicas, key=lambda replica: replica.index)
            raise self._error(ReplicaError, first, method, first.death.result())
        replica = self.replicas[least_loaded(self.name, self.replicas)]
        return await self.call(replica, method, *args, deadline_s=deadline_s)

    def take_busy_s(self) -> list[float]:
        """Seconds in which each replica had a call in flight, since this was last asked."""
        now = self._clock()
        result = []
        for replica in self.replicas:
            running = now - replica.busy_since if replica.in_flight else 0.0
            result.append(replica.busy_s + running)
            replica.busy_s, replica.busy_since = 0.0, now
        return result

    async def stop(self) -> None:
        """End all replicas' processes."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._stop(replica))
        self.replicas.clear()

    async def _stop(self, replica: Replica) -> None:
        watched, replica.watched = replica.watched, []
        for fd in watched:
            asyncio.get_running_loop().remove_reader(fd)
        await self._cluster.stop(f"{self.name}-{replica.index}")
        for fd in watched:
            with contextlib.suppress(ProcessLookupError):  # it ended, as it should; a hung one has not
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            await asyncio.to_thread(select.select, [fd], [], [], _KILL_S)
            os.close(fd)

    def _translate(self, error: Exception, replica: Replica, method: str) -> ForgeError:
        """What an exception of Monarch's means to the caller."""
        remote = getattr(error, "exception", None)
        if isinstance(remote, ForgeError):
            return remote
        if remote is not None:
            return self._error(ServiceError, replica, method, f"{type(remote).__name__}: {remote}")
        cause = cause_of(str(error))
        self._on_death(replica, cause)
        return self._error(ReplicaError, replica, method, cause)

    def _on_process_end(self, replica: Replica, fd: int) -> None:
        status = exit_status(fd)
        self._unwatch(replica, fd)
        self._on_death(replica, describe_exit(status))

    def _on_death(self, replica: Replica, cause: str) -> None:
        self._faults.record(self.name, replica.index, cause)
        if not replica.death.done():
            replica.death.set_result(cause)

    def _unwatch(self, replica: Replica, fd: int) -> None:
        if fd in replica.watched:
            replica.watched.remove(fd)
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _error(self, kind: type[ServiceError], replica: Replica, method: str, message: str) -> ServiceError:
        return kind(message, service=self.name, replica=replica.index, call=method, mend=f"see {replica.log}")


def _process_space() -> str:
    """The machine's boot, and the namespace of processes on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


async def _await(future: Any) -> Any:
    """Monarch's futures are awaitable, but asyncio.wait wants a task."""
    return await future
