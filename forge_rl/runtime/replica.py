"""One replica of a service: its state, and its calls with deadlines and named errors."""

from __future__ import annotations

import asyncio
import enum
import pickle
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime import in_hand
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.link import Link
from forge_rl.runtime.processes import ProcessTree, is_traced
from forge_rl.runtime.tasks import task_group

if TYPE_CHECKING:
    from monarch.actor import ProcMesh


_STOPPED_POLLS = 3
"""Consecutive checks, over a second, that must find a process stopped."""
_SILENT_POLLS = 60
"""Checks, over 30 s, for which a link may leave its poll unanswered. Counts checks, not seconds, so that nobody is late
when this process itself was stopped."""
_LOOKS_A_SECOND = 2
_SLICE_BYTES = 4 << 20
"""Message size for slices of a large value."""
_MOST_PROCESSES = 64
"""Maximum number of a replica's processes to check."""


class State(enum.Enum):
    """Lifecycle of a replica; only serving ones receive calls."""

    STARTING = "starting"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    """Dead, to be replaced."""
    ABANDONED = "abandoned"
    """Dead; not to be replaced, or only after a pause that nobody waits for."""


@dataclass(kw_only=True, eq=False)
class Replica:
    """Processes with one actor each, which are routed to, restarted and replaced as one.

        pid = await replica.call("process_id", deadline_s=10)
        score = await replica.ask("score", task, text, deadline_s=60)

    After its death it is replaced by another Replica with the same index.
    """

    service: str
    """Name of the service, for errors."""
    index: int
    incarnation: int
    """Number of previous replicas with this index."""
    ranks: int
    """Number of processes."""
    mesh: ProcMesh
    mesh_name: str
    actor_name: str
    """Name under which Monarch reports its failure."""
    actor: Any  # Monarch's actor mesh has no useful type; typed handles wrap it
    host: str
    log: Path
    """Log file of its processes."""
    tree: ProcessTree
    """Its processes, if they are on this machine."""
    faults: Faults
    clock: Callable[[], float]
    """Monotonic seconds."""
    on_lost: Callable[[Replica, str], None]
    """Called with the replica and Monarch's message when a call finds it dead."""
    busy_s: float = 0.0
    """Busy seconds not drained yet, including its predecessor's."""
    state: State = State.STARTING
    serving_since: float = 0.0
    in_flight: int = 0
    held: int = 0
    """Load other than calls, such as environments between two steps; routing counts each as one call."""
    answered: bool = False
    """True once it has answered a call through `ask`."""
    blamed: bool = False
    """True if it died while running the code of a call, which is blamed for it."""
    may_block_s: float = 0.0
    """Seconds for which its work may block the event loop, if longer than the default."""
    stopped_polls: int = 0
    """Number of consecutive watchdog checks that found one of its processes stopped."""
    death: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done, with the cause, as soon as one of its processes exits or hangs."""

    def __post_init__(self) -> None:
        self.busy_since = self._span_began = 0.0
        first = self.actor.slice(ranks=0) if self.ranks > 1 else self.actor
        self.link = Link(
            first,
            error=self._error,
            lost=lambda error: self.on_lost(self, str(error)),
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
        return self.state is State.SERVING

    @property
    def load(self) -> int:
        """Number of calls in flight plus `held`, for routing."""
        return self.in_flight + self.held

    def fail(self, cause: str) -> None:
        """Mark the replica as dead: calls in flight and later ones raise ReplicaError."""
        self.death.set_result(cause)
        calls = in_hand.read(self.notes)
        self.blamed = bool(calls)
        self.link.fail(cause, died=True, in_hand=calls)

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
        actor = self.actor if rank is None else self.actor.slice(ranks=rank)
        if not self.alive:
            raise self._error(ReplicaError, name, self.death.result())
        try:
            key, began = self._begin(name), self.clock()
            answer = asyncio.ensure_future(_call_one(actor, method, args))
            try:
                done, _ = await asyncio.wait(
                    (answer, self.death), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                answer.cancel()
                self._end(key)
                if not rank:  # of concurrent calls to all ranks, only the first is traced
                    self._trace(name, began, self.clock(), True)
            if answer in done and not answer.cancelled():
                return answer.result()
            if answer in done:  # Monarch cancels calls when the mesh stops; a bare CancelledError would be useless
                self.on_lost(self, "its mesh has stopped")
                raise self._error(ReplicaError, name, self.death.result())
            if self.death in done:
                raise self._error(ReplicaError, name, self.death.result())
            raise self._error(DeadlineError, name, f"no answer within {deadline_s:g} s")
        except ForgeError:
            raise
        except SupervisionError as error:
            self.on_lost(self, str(error))
            raise self._error(ReplicaError, name, self.death.result()) from error
        except Exception as error:
            raised = getattr(error, "exception", error)  # Monarch wraps an endpoint's exceptions
            if isinstance(raised, ForgeError):
                raise raised from error
            raise self._error(ServiceError, name, f"{type(raised).__name__}: {raised}") from error

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
        parts = _Parts()
        await asyncio.to_thread(pickle.Pickler(parts, pickle.HIGHEST_PROTOCOL).dump, value)
        for number, data in enumerate(parts.slices()):
            first = number == 0
            await self.call("receive_parcel", data, first, deadline_s=deadline_s, rank=rank, name=for_call)

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
        most = _MOST_PROCESSES if descendants else len(self.tree.roots)
        self.stopped_polls = self.stopped_polls + 1 if self.tree.has_stopped(most=most) else 0
        if self.stopped_polls >= _STOPPED_POLLS:
            return "hung: its process was stopped"
        if not any(map(is_traced, self.tree.roots)):  # a process stopped by a debugger cannot answer
            self.link.silent_polls += self.link.open
        left = max(_SILENT_POLLS, self.may_block_s * _LOOKS_A_SECOND) - self.link.silent_polls
        if 0 <= left < 1 and self.notes.exists():
            self.tree.signal_roots(signal.SIGUSR2)  # print its stacks before it is killed
        if left < 0:
            return "hung: its event loop does not answer (run blocking code in a thread)"
        return ""

    def drain_busy_s(self) -> float:
        """Return the seconds since the last call of this during which a call was in flight."""
        now = self.clock()
        seconds = self.busy_s + (now - self.busy_since if self.in_flight else 0.0)
        self.busy_s, self.busy_since = 0.0, now
        return seconds

    def _begin(self, method: str) -> int:
        """Count a call as in flight until `_end` is called with the returned key."""
        if self.in_flight == 0:
            self.busy_since = self._span_began = self.clock()
        self.in_flight += 1
        return self.faults.begin(self.service, self.index, method)

    def _end(self, key: int) -> None:
        self.faults.end(key)
        self.in_flight -= 1
        if self.in_flight == 0:
            now = self.clock()
            self.busy_s += now - self.busy_since
            self._trace("busy", self._span_began, now, False)

    def _end_work(self, key: int, answered: bool) -> None:
        self.answered = self.answered or answered
        self._end(key)

    def _trace(self, name: str, began: float, ended: float, overlapping: bool) -> None:
        if self.faults.on_span is not None:
            self.faults.on_span(f"{self.service}/{self.index}", name, began, ended, overlapping)

    def _error(self, kind: type[ServiceError], method: str, message: str) -> ServiceError:
        return kind(message, service=self.service, replica=self.index, call=method, hint=f"see {self.log}")


class _Parts:
    """File-like list of parts: one large buffer would be copied repeatedly as it grows."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def slices(self) -> Iterator[bytes]:
        """Yield the written data, about _SLICE_BYTES at a time."""
        held, size = list[bytes](), 0
        for part in self._parts:
            held.append(part)
            size += len(part)
            if size >= _SLICE_BYTES:
                yield b"".join(held)
                held, size = [], 0
        yield b"".join(held)


async def _call_one(actor: Any, method: str, args: Sequence[object]) -> Any:
    """Wrap Monarch's future in a coroutine, as asyncio requires."""
    return await getattr(actor, method).call_one(*args)
