"""Calls of replicas, with deadlines and named errors: directly, or over the replica's link."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime.faults import Faults, cause_of
from forge_rl.runtime.replica import Replica


class ReplicaCaller(ABC):
    """Calls the replicas of a service, and counts what is in flight.

    Args:
        name: of the service, in errors.
        faults: where calls in flight are noted.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, faults: Faults, clock: Callable[[], float]) -> None:
        self.name = name
        self.replicas: list[Replica] = []
        """By index: the last incarnation of each."""
        self._faults = faults
        self._clock = clock

    async def call(
        self, replica: Replica, method: str, *args: object, deadline_s: float, rank: int | None = None
    ) -> Any:
        """Call an endpoint of one process of a replica: its only one, or the given rank. For control: `ask` is cheaper.

        Raises:
            ForgeError: what the actor raised, if it was one.
            DeadlineError: no answer in time.
            ReplicaError: the replica died or hung.
            ServiceError: the actor raised something else; see the replica's log.
        """
        actor = replica.actor if rank is None else replica.actor.slice(ranks=rank)
        if replica.death.done():
            raise self._error(ReplicaError, replica, method, replica.death.result())
        try:
            with self._in_flight(replica, method), self._drawn(replica, method, rank):
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

    async def ask(self, replica: Replica, method: str, *args: object, deadline_s: float) -> Any:
        """Await a method of a replica, over its link; of rank 0, if it has several.

        If this is cancelled, so is the method.

        Raises:
            ForgeError, DeadlineError, ReplicaError, ServiceError: as `call`.
        """
        key = self._begin(replica, method)  # no `with`: that costs as much as all else here
        try:
            return await replica.link.ask(method, args, deadline_s)
        finally:
            self._end(replica, key)

    async def stream(
        self, replica: Replica, method: str, *args: object, deadline_s: float
    ) -> AsyncGenerator[Any, None]:
        """Iterate over an async generator of a replica, over its link. What came before an error is yielded first.

        `aclose` it when you leave early: that ends the generator in the replica, which does not wait for its consumer.

        Args:
            replica: which one; its rank 0, if it has several.
            method: of its actor.
            args: of the method.
            deadline_s: for each item, counted from the one before it, or from when the first is asked for.

        Raises:
            ForgeError, DeadlineError, ReplicaError, ServiceError: as `call`.
        """
        with self._in_flight(replica, method):
            async with contextlib.aclosing(replica.link.stream(method, args, deadline_s)) as items:
                async for item in items:
                    yield item

    def take_busy_s(self) -> list[float]:
        """Seconds in which each replica had a call in flight, since this was last asked."""
        now = self._clock()
        result = []
        for replica in self.replicas:
            running = now - replica.busy_since if replica.in_flight else 0.0
            result.append(replica.busy_s + running)
            replica.busy_s, replica.busy_since = 0.0, now
        return result

    @abstractmethod
    def _on_death(self, replica: Replica, cause: str) -> None:
        """Told of a death that a call met."""

    @contextlib.contextmanager
    def _in_flight(self, replica: Replica, method: str) -> Iterator[None]:
        key = self._begin(replica, method)
        try:
            yield
        finally:
            self._end(replica, key)

    def _begin(self, replica: Replica, method: str) -> int:
        """A call is in flight until `_end` is given what this returns."""
        if replica.in_flight == 0:
            replica.busy_since = replica.began = self._clock()
        replica.in_flight += 1
        return self._faults.begin(self.name, replica.index, method)

    def _end(self, replica: Replica, key: int) -> None:
        self._faults.end(key)
        replica.in_flight -= 1
        if replica.in_flight == 0:
            now = self._clock()
            replica.busy_s += now - replica.busy_since
            self._span(replica, "busy", replica.began, now, False)

    @contextlib.contextmanager
    def _drawn(self, replica: Replica, method: str, rank: int | None) -> Iterator[None]:
        """Tell of a call when it is over; of those to all ranks side by side, of the first."""
        began = self._clock()
        try:
            yield
        finally:
            if not rank:
                self._span(replica, method, began, self._clock(), True)

    def _span(self, replica: Replica, name: str, began: float, ended: float, overlapping: bool) -> None:
        if self._faults.on_span is not None:
            self._faults.on_span(f"{self.name}/{replica.index}", name, began, ended, overlapping)

    def _translate(self, error: Exception, replica: Replica, method: str) -> ForgeError:
        """What an exception of Monarch's means to the caller."""
        if isinstance(error, SupervisionError):
            cause = cause_of(str(error))
            self._on_death(replica, cause)
            return self._error(ReplicaError, replica, method, cause)
        remote = getattr(error, "exception", error)
        if isinstance(remote, ForgeError):
            return remote
        return self._error(ServiceError, replica, method, f"{type(remote).__name__}: {remote}")

    def _error(self, kind: type[ServiceError], replica: Replica, method: str, message: str) -> ServiceError:
        return kind(message, service=self.name, replica=replica.index, call=method, hint=f"see {replica.log}")


async def _await(future: Any) -> Any:
    """Monarch's futures are awaitable, but asyncio.wait wants a task."""
    return await future
