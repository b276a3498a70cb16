"""One replica of a service: its state, and its calls with deadlines and named errors."""

from __future__ import annotations

import asyncio
import enum
import pickle
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime import in_hand
from forge_rl.runtime.cluster import SpawnedMesh
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.host_watcher import HostWatcher
from forge_rl.runtime.link import Link
from forge_rl.runtime.processes import ProcessTree, is_traced
from forge_rl.system.tasks import task_group

STOPPED = "hung: its process was stopped"
"""Cause of death of a replica with a stopped process."""
_SILENT_POLLS = 60
"""Checks, over 30 s, for which a link may leave its poll unanswered. Counts checks, not seconds, so that nobody is late
when this process itself was stopped."""
_LOOKS_A_SECOND = 2
_SLICE_BYTES = 4 << 20
"""Message size for slices of a large value."""
_MOST_PROCESSES = 64
"""Maximum number of a replica's processes to check."""


class ReplicaState(enum.Enum):
    """Lifecycle of a replica; only serving ones receive calls."""

    STARTING = "starting"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    """Dead, to be replaced."""
    AWAY = "away"
    """Alive, while something else has its devices."""
    RETIRED = "retired"
    """Finishes its work, and is then stopped."""
    ABANDONED = "abandoned"
    """Dead; not to be replaced, or only after a pause that nobody waits for."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPart:
    """The processes of a replica on one host."""

    mesh: SpawnedMesh
    actor_name: str
    """Name under which Monarch reports their failure."""
    actor: Any
    """Monarch's mesh of their actors, which has no useful type; typed handles wrap it."""


class Replica:
    """Processes with one actor each, which are routed to, restarted and replaced as one.

        pid = await replica.call("process_id", deadline_s=10)
        score = await replica.ask("score", task, text, deadline_s=60)

    After its death it is replaced by another Replica with the same index.

    Args:
        service: name of the service, for errors.
        index: its place in the service.
        incarnation: number of previous replicas with this index.
        parts: its processes on each host, in the order of their ranks.
        tree: its processes on this host.
        faults: records its calls.
        on_lost: called with the replica and Monarch's message when a call finds it dead.
    """

    def __init__(
        self,
        *,
        service: str,
        index: int,
        incarnation: int,
        parts: Sequence[ReplicaPart],
        tree: ProcessTree,
        faults: Faults,
        on_lost: Callable[[Replica, str], None],
    ) -> None:  # over 60 lines, as each attribute is described
        self.service = service
        self.index = index
        self.incarnation = incarnation
        self.meshes = tuple(part.mesh for part in parts)
        first_mesh = self.meshes[0]
        self.host, self.log = first_mesh.host, first_mesh.log
        """Host and log file of rank 0."""
        self.hosts = tuple(mesh.host for mesh in self.meshes for _ in range(mesh.ranks))
        """Host of each rank."""
        self.logs = tuple(mesh.log for mesh in self.meshes for _ in range(mesh.ranks))
        """Log file of each rank."""
        self.ranks = len(self.hosts)
        self.actor_names = tuple(part.actor_name for part in parts)
        self.actor = parts[0].actor
        """Monarch's actor mesh on the host of rank 0."""
        self._of_rank = [(part.actor, rank) for part in parts for rank in range(part.mesh.ranks)]
        """Actor mesh of each rank, and the rank's place there."""
        self.tree = tree
        self.watchers: dict[str, HostWatcher] = {}
        """Watchers of its processes on other hosts, by host."""
        self.clock = faults.clock
        """Monotonic seconds."""
        self.state = ReplicaState.STARTING
        self.serving_since = 0.0
        self.ends_by = 0.0
        """Clock time at which a retired replica is stopped, even with calls in flight."""
        self.in_flight = 0
        self.held = 0
        """Load other than calls, such as environments between two steps; routing counts each as one call."""
        self.answered = False
        """True once it has answered a call through `ask`."""
        self.blamed = False
        """True if it died while running the code of a call, which is blamed for it."""
        self.may_block_s = 0.0
        """Seconds for which its work may block the event loop, if longer than the default."""
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the cause, as soon as one of its processes exits or hangs."""
        self.busy_s = 0.0
        """Busy seconds not drained yet, including its predecessor's."""
        self.busy_since = self._span_began = 0.0
        self._faults = faults
        self._on_lost = on_lost
        self.link = Link(
            # With several ranks, the link leads to the first.
            self.actor.slice(ranks=0) if first_mesh.ranks > 1 else self.actor,
            error=self._error,
            on_lost=lambda error: on_lost(self, str(error)),
            begin=self._begin,
            end=self._end_work,
        )

    @property
    def alive(self) -> bool:
        """True while all its processes run, as far as known."""
        return not self.death.done()

    @property
    def notes(self) -> Path:
        """File in which its process records the calls that it is executing, if the service requires that."""
        return self.log.with_suffix(".calls")

    @property
    def serving(self) -> bool:
        """True while it receives calls."""
        return self.state is ReplicaState.SERVING

    @property
    def load(self) -> int:
        """Number of calls in flight plus `held`, for routing."""
        return self.in_flight + self.held

    def kill(self) -> None:
        """Send SIGKILL to its processes, without waiting for them to end."""
        self.tree.signal_roots(signal.SIGKILL)
        for watcher in self.watchers.values():
            watcher.signal(self.tree.mark, signal.SIGKILL)

    def fail(self, cause: str, *, blames: bool = True) -> None:
        """Mark the replica as dead: calls in flight and later ones raise ReplicaError.

        Args:
            blames: blame the calls that it was executing; False if it was stopped on purpose.
        """
        self.death.set_result(cause)
        # The file names the calls that were running when the process died; see `in_hand`.
        calls = in_hand.read(self.notes) if blames else ()
        self.blamed = bool(calls)
        # None: it is unknown which calls were running. (): none is to blame.
        self.link.fail(cause, died=True, in_hand=(calls or None) if blames else ())

    async def call(self, method: str, *args: object, deadline_s: float, rank: int | None = None, name: str = "") -> Any:
        """Call an endpoint of one process: the only one, or the given rank. For control; `ask` is cheaper.

        Errors and traces show it as `name`, by default the method's name.

        Raises:
            ForgeError: the actor raised it.
            DeadlineError: no answer in time.
            ReplicaError: the replica died or hung.
            ServiceError: the actor raised something else; see the replica's log.
        """
        name = name or method
        if not self.alive:
            raise self._error(ReplicaError, name, self.death.result())
        actor, place = (self.actor, None) if rank is None else self._of_rank[rank]
        actor = actor if place is None else actor.slice(ranks=place)
        key, began = self._begin(name), self.clock()
        answer = asyncio.ensure_future(_call_one(actor, method, args))
        try:
            # The wait ends with the death too, as Monarch fails calls to a killed process only seconds later.
            await asyncio.wait((answer, self.death), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.cancelled():  # Monarch cancels calls when the mesh stops; a bare CancelledError would be useless
                self._on_lost(self, "its mesh has stopped")
            elif answer.done():
                return answer.result()
            elif not self.death.done():
                raise self._error(DeadlineError, name, f"no answer within {deadline_s:g} s")
            raise self._error(ReplicaError, name, self.death.result())
        except ForgeError:
            raise
        except SupervisionError as error:
            self._on_lost(self, str(error))
            raise self._error(ReplicaError, name, self.death.result()) from error
        except Exception as error:
            raised = getattr(error, "exception", error)  # Monarch wraps an endpoint's exceptions
            if isinstance(raised, ForgeError):
                raise raised from error
            raise self._error(ServiceError, name, f"{type(raised).__name__}: {raised}") from error
        finally:
            answer.cancel()
            self._end(key)
            if not rank:  # of concurrent calls to all ranks, only the first is traced
                self._trace(name, began, self.clock(), True)

    async def call_ranks(
        self, method: str, args_of_rank: Callable[[int], Sequence[object]], *, deadline_s: float
    ) -> list[Any]:
        """Call all ranks concurrently; returns the results in rank order.

        The first failure ends the wait, as the other ranks may then hang in a collective forever.

        Raises:
            ForgeError, DeadlineError, ReplicaError, ServiceError: see `call`.
        """
        async with task_group() as group:
            calls = [
                group.create_task(self.call(method, *args_of_rank(rank), deadline_s=deadline_s, rank=rank))
                for rank in range(self.ranks)
            ]
        return [call.result() for call in calls]

    async def send(self, value: object, *, for_call: str, deadline_s: float, rank: int | None = None) -> None:
        """Send a large value to one process before a call, `for_call`, which reads it with `ServiceActor.take_parcel`.

        Pickles it in a thread and sends slices, so that this event loop is not blocked.

        Raises:
            ForgeError, DeadlineError, ReplicaError, ServiceError: see `call`; they name `for_call`, and the deadline
                applies to each slice.
        """
        slices, first = await asyncio.to_thread(_in_slices, value), True
        while slices:  # each is freed once it is sent
            await self.call("receive_parcel", slices.pop(), first, deadline_s=deadline_s, rank=rank, name=for_call)
            first = False

    def ask(
        self, method: str, *args: object, deadline_s: float, on_item: Callable[[Any], object] | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Await a method of the actor over the link; with several ranks, of rank 0.

        Cancelling this cancels the method.

        Args:
            on_item: makes this a stream: the method is an async generator, and `on_item` is called with each item.
                Returning True ends the stream; exceptions are raised here. The deadline then applies to each item,
                counted from the previous one.

        Raises:
            ForgeError, DeadlineError, ReplicaError, ServiceError: see `call`.
        """
        return self.link.ask(method, args, deadline_s, on_item)

    def look_for_hang(self, *, descendants: bool) -> str:
        """Check its processes, and with `descendants` their children, for a hang; return a description, or ""."""
        max_processes = _MOST_PROCESSES if descendants else len(self.tree.roots)
        if self.tree.has_been_stopped(max_processes=max_processes):
            return STOPPED
        if not any(map(is_traced, self.tree.roots)):  # a process stopped by a debugger cannot answer
            self.link.silent_polls += self.link.open
        remaining_polls = max(_SILENT_POLLS, self.may_block_s * _LOOKS_A_SECOND) - self.link.silent_polls
        # True in exactly one check, the last before the kill. Without notes the process has no handler for SIGUSR2,
        # which would kill it; see `ServiceActor.note_in_hand`.
        if 0 <= remaining_polls < 1 and self.notes.exists():
            self.tree.signal_roots(signal.SIGUSR2)  # print its stacks before it is killed
        if remaining_polls < 0:
            return "hung: its event loop does not answer (run blocking code in a thread)"
        return ""

    def drain_busy_s(self) -> float:
        """Return the busy seconds since the last drain: time with at least one call in flight."""
        current_time = self.clock()
        seconds = self.busy_s + (current_time - self.busy_since if self.in_flight else 0.0)
        # Calls in flight count from here on.
        self.busy_s, self.busy_since = 0.0, current_time
        return seconds

    def _begin(self, method: str) -> int:
        """Count a call as in flight until `_end` is called with the returned key."""
        if self.in_flight == 0:
            self.busy_since = self._span_began = self.clock()
        self.in_flight += 1
        return self._faults.begin(self.service, self.index, method)

    def _end(self, key: int) -> None:
        self._faults.end(key)
        self.in_flight -= 1
        if self.in_flight == 0:
            end_time = self.clock()
            self.busy_s += end_time - self.busy_since
            self._trace("busy", self._span_began, end_time, False)

    def _end_work(self, key: int, answered: bool) -> None:
        self.answered = self.answered or answered
        self._end(key)

    def _trace(self, name: str, begin: float, end: float, overlapping: bool) -> None:
        self._faults.spans.tell(f"{self.service}/{self.index}", name, begin, end, overlapping)

    def _error(self, kind: type[ServiceError], method: str, message: str) -> ServiceError:
        return kind(message, service=self.service, replica=self.index, call=method, hint=f"see {self.log}")


def _in_slices(value: object) -> list[bytes]:
    """Pickle a value into slices, the last one first.

    Runs in a worker thread. The pickler refers to everything that it has pickled; freeing it, like copying slices to
    `bytes`, would block the event loop for tens of milliseconds per gigabyte, so both happen here.
    """
    slices = _Slices()
    pickle.Pickler(slices, pickle.HIGHEST_PROTOCOL).dump(value)
    pieces: list[bytes] = []
    # Popped one by one, so that at most one slice is in memory twice.
    while slices.taken:
        pieces.append(bytes(slices.taken.pop()))
    return pieces


class _Slices:
    """File-like list of slices: one large buffer would be copied repeatedly as it grows."""

    def __init__(self) -> None:
        self.taken = [bytearray()]

    def write(self, data: bytes) -> int:
        """Append data to the last slice, or to a new one once that has _SLICE_BYTES."""
        if len(self.taken[-1]) >= _SLICE_BYTES:
            self.taken.append(bytearray())
        self.taken[-1] += data
        return memoryview(data).nbytes


async def _call_one(actor: Any, method: str, args: Sequence[object]) -> Any:
    """Wrap Monarch's future in a coroutine, as asyncio requires."""
    return await getattr(actor, method).call_one(*args)
