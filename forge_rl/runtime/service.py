"""Service: a named set of replicas, with spawning, watching, routing and restarts."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import PoisonError, ReplicaError, ServiceError
from forge_rl.runtime import in_hand
from forge_rl.runtime.actor import ServiceActor
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.host_watcher import MARK, Watch
from forge_rl.runtime.processes import ProcessTree, cause_of, describe_exit, last_error, process_space
from forge_rl.runtime.replica import STOPPED, Replica, ReplicaState
from forge_rl.runtime.seats import Seats
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.tasks import task_group

__all__ = ["Replica", "Service", "ServiceActor"]

_KILL_S = 5.0
"""Seconds for killed processes to exit."""
_MOST_KILLED = 3
"""Number of replicas that a call, or its task, may kill before it is no longer retried."""
_POLL_S = 0.5
"""Seconds between checks for hung replicas, which do not exit, and for retired ones that have nothing left to do."""
_RETIRED_S = 30.0
"""Time for a retired replica to finish its work; unfinished calls are repeated on other replicas."""
_PROBE_S = 1.0
"""Time for a process to answer once its host's agent does not."""

T = TypeVar("T")


def least_loaded(replicas: Iterable[Replica]) -> Replica | None:
    """Return the serving replica with the least load, lowest index first; None if none is serving."""
    serving = (replica for replica in replicas if replica.serving)
    return min(serving, key=lambda replica: (replica.load, replica.index), default=None)


class Service:
    """Spawns replicas, routes calls to them, and restarts them if they die.

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
        uniform: all work is alike, so give up if a cause of death repeats before any replica has answered.
        exit_meanings: descriptions of exit statuses that its processes use on purpose.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        faults: Faults,
        *,
        descendants: bool = True,
        blames: bool = False,
        uniform: bool = False,
        exit_meanings: Mapping[int, str] | None = None,
    ) -> None:
        self.name = name
        self.replicas: list[Replica] = []
        """Latest incarnation of each replica, by index."""
        self.spares: dict[int, Replica] = {}
        """Replicas that stand by for dead ones and get no calls, by number; numbers and indices differ."""
        self.listeners: list[Callable[[], None]] = []
        """Called after every change of the set of serving replicas."""
        self.recoverable = False
        """True if the owner replaces dead replicas itself: a death is then not fatal even without `supervise`."""
        self._cluster = cluster
        self._faults = faults
        self._descendants = descendants
        self._blames = blames
        self._uniform = uniform
        self._exit_meanings = exit_meanings or {}
        self._id = uuid.uuid4().hex[:12]
        self._respawn: Callable[[int], Awaitable[None]] | None = None
        self._restart = Restart()
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._deaths: dict[int, int] = defaultdict(int)
        """Consecutive deaths by index."""
        self._killed: Counter[str] = Counter()
        """Number of replicas killed by a task, by its name, since the task last succeeded."""
        self._spawned: Counter[int] = Counter()
        """Number of spawns by index or number, for names."""
        self._answered = False
        self._causes: set[str] = set()
        """Causes of death so far."""
        self._recovering: dict[int, asyncio.Task[None]] = {}
        """Tasks that start replicas, other than the first ones."""
        self._seats: Seats | None = None
        self._count = 0
        """Number of indices so far, if `start` has assigned them."""
        self._dismissed: set[int] = set()
        """Indices without a replica, or with a retired one: there are fewer than there were."""
        self._watching: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set briefly after every state change, to wake waiters for a serving replica."""
        self._stopping = False
        cluster.on_lost.append(self._on_host_lost)

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
        spare: bool = False,
    ) -> Replica:
        """Spawn a replica: `ranks` processes with one actor in each.

        Args:
            actor: a ServiceActor class, importable in the children.
            args: constructor arguments; the constructor should only store them, as Monarch calls it lazily.
            ranks: number of processes on `host`, or on each of several hosts by name; ranks count through the hosts.
            imports: modules that the processes import first; see Cluster.spawn.
            secrets: pass on API keys and other secrets; see Cluster.spawn.
            index: index of a dead replica to replace; the next free one by default.
            spare: make it a spare with this number instead; `adopt` puts it in the place of a dead replica.

        Raises:
            ConfigError: the host does not exist.
        """
        number = len(self.replicas) if index is None else index
        dead = self.spares.get(number) if spare else self.replicas[number] if number < len(self.replicas) else None
        assert dead is None or not dead.alive, f"replica {index} of {self.name} is alive"
        if not spare and number > len(self.replicas):
            raise ServiceError("one before it did not start", service=self.name, replica=number, hint="see the events")
        incarnation = 0 if dead is None else dead.incarnation + 1
        serial, self._spawned[number] = self._spawned[number], self._spawned[number] + 1
        name = f"{self.name}-{number}" + f".{serial}" * bool(serial)
        mark = f"{self._id}/{name}"
        marked = {**(env or {}), MARK: mark}
        meshes = [
            self._cluster.spawn(
                name if part == 0 else f"{name}-{place}",
                ranks=count,
                env=marked,
                imports=imports,
                host=place,
                secrets=secrets,
            )
            for part, (place, count) in enumerate(({host: ranks} if isinstance(ranks, int) else ranks).items())
        ]
        # Monarch may report a failure late, under such a name, so it must be unique.
        names = [f"{self.name}_{number}_{serial}_{part}_{self._id}" for part in range(len(meshes))]
        replica = Replica(
            service=self.name,
            index=number,
            incarnation=incarnation,
            meshes=meshes,
            actor_names=names,
            actors=[mesh.procs.spawn(each, actor, *args) for each, mesh in zip(names, meshes, strict=True)],
            tree=ProcessTree(MARK, mark),
            faults=self._faults,
            on_lost=self._on_lost,
        )
        for each in names:
            self._faults.on_failure(each, lambda text: self._on_lost(replica, text))
        if spare:
            self.spares[number] = replica
        else:
            self._put(replica, dead)
        return replica

    def adopt(self, number: int, index: int) -> Replica:
        """Put a living spare in the place of the dead replica of an index, and return it."""
        dead, replica = self.replicas[index], self.spares.pop(number)
        assert replica.alive, f"spare {number} of {self.name} is dead"
        assert not dead.alive, f"replica {index} of {self.name} is alive"
        replica.index, replica.incarnation = index, dead.incarnation + 1
        self._put(replica, dead)
        self._notify()
        return replica

    def _put(self, replica: Replica, dead: Replica | None) -> None:
        if dead is not None:
            replica.busy_s = dead.drain_busy_s()
        self.replicas[replica.index : replica.index + 1] = [replica]

    async def watch(self, replica: Replica, *, deadline_s: float) -> None:
        """Wait until a replica's processes run; from then on exits are noticed at once, and hangs soon.

        The service's first replicas then serve; those that start later serve once their respawn has finished, a spare
        never.
        """
        pids: dict[str, dict[int, int]] = {}
        for rank, host in enumerate(replica.hosts):
            pid = await replica.call("process_id", deadline_s=deadline_s, rank=rank)
            pids.setdefault(host, {})[pid] = rank
        for host, ranks in pids.items():
            if host != THIS_HOST:
                await self._watch_elsewhere(replica, host, ranks)
                continue
            for pid, rank in ranks.items():
                try:
                    replica.tree.watch(pid, functools.partial(self._on_process_end, replica, rank))
                except (psutil.NoSuchProcess, ProcessLookupError):
                    self._on_process_end(replica, rank, None)
                    return
        near = replica.host == THIS_HOST
        if (
            self._blames and not near and self._cluster.shares_files(replica.host)
        ):  # its notes are memory of the machine
            near = process_space() == await replica.call("process_space", deadline_s=deadline_s, rank=0)
        if self._blames and near:
            in_hand.create(replica.notes)
            await replica.call("note_in_hand", replica.notes.absolute(), deadline_s=deadline_s, rank=0)
        if self._watching is None:
            self._watching = self.in_background(self._watch_for_hangs(), None, "hangs are no longer detected")
        if not self._is_spare(replica) and replica.index not in self._recovering:
            self._start_serving(replica)

    async def _watch_elsewhere(self, replica: Replica, host: str, ranks: Mapping[int, int]) -> None:
        """Watch the processes of a replica on another host; `ranks` has their ranks by PID."""
        watcher = replica.watchers[host] = self._cluster.watcher(host)
        first = min(ranks.values())
        await watcher.watch(
            Watch(
                mark=replica.tree.mark,
                pids=list(ranks),
                descendants=self._descendants,
                on_end=lambda pid, status: self._on_process_end(replica, ranks[pid], status),
                on_stopped=lambda: self.mark_failed(replica, STOPPED),
                probe=lambda: replica.call("process_id", deadline_s=_PROBE_S, rank=first),
            )
        )

    async def start(
        self,
        count: int,
        start_one: Callable[[int], Coroutine[Any, Any, None]],
        restart: Restart,
        *,
        seats: Seats | None = None,
    ) -> None:
        """Start `count` replicas concurrently, then supervise them; `start_one` is the `respawn` of `supervise`.

        If `start_one` raises now, the service is stopped.

        Args:
            seats: decide from then on how many replicas there are; see `rescale`.
        """
        try:
            async with task_group() as group:
                for index in range(count):
                    group.create_task(start_one(index))
        except BaseException:
            await self.stop()
            raise
        self.supervise(start_one, restart)
        self._seats, self._count = seats, count
        self.rescale()  # a host may have gone meanwhile

    @property
    def supervised(self) -> bool:
        """True once the service's first replicas have started, and others are started in their place."""
        return self._respawn is not None

    @property
    def complete(self) -> bool:
        """True while as many replicas serve as there should be."""
        indices = set(range(max(self._count, len(self.replicas)))) - self._dismissed
        return indices <= {replica.index for replica in self.replicas if replica.serving}

    def rescale(self) -> None:
        """Start or retire replicas, in the background, until there are as many as the seats want.

        Dead replicas are retired first, then replicas on hosts that leave, then the highest index.
        """
        if self._seats is None or self._respawn is None or self._stopping or self._faults.closing:
            return
        kept = [index for index in range(self._seats.first, self._count) if index not in self._dismissed]
        surplus = len(kept) - self._seats.wanted

        def by_use(index: int) -> tuple[bool, bool, int]:
            replica = self._at(index)
            stays = replica is not None and self._cluster.leaving.isdisjoint(replica.hosts)
            return replica is not None and replica.alive, stays, -index

        for index in sorted(kept, key=by_use)[: max(0, surplus)]:
            self._dismiss(index)
        for _ in range(-surplus):
            busy = {index for index in self._dismissed if (replica := self._at(index)) is not None and replica.alive}
            index = min(self._dismissed - busy, default=self._count)
            self._dismissed.discard(index)
            self._count = max(self._count, index + 1)
            self._recover_in_background(index, self._start_more)

    async def leave(self, host: str) -> None:
        """Retire the replicas on a host that is about to go, start those elsewhere that have room there, and wait until
        the host has none left."""
        self.rescale()
        while here := [replica for replica in self.replicas if replica.alive and host in replica.hosts]:
            for replica in here:
                if replica.serving:
                    self._retire_later(replica)
            await self._changed.wait()

    def _at(self, index: int) -> Replica | None:
        return self.replicas[index] if index < len(self.replicas) else None

    def _dismiss(self, index: int) -> None:
        """Do without the replica of an index from now on."""
        self._dismissed.add(index)
        starting, replica = self._recovering.pop(index, None), self._at(index)
        if starting is not None:
            starting.cancel()
        if replica is not None and replica.serving:
            self._retire_later(replica)
        else:
            self.in_background(self._remove(index, starting), index, "it cannot be stopped")

    def _retire_later(self, replica: Replica) -> None:
        """Give a replica no more work, and stop it once it has none left."""
        replica.ends_by = replica.clock() + _RETIRED_S
        self._set_state(replica, ReplicaState.RETIRED)

    async def _remove(self, index: int, starting: asyncio.Task[None] | None = None) -> None:
        """Clean up after a dismissed replica, or one that was still starting."""
        if starting is not None:
            await asyncio.wait([starting])
        if (replica := self._at(index)) is not None:
            if replica.alive:
                self.retire(replica, "it is not needed any more")
            self._set_state(replica, ReplicaState.RETIRED)
            await self.clean_up(replica)
        if self._seats is not None:
            self._seats.free(index)
        self.rescale()  # another replica may have been waiting for the seat

    def supervise(
        self,
        respawn: Callable[[int], Awaitable[None]],
        config: Restart,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Restart every replica that dies from now on.

        Args:
            respawn: spawns a new incarnation of an index (`spawn` with `index`, and `watch`) and makes it ready to
                serve. An exception counts as a death.
            config: restart policy.
            sleep: sleeps for a number of seconds.
        """
        self._respawn, self._restart, self._sleep = respawn, config, sleep

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
        deaths, blamed, most = 0, 0, max(_MOST_KILLED, len(self.replicas) + 1)
        while True:
            replica = await self.available()
            if refuses and self._killed[about] >= _MOST_KILLED:
                raise self._poison(about, self._killed[about])
            try:
                return await attempt(replica)
            except ReplicaError as error:
                if replica.alive:
                    raise
                if error.blamed:
                    blamed += 1
                    self.blame(about if refuses else "")
                elif error.blamed is None:
                    deaths += 1
                if blamed == _MOST_KILLED or deaths == most:
                    raise self._poison(about, max(blamed, deaths), error) from error

    def blame(self, about: str) -> None:
        """Count a replica's death against a task by its name; "" counts against none."""
        if about:
            self._killed[about] += 1

    def forgive(self, about: str) -> None:
        """Reset a task's count of deaths after a success, unless the task is already refused."""
        if self._killed[about] < _MOST_KILLED:
            del self._killed[about]

    async def available(self) -> Replica:
        """Return the serving replica with the least load; wait while none is serving.

        Raises:
            ServiceError: no replica will serve again; gives the causes.
        """
        if (replica := least_loaded(self.replicas)) is not None:
            return replica
        with self._faults.calling(self.name, None, "available"):
            while (replica := least_loaded(self.replicas)) is None:
                if self._stopping or self._all_abandoned:
                    raise ServiceError(
                        self._causes_of_end(), service=self.name, hint="see the replicas' logs in the run folder"
                    )
                await self._changed.wait()
        return replica

    def stands_by(self, spare: Replica) -> None:
        """Record that a spare is ready."""
        self._faults.recovered(self.name, spare.index)
        self._notify()

    def tell_listeners(self) -> None:
        """Call all `listeners`."""
        for listener in list(self.listeners):
            self._faults.tell(listener)

    async def change(self) -> None:
        """Wait until a replica next starts to serve or dies, or a spare stands by, dies or is adopted."""
        await self._changed.wait()

    async def returned(self, index: int) -> Replica:
        """Return the replica of an index once it serves, after its death once its successor does.

        Raises:
            ServiceError: it is not replaced any more; gives the causes.
        """
        while not (replica := self.replicas[index]).serving:
            if self._stopping or replica.state is ReplicaState.ABANDONED:
                raise ServiceError(self._causes_of_end(), service=self.name, replica=index, hint=f"see {replica.log}")
            await self._changed.wait()
        return replica

    def drain_busy_s(self) -> list[float]:
        """Return, by index, the seconds since the last call of this during which a replica had calls in flight."""
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
                self._faults.record(self.name, index, f"{trouble}: {error!r}")

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(on_end)
        return task

    def retire(self, replica: Replica, cause: str) -> None:
        """Kill a healthy replica so that it can be replaced; fails its calls in flight, but records no fault."""
        replica.kill()
        replica.fail(cause, blames=False)

    def abandon(self, replica: Replica) -> None:
        """Give up on a dead replica."""
        self._set_state(replica, ReplicaState.ABANDONED)

    async def clean_up(self, replica: Replica) -> None:
        """Stop a replica's remaining tasks here, its processes and all their descendants."""
        replica.tree.unwatch()
        await replica.link.close()
        if replica.alive:  # Monarch stops it gracefully; a dead one may hang, and is killed first
            await self._stop_meshes(replica)
        killing: list[Awaitable[object]] = [
            watcher.kill(replica.tree.mark, wait_s=_KILL_S) for watcher in replica.watchers.values()
        ]
        if THIS_HOST in replica.hosts:
            killing.append(asyncio.to_thread(replica.tree.kill, wait_s=_KILL_S))
        await asyncio.gather(*killing)  # including processes unknown to Monarch
        await self._stop_meshes(replica)
        for name in replica.actor_names:
            self._faults.off_failure(name)
        replica.notes.unlink(missing_ok=True)

    async def _stop_meshes(self, replica: Replica) -> None:
        await asyncio.gather(*(self._cluster.stop(mesh.name) for mesh in replica.meshes))

    async def stop(self) -> None:
        """Stop all replicas' processes. Calls in flight fail."""
        self._stopping = True
        if self._on_host_lost in self._cluster.on_lost:
            self._cluster.on_lost.remove(self._on_host_lost)
        self._notify()
        background = list(self._background)
        for task in background:
            task.cancel()
        if background:
            await asyncio.wait(background)
        await asyncio.gather(*map(self.clean_up, [*self.replicas, *self.spares.values()]))
        self.replicas.clear()
        self.spares.clear()

    def _on_host_lost(self, host: str, cause: str) -> None:
        for replica in [*self.replicas, *self.spares.values()]:
            if host in replica.hosts:
                self._on_death(replica, f"host {host} is gone: {cause}")
        self.rescale()

    def _on_process_end(self, replica: Replica, rank: int, status: int | None) -> None:
        cause = describe_exit(status, self._exit_meanings)
        if status is not None and status > 0 and (error := last_error(replica.logs[rank])):
            cause += f": {error}"
        self._on_death(replica, f"rank {rank}: {cause}" if replica.ranks > 1 else cause)

    def _on_lost(self, replica: Replica, text: str) -> None:
        self._on_death(replica, cause_of(text, self._exit_meanings))

    def _on_death(self, replica: Replica, cause: str) -> None:
        if not replica.alive:
            return
        replica.fail(cause)
        if self._stopping:
            return
        if replica.state is ReplicaState.RETIRED:
            self._on_retired(replica)
            return
        if replica.index in self._dismissed and not self._is_spare(replica):
            return
        if self._is_spare(replica):  # its death costs only the spare
            self._faults.record(self.name, replica.index, f"a spare: {cause}", fatal=False)
            self._notify()
            return
        respawn = None if self._faults.closing else self._respawn
        fatal = respawn is None and not self.recoverable
        self._set_state(replica, ReplicaState.ABANDONED if fatal else ReplicaState.QUARANTINED)
        self._faults.record(self.name, replica.index, cause, fatal=fatal)
        if respawn is not None and replica.index not in self._recovering:  # else it died while starting
            if replica.answered or self._faults.clock() - replica.serving_since >= self._restart.healthy_s:
                self._deaths[replica.index] = 0
            self._recover_in_background(replica.index, self._recover)

    def _on_retired(self, replica: Replica) -> None:
        """Continue after the end of a retired replica: without it, or with another one elsewhere."""
        self._notify()
        if replica.index in self._dismissed:
            self.in_background(self._remove(replica.index), replica.index, "it cannot be stopped")
        elif self._respawn is not None and not self._faults.closing:
            self._recover_in_background(replica.index, self._start_more)

    def _recover_in_background(
        self, index: int, work: Callable[[int, Callable[[int], Awaitable[None]]], Coroutine[Any, Any, None]]
    ) -> None:
        respawn = self._respawn
        assert respawn is not None, "only supervised replicas are started again"

        async def recover() -> None:
            try:
                await work(index, respawn)
            finally:  # from here on, a death starts a new recovery
                if self._recovering.get(index) is asyncio.current_task():
                    del self._recovering[index]

        self._recovering[index] = self.in_background(recover(), index, "it cannot be started")

    async def _start_more(self, index: int, respawn: Callable[[int], Awaitable[None]]) -> None:
        """Start a replica at an index that has none, or a retired one."""
        if (before := self._at(index)) is not None:
            await self.clean_up(before)
        if await self._replace(index, respawn):
            return
        if self._at(index) is before:
            self._dismissed.add(index)  # no process was started; the next change of hosts tries again
            self._notify()
        else:
            await self._recover(index, respawn)

    async def _recover(self, index: int, respawn: Callable[[int], Awaitable[None]]) -> None:
        """Replace the dead replica of an index until the new one serves or is abandoned."""
        most = self._restart.max_restarts
        counts = not self.replicas[index].blamed or not most  # a blamed call has its own budget
        while True:
            await self.clean_up(self.replicas[index])
            self._deaths[index] += counts
            counts = True
            if (hopeless := self._is_hopeless(index)) or self._deaths[index] > most:
                self.abandon(self.replicas[index])
                if self._all_abandoned:
                    self._faults.record(self.name, None, self._causes_of_end())
                if hopeless or self._all_abandoned or not most:
                    return
            await self._sleep(self._restart.delay_s(self._deaths[index]))
            if await self._replace(index, respawn):
                return

    async def _replace(self, index: int, respawn: Callable[[int], Awaitable[None]]) -> bool:
        """Start a replica at an index whose replica is dead, if it has one; return whether the new one serves."""
        dead, failure = self._at(index), ""
        try:
            await respawn(index)
        except (Exception, asyncio.CancelledError) as error:  # any error means that the replica does not serve
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            failure = f"it did not restart: {type(error).__name__}: {error}".splitlines()[0]
        replica = self._at(index)
        if replica is None or replica is dead:
            self._faults.record(self.name, index, failure, fatal=False)
            return False
        if failure:
            self.mark_failed(replica, failure)
        if replica.alive:
            self._start_serving(replica)
            self._faults.recovered(self.name, index)
        return replica.alive

    def _is_hopeless(self, index: int) -> bool:
        """Return True if a cause of death has repeated before any replica answered; external kills do not count."""
        self._answered |= any(replica.answered for replica in self.replicas)
        cause = re.sub(r"\d+", "#", self.replicas[index].death.result())
        known, outside = cause in self._causes, "SIGKILL" in cause or cause.startswith("hung")
        self._causes.add(cause)
        return self._uniform and known and not outside and not self._answered

    def _poison(self, about: str, deaths: int, error: ReplicaError | None = None) -> PoisonError:
        """Make the error for a task that is refused from now on."""
        cause = "" if error is None else f"; the last death: {error.message}"
        return PoisonError(
            f"{about or 'a call'} killed {deaths} replicas that worked on it, and is not retried{cause}",
            service=self.name,
            call="" if error is None else error.call,
            hint="see the replicas' logs in the run folder",
        )

    @property
    def _all_abandoned(self) -> bool:
        wanted = [replica for replica in self.replicas if replica.index not in self._dismissed]
        if self._dismissed and not wanted:
            return False  # they wait for a host
        return all(replica.state is ReplicaState.ABANDONED for replica in wanted)

    def _causes_of_end(self) -> str:
        """Describe why no replica is left."""
        if self._stopping or not self.replicas:
            return "the service has been stopped" if self._stopping else "no replica is alive"
        died = [f"replica {r.index}: {r.death.result()}" for r in self.replicas if r.death.done()]
        return f"no replica is left; {'; '.join(died)}"

    async def _watch_for_hangs(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for replica in [*self.replicas, *self.spares.values()]:
                if not replica.alive:
                    continue
                if cause := replica.look_for_hang(descendants=self._descendants):
                    self.mark_failed(replica, cause)
                elif replica.state is ReplicaState.RETIRED and (not replica.load or replica.clock() > replica.ends_by):
                    self.retire(replica, "it was not needed any more")
                    self._on_retired(replica)

    def _is_spare(self, replica: Replica) -> bool:
        return self.spares.get(replica.index) is replica

    def _start_serving(self, replica: Replica) -> None:
        replica.serving_since = self._faults.clock()
        self._set_state(replica, ReplicaState.SERVING)

    def _set_state(self, replica: Replica, state: ReplicaState) -> None:
        served, replica.state = replica.serving, state
        self._notify()
        if served != replica.serving:
            self.tell_listeners()

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()
