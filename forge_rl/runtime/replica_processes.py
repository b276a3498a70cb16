"""The processes of a service's replicas: starts them, notices and describes their ends on any host, and kills them."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from forge_rl.runtime import in_hand
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.fork_messages import MARK
from forge_rl.runtime.host_watcher import Watch
from forge_rl.runtime.processes import ProcessTree, cause_of, describe_exit, last_error, process_space
from forge_rl.runtime.replica import STOPPED, Replica, ReplicaPart

_KILL_S = 5.0
"""Seconds for killed processes to exit."""
_PROBE_S = 1.0
"""Time for a process to answer once its host's agent does not."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Where and how the processes of a replica run."""

    host: str = THIS_HOST
    ranks: int | Mapping[str, int] = 1
    """Number of processes on `host`, or on each of several hosts by name; ranks count through the hosts."""
    env: Mapping[str, str] = field(default_factory=dict)
    imports: Sequence[str] = ()
    """Modules that the processes import first; see Cluster.spawn."""
    secrets: bool = False
    """Whether they get API keys and other secrets; see Cluster.spawn."""

    @property
    def ranks_by_host(self) -> Mapping[str, int]:
        """Number of processes on each host, by name."""
        return {self.host: self.ranks} if isinstance(self.ranks, int) else self.ranks


@dataclass(frozen=True, kw_only=True)
class DeathRules:
    """How to notice the deaths of a service's processes, describe them, and blame them on calls."""

    descendants: bool = True
    """Whether a replica also counts as hung if a process that it started is stopped."""
    blames: bool = False
    """Whether each process records the call that it is executing, so that a death counts against that call."""
    exit_meanings: Mapping[int, str] = field(default_factory=dict)
    """Descriptions of exit statuses that the processes use on purpose."""


class ReplicaProcesses:
    """Starts, watches and ends the processes of a service's replicas.

    Args:
        service: name of the service.
        rules: how deaths are noticed and described.
        on_death: called with a replica and the cause of its death.
        on_stopped: called with a replica on another host, one of whose processes was stopped.
    """

    def __init__(
        self,
        service: str,
        cluster: Cluster,
        faults: Faults,
        rules: DeathRules,
        *,
        on_death: Callable[[Replica, str], None],
        on_stopped: Callable[[Replica, str], None],
    ) -> None:
        self._service = service
        self._cluster = cluster
        self._faults = faults
        self._on_death = on_death
        self._on_stopped = on_stopped
        self._rules = rules
        self._id = uuid.uuid4().hex[:12]
        self._spawned: Counter[int] = Counter()
        """Number of spawns by index or number, for names."""

    def spawn(self, number: int, incarnation: int, actor: type, *args: object, settings: ProcessSettings) -> Replica:
        """Start the processes of a replica; see `Service.spawn`.

        Args:
            number: its index, or its number as a spare.
            incarnation: number of previous replicas with this index.

        Raises:
            ConfigError: the host does not exist.
        """
        serial, self._spawned[number] = self._spawned[number], self._spawned[number] + 1
        # Each respawn has a name of its own, and with it a log of its own.
        name = f"{self._service}-{number}" + f".{serial}" * bool(serial)
        # The id keeps apart services with the same name: `clean_up` kills every process that carries the mark.
        mark = f"{self._id}/{name}"
        environment = {**settings.env, MARK: mark}
        meshes = [
            self._cluster.spawn(
                name if part == 0 else f"{name}-{place}",
                ranks=count,
                env=environment,
                imports=settings.imports,
                host=place,
                secrets=settings.secrets,
            )
            for part, (place, count) in enumerate(settings.ranks_by_host.items())
        ]
        # Monarch may report a failure late, when a successor already runs; unique names keep the two apart.
        actor_names = [f"{self._service}_{number}_{serial}_{part}_{self._id}" for part in range(len(meshes))]
        parts = [
            ReplicaPart(mesh=mesh, actor_name=actor_name, actor=mesh.procs.spawn(actor_name, actor, *args))
            for actor_name, mesh in zip(actor_names, meshes, strict=True)
        ]
        replica = Replica(
            service=self._service,
            index=number,
            incarnation=incarnation,
            parts=parts,
            tree=ProcessTree(MARK, mark),
            faults=self._faults,
            on_lost=self._on_lost,
        )
        for actor_name in actor_names:
            self._faults.on_failure(actor_name, lambda text: self._on_lost(replica, text))
        return replica

    async def watch(self, replica: Replica, *, deadline_s: float) -> bool:
        """Wait until a replica's processes run, and watch them; returns False if one has ended already."""
        pids: dict[str, dict[int, int]] = {}
        for rank, host in enumerate(replica.hosts):
            # Monarch constructs actors lazily, so this first call also raises what their constructor raises.
            pid = await replica.call("process_id", deadline_s=deadline_s, rank=rank)
            pids.setdefault(host, {})[pid] = rank
        for host, ranks in pids.items():
            if host != THIS_HOST:
                await self._watch_elsewhere(replica, host, ranks)
                continue
            for pid, rank in ranks.items():
                try:
                    # It may have exited since it answered, so this can find it gone.
                    replica.tree.watch(pid, functools.partial(self._on_end, replica, rank))
                except (psutil.NoSuchProcess, ProcessLookupError):
                    self._on_end(replica, rank, None)
                    return False
        if self._rules.blames and await self._is_near(replica, deadline_s):
            in_hand.create(replica.notes)
            await replica.call("note_in_hand", replica.notes.absolute(), deadline_s=deadline_s, rank=0)
        return True

    async def clean_up(self, replica: Replica) -> None:
        """Stop a replica's remaining tasks here, its processes and all their descendants."""
        # From here on, processes that exit are killed or stopped on purpose.
        replica.tree.unwatch()
        await replica.link.close()
        if replica.alive:  # Monarch stops it gracefully; a dead one may hang, and is killed first
            await self._stop_meshes(replica)
        kills: list[Awaitable[object]] = [
            watcher.kill(replica.tree.mark, wait_s=_KILL_S) for watcher in replica.watchers.values()
        ]
        if THIS_HOST in replica.hosts:
            kills.append(asyncio.to_thread(replica.tree.kill, wait_s=_KILL_S))
        await asyncio.gather(*kills)  # including processes unknown to Monarch
        # Does nothing for a mesh that was stopped above.
        await self._stop_meshes(replica)
        for name in replica.actor_names:
            self._faults.off_failure(name)
        replica.notes.unlink(missing_ok=True)

    async def _stop_meshes(self, replica: Replica) -> None:
        await asyncio.gather(*(self._cluster.stop(mesh.name) for mesh in replica.meshes))

    def _on_lost(self, replica: Replica, text: str) -> None:
        self._on_death(replica, cause_of(text, self._rules.exit_meanings))

    async def _watch_elsewhere(self, replica: Replica, host: str, ranks: Mapping[int, int]) -> None:
        """Watch the processes of a replica on another host; `ranks` has their ranks by PID."""
        watcher = replica.watchers[host] = self._cluster.watcher(host)
        first = min(ranks.values())
        await watcher.watch(
            Watch(
                mark=replica.tree.mark,
                pids=list(ranks),
                descendants=self._rules.descendants,
                on_end=lambda pid, status: self._on_end(replica, ranks[pid], status),
                on_stopped=lambda: self._on_stopped(replica, STOPPED),
                probe=lambda: replica.call("process_id", deadline_s=_PROBE_S, rank=first),
            )
        )

    async def _is_near(self, replica: Replica, deadline_s: float) -> bool:
        """Return whether a replica's notes, which are memory of its machine, can be read here."""
        if replica.host == THIS_HOST or not self._cluster.shares_files(replica.host):
            return replica.host == THIS_HOST
        return bool(process_space() == await replica.call("process_space", deadline_s=deadline_s, rank=0))

    def _on_end(self, replica: Replica, rank: int, status: int | None) -> None:
        cause = describe_exit(status, self._rules.exit_meanings)
        # A signal explains itself; after an exit status, the log's last exception is the actual cause.
        if status is not None and status > 0 and (error := last_error(replica.logs[rank])):
            cause += f": {error}"
        self._on_death(replica, f"rank {rank}: {cause}" if replica.ranks > 1 else cause)
