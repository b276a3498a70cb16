"""Service: a named set of replicas, with spawning, watching and routing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from forge_rl.errors import PoisonError, ReplicaError, ServiceError
from forge_rl.runtime.actor import ServiceActor
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.replica import Replica, ReplicaState
from forge_rl.runtime.replica_processes import DeathRules, ProcessSettings, ReplicaProcesses
from forge_rl.system.listeners import Listeners

__all__ = ["Replica", "Service", "ServiceActor"]

_MOST_KILLED = 3
"""Maximum number of replicas that a call or its task may kill before it is refused."""
_POLL_S = 0.5
"""Seconds between checks for hung replicas, which do not exit, and for retired ones that have nothing left to do."""

T = TypeVar("T")


def least_loaded(replicas: Iterable[Replica]) -> Replica | None:
    """Return the serving replica with the least load, lowest index first; None if none is serving."""
    best: Replica | None = None  # a loop, as min() with a key takes several times as long
    for replica in replicas:
        if replica.serving and (best is None or (replica.load, replica.index) < (best.load, best.index)):
            best = replica
    return best


class Service:
    """Spawns replicas, notices their deaths, and routes calls to those that serve; a `Supervisor` restarts dead ones.

        service = Service("reward", cluster, faults)
        await service.watch(service.spawn(RewardActor, env={"OMP_NUM_THREADS": "1"}), deadline_s=60)
        score = await service.route("score", task, text, deadline_s=5)
        await service.stop()

    Args:
        name: name of the service, for errors and logs.
        cluster: cluster in which its processes run.
        faults: records its calls and failures.
        descendants: a replica also counts as hung if a process that it started is stopped. Disable it if such processes
            run code written by a model, which may stop itself.
        blames: each process records the call that it is executing, so that a death counts against that call, not
            against concurrent ones or the replica.
        exit_meanings: descriptions of exit statuses that its processes use on purpose.
        recoverable: the owner handles deaths itself: one is then not fatal even without a supervisor.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        faults: Faults,
        *,
        descendants: bool = True,
        blames: bool = False,
        exit_meanings: Mapping[int, str] | None = None,
        recoverable: bool = False,
    ) -> None:
        self.name = name
        self.replicas: list[Replica] = []
        """Latest incarnation of each replica, by index."""
        self.spares: dict[int, Replica] = {}
        """Replicas that stand by for dead ones and get no calls, by number; numbers and indices differ."""
        self.listeners = Listeners[[]](faults.listener_failed)
        """Called after every change of the set of serving replicas."""
        self.recoverable = recoverable
        """True while the owner handles deaths itself: one is then not fatal even without a supervisor."""
        self.starting: dict[int, asyncio.Task[None]] = {}
        """Tasks that start replicas other than the first ones, by index: such a replica serves once its task ends."""
        self.wanted: set[int] = set()
        """Indices that should have a replica."""
        self.cluster = cluster
        self.faults = faults
        self.stopping = False
        self._descendants = descendants
        rules = DeathRules(descendants=descendants, blames=blames, exit_meanings=exit_meanings or {})
        self.processes = ReplicaProcesses(
            name, cluster, faults, rules, on_death=self._on_death, on_stopped=self.mark_failed
        )
        self._on_end: Callable[[Replica], None] | None = None
        """The supervisor's, called with each replica that has died or finished its work; without one a death is
        fatal."""
        self._on_fewer_hosts: Callable[[], None] | None = None
        """The supervisor's, called after the loss of a host."""
        self._killed: Counter[str] = Counter()
        """Number of replicas killed by a task, by its name, since the task last succeeded."""
        self._watching: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set briefly after every state change, to wake waiters for a serving replica."""
        cluster.on_lost.add(self._on_host_lost)

    def spawn(
        self,
        actor: type,
        *args: object,
        ranks: int | Mapping[str, int] = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        host: str = THIS_HOST,
        secrets: bool = False,
        index: int | None = None,
    ) -> Replica:
        """Spawn a replica: `ranks` processes with one actor in each.

        Args:
            actor: a ServiceActor class, importable in the children.
            args: constructor arguments; the constructor should only store them, as Monarch calls it lazily.
            ranks: number of processes on `host`, or on each of several hosts by name; ranks count through the hosts.
            imports: modules that the processes import first; see Cluster.spawn.
            secrets: pass on API keys and other secrets; see Cluster.spawn.
            index: index of a dead replica to replace; the next free one by default.

        Raises:
            ConfigError: the host does not exist.
        """
        number = len(self.replicas) if index is None else index
        dead = self.at(number)
        # `replicas` has no gaps: an index can only follow one that was spawned before.
        if number > len(self.replicas):
            raise ServiceError("one before it did not start", service=self.name, replica=number, hint="see the events")
        settings = ProcessSettings(host=host, ranks=ranks, env=env or {}, imports=imports, secrets=secrets)
        replica = self._spawn(number, dead, actor, args, settings)
        self._put(replica, dead)
        if dead is None:
            self.wanted.add(number)
        return replica

    def spawn_spare(self, number: int, actor: type, *args: object, settings: ProcessSettings) -> Replica:
        """Spawn a spare with a number; `adopt` puts it in the place of a dead replica.

        Raises:
            ConfigError: the host does not exist.
        """
        replica = self.spares[number] = self._spawn(number, self.spares.get(number), actor, args, settings)
        return replica

    def _spawn(
        self, number: int, dead: Replica | None, actor: type, args: Sequence[object], settings: ProcessSettings
    ) -> Replica:
        assert dead is None or not dead.alive, f"replica {number} of {self.name} is alive"
        incarnation = 0 if dead is None else dead.incarnation + 1
        return self.processes.spawn(number, incarnation, actor, *args, settings=settings)

    def adopt(self, number: int, index: int) -> Replica:
        """Replace the dead replica of an index by a living spare, and return it."""
        dead, replica = self.replicas[index], self.spares.pop(number)
        assert replica.alive, f"spare {number} of {self.name} is dead"
        assert not dead.alive, f"replica {index} of {self.name} is alive"
        replica.index, replica.incarnation = index, dead.incarnation + 1
        self._put(replica, dead)
        self.notify()
        return replica

    def _put(self, replica: Replica, dead: Replica | None) -> None:
        if dead is not None:
            # The successor inherits the busy time that nobody has read yet, so that none is lost.
            replica.busy_s = dead.drain_busy_s()
        # Replaces the dead replica, or appends if the index is the next free one.
        self.replicas[replica.index : replica.index + 1] = [replica]

    async def watch(self, replica: Replica, *, deadline_s: float) -> None:
        """Wait until a replica's processes run; from then on exits are noticed at once, and hangs soon.

        The service's first replicas then serve; those that start later serve once their respawn has finished, a spare
        never.
        """
        if not await self.processes.watch(replica, deadline_s=deadline_s):
            return
        if self._watching is None:
            self._watching = self.in_background(self._watch_for_hangs(), None, "hangs are no longer detected")
        if not self._is_spare(replica) and replica.index not in self.starting:
            self.start_serving(replica)

    def supervise(self, on_end: Callable[[Replica], None], on_fewer_hosts: Callable[[], None]) -> None:
        """Leave the replacement of dead replicas to a supervisor from now on.

        Args:
            on_end: called with each replica that has died, and each retired one that has finished its work.
            on_fewer_hosts: called after the loss of a host.
        """
        self._on_end, self._on_fewer_hosts = on_end, on_fewer_hosts

    @property
    def supervised(self) -> bool:
        """True once the first replicas have started, so that dead ones are replaced from now on."""
        return self._on_end is not None

    @property
    def complete(self) -> bool:
        """True while as many replicas serve, or are away for a while, as there should be."""
        states = ReplicaState.SERVING, ReplicaState.AWAY
        return self.wanted <= {replica.index for replica in self.replicas if replica.state in states}

    def at(self, index: int) -> Replica | None:
        """Return the latest replica of an index; None if there has been none."""
        return self.replicas[index] if index < len(self.replicas) else None

    @property
    def abandoned(self) -> bool:
        """True if no replica will serve again."""
        replicas = [replica for replica in self.replicas if replica.index in self.wanted]
        if not replicas:
            return not self.supervised  # else they start, or wait for a host
        return all(replica.state is ReplicaState.ABANDONED for replica in replicas)

    def causes_of_end(self) -> str:
        """Describe why no replica is left."""
        if self.stopping or not self.replicas:
            return "the service has been stopped" if self.stopping else "no replica is alive"
        deaths = [f"replica {r.index}: {r.death.result()}" for r in self.replicas if r.death.done()]
        return f"no replica is left; {'; '.join(deaths)}"

    async def route(self, method: str, *args: object, deadline_s: float, about: str = "") -> Any:
        """Call a method on the serving replica with the least load, and retry on another one if it dies.

        Waits while none is serving, until restarts are exhausted; `deadline_s` applies to the method only.

        Raises:
            ForgeError, DeadlineError, ReplicaError, ServiceError: see `Replica.ask` and `try_on`.
        """
        return await self.try_on(lambda replica: replica.ask(method, *args, deadline_s=deadline_s), about=about)

    async def try_on(self, attempt: Callable[[Replica], Awaitable[T]], *, about: str = "", refuses: bool = False) -> T:
        """Run an attempt on the serving replica with the least load, and retry on another one if it dies.

        Args:
            about: name of the task, for errors.
            refuses: also count deaths against the task, like `blame`; after too many, its work is refused.

        Raises:
            PoisonError: the attempt killed several replicas, one after another.
            ServiceError: no replica is left.
        """
        # Without blame, all replicas may have died at once, unnoticed until tried.
        deaths, blamed, max_deaths = 0, 0, max(_MOST_KILLED, len(self.replicas) + 1)
        while True:
            replica = await self.available()
            # Concurrent attempts at the same task may have used up its deaths while this one waited.
            if refuses and self._killed[about] >= _MOST_KILLED:
                raise self._poison(about, self._killed[about])
            try:
                return await attempt(replica)
            except ReplicaError as error:
                # The call did not kill a living replica. One that is away has interrupted calls, which are repeated.
                if replica.alive and replica.state is not ReplicaState.AWAY:
                    raise
                if error.blamed:
                    blamed += 1
                    self.blame(about if refuses else "")
                elif error.blamed is None:
                    deaths += 1
                if blamed == _MOST_KILLED or deaths == max_deaths:
                    raise self._poison(about, max(blamed, deaths), error) from error

    def blame(self, about: str) -> None:
        """Count a replica's death against a task by its name; "" counts against none."""
        if about:
            self._killed[about] += 1

    def forgive(self, about: str) -> None:
        """Reset a task's count of deaths after a success, unless the task is already refused."""
        if self._killed[about] < _MOST_KILLED:
            # A Counter deletes a missing key without an error.
            del self._killed[about]

    async def available(self) -> Replica:
        """Return the serving replica with the least load; wait while none is serving.

        Raises:
            ServiceError: no replica will serve again; gives the causes.
        """
        if (replica := least_loaded(self.replicas)) is not None:
            return replica
        # Tracked like a call, so that a phase's deadline names this wait.
        with self.faults.calling(self.name, None, "available"):
            while (replica := least_loaded(self.replicas)) is None:
                if self.stopping or self.abandoned:
                    raise ServiceError(
                        self.causes_of_end(), service=self.name, hint="see the replicas' logs in the run folder"
                    )
                await self._changed.wait()
        return replica

    def stands_by(self, spare: Replica) -> None:
        """Record that a spare is ready."""
        self.faults.recovered(self.name, spare.index)
        self.notify()

    async def change(self) -> None:
        """Wait until a replica next starts to serve or dies, or a spare stands by, dies or is adopted."""
        await self._changed.wait()

    async def returned(self, index: int) -> Replica:
        """Return the replica of an index once it, or the one that replaces it, serves.

        Raises:
            ServiceError: it is not replaced any more; gives the causes.
        """
        while not (replica := self.replicas[index]).serving:
            if self.stopping or replica.state is ReplicaState.ABANDONED:
                raise ServiceError(self.causes_of_end(), service=self.name, replica=index, hint=f"see {replica.log}")
            await self._changed.wait()
        return replica

    def drain_busy_s(self) -> list[float]:
        """Return each replica's busy seconds since the last drain, by index: time with calls in flight."""
        return [replica.drain_busy_s() for replica in self.replicas]

    def mark_failed(self, replica: Replica, cause: str) -> None:
        """Mark a replica as dead and kill it, because it hangs or returns garbage."""
        replica.kill()
        self._on_death(replica, cause)

    def in_background(self, work: Coroutine[Any, Any, None], index: int | None, trouble: str) -> asyncio.Task[None]:
        """Start a task that ends with the service; its failure, always a bug, is a fatal fault of a replica."""

        def on_end(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.faults.record(self.name, index, f"{trouble}: {error!r}")

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(on_end)
        return task

    def begin_start(self, index: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Start the replica of an index in the background; it serves once the work has ended."""

        async def start() -> None:
            try:
                await work(index)
            finally:  # from here on, a death starts a new recovery
                if self.starting.get(index) is asyncio.current_task():
                    del self.starting[index]

        self.starting[index] = self.in_background(start(), index, "it cannot be started")

    def retire(self, replica: Replica, cause: str) -> None:
        """Kill a healthy replica so that it can be replaced; fails its calls in flight, but records no fault."""
        replica.kill()
        replica.fail(cause, blames=False)

    def abandon(self, replica: Replica) -> None:
        """Give up on a dead replica."""
        self.set_state(replica, ReplicaState.ABANDONED)

    def start_serving(self, replica: Replica) -> None:
        """Route calls to a replica from now on, or once it returns if it is away."""
        replica.serving_since = self.faults.clock()
        if replica.state is not ReplicaState.AWAY:
            self.set_state(replica, ReplicaState.SERVING)

    def send_away(self, replica: Replica, cause: str) -> None:
        """Route no calls to a replica until `set_state` makes it serve again.

        Calls in flight fail, and their callers repeat them on other replicas.
        """
        self.set_state(replica, ReplicaState.AWAY)
        replica.link.interrupt(cause)

    def set_state(self, replica: Replica, state: ReplicaState) -> None:
        """Change the state of a replica, and wake those who wait for a change."""
        was_serving, replica.state = replica.serving, state
        self.notify()
        if was_serving != replica.serving:
            self.listeners.tell()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        # Waiters wake although the event is cleared at once: `set` has already resolved their futures.
        self._changed.set()
        self._changed.clear()

    async def stop(self) -> None:
        """Stop all replicas' processes. Calls in flight fail."""
        # From here on `_on_death` records nothing: processes that exit are expected to.
        self.stopping = True
        self.cluster.on_lost.discard(self._on_host_lost)
        self.notify()
        background = list(self._background)
        # Recoveries in progress would otherwise spawn processes while the old ones are cleaned up.
        for task in background:
            task.cancel()
        if background:
            await asyncio.wait(background)
        await asyncio.gather(*map(self.processes.clean_up, [*self.replicas, *self.spares.values()]))
        self.replicas.clear()
        self.spares.clear()

    def _on_host_lost(self, host: str, cause: str) -> None:
        for replica in [*self.replicas, *self.spares.values()]:
            if host in replica.hosts:
                self._on_death(replica, f"host {host} is gone: {cause}")
        if self._on_fewer_hosts is not None:
            self._on_fewer_hosts()

    def _on_death(self, replica: Replica, cause: str) -> None:
        # One death has several observers: the pidfd, Monarch, a host's agent and failed calls. The first one counts.
        if not replica.alive:
            return
        replica.fail(cause)
        if self.stopping:
            return
        if self._is_spare(replica):  # its death costs only the spare
            self.faults.record(self.name, replica.index, f"a spare: {cause}", fatal=False)
            self.notify()
        elif replica.state is ReplicaState.RETIRED:
            self._on_retired(replica)
        elif replica.index in self.wanted:
            # The owner of an index that is not wanted has dismissed its replica, and cleans up itself.
            on_end = None if self.faults.closing else self._on_end
            fatal = on_end is None and not self.recoverable
            self.set_state(replica, ReplicaState.ABANDONED if fatal else ReplicaState.QUARANTINED)
            self.faults.record(self.name, replica.index, cause, fatal=fatal)
            if on_end is not None:
                on_end(replica)

    def _on_retired(self, replica: Replica) -> None:
        self.notify()
        if self._on_end is not None:
            self._on_end(replica)

    def _poison(self, about: str, deaths: int, error: ReplicaError | None = None) -> PoisonError:
        """Make the error for a task that is refused from now on."""
        cause = "" if error is None else f"; the last death: {error.message}"
        return PoisonError(
            f"{about or 'a call'} killed {deaths} replicas that worked on it, and is not retried{cause}",
            service=self.name,
            call="" if error is None else error.call,
            hint="see the replicas' logs in the run folder",
        )

    async def _watch_for_hangs(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for replica in [*self.replicas, *self.spares.values()]:
                if not replica.alive:
                    continue
                if cause := replica.look_for_hang(descendants=self._descendants):
                    self.mark_failed(replica, cause)
                elif replica.state is ReplicaState.RETIRED and (not replica.load or replica.clock() > replica.ends_by):
                    # Nothing left to do, or out of time: calls in flight then fail here and are repeated elsewhere.
                    self.retire(replica, "it was not needed any more")
                    self._on_retired(replica)

    def _is_spare(self, replica: Replica) -> bool:
        return self.spares.get(replica.index) is replica
