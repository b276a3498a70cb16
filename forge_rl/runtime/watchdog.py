"""Calls to all ranks of one replica: finds the ranks that hang, and the errors that only a restart repairs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.system.tasks import task_group

_SLACK = 20.0
"""Factor over the slowest call of its kind after which a call's ranks count as hung."""
_LEAST_DEADLINE_S = 300.0
NOTICE_S = 3.0
"""Maximum delay until the death of a rank is noticed, after another rank failed because of it."""


class Watchdog:
    """Learns how long calls take, and has a replica restarted if a call hangs or raises an error that this may fix.

    results = await watchdog.work(replica, "step", request, parcel=rows_of_rank, work=tokens)

    Args:
        service: owner of the replica.
        deadline_s: maximum seconds of a call.
        flag: flag that sets it.
    """

    def __init__(self, service: Service, deadline_s: float, flag: str) -> None:
        self._service = service
        self._deadline_s = deadline_s
        self._flag = flag
        self._slowest: dict[str, float] = {}
        """Maximum seconds per unit of work so far, by method."""
        self._raised: tuple[object, str] | None = None
        """Progress and the call with its error, when a rank last raised."""

    async def work(
        self,
        replica: Replica,
        method: str,
        *args: object,
        parcel: Callable[[int], object] | None = None,
        work: int = 1,
        progress: object = None,
    ) -> list[Any]:
        """Call a method on all ranks.

        A ForgeError is for the user to fix. Other errors may come from a device or a collective, which a restart can
        repair; but one that recurs without progress is a bug that every restart would hit.

        Args:
            parcel: returns the data to send to a rank first, for its `take_parcel`.
            work: units of work that the call's time scales with, such as tokens.
            progress: changes from call to call as long as the ranks get anywhere.

        Raises:
            ReplicaError: as `call`; the ranks hang, as they take far longer than any such call before; or an error
                that a restart may repair.
            ForgeError: another error of a rank; others may still be busy.
        """
        deadline_s = self._deadline_s
        if method in self._slowest:
            expected_s = self._slowest[method] * max(1, work)
            deadline_s = min(deadline_s, max(_LEAST_DEADLINE_S, _SLACK * expected_s))
        began = replica.clock()
        try:
            # Large arguments are sent first, so that the call itself is a small message.
            if parcel is not None:
                async with task_group() as sending:
                    for rank in range(replica.ranks):
                        sending.create_task(
                            replica.send(parcel(rank), for_call=method, deadline_s=deadline_s, rank=rank)
                        )
            results = await self.call(replica, method, lambda _: args, deadline_s)
        except DeadlineError as error:
            hint = f"see {replica.log}; raise {self._flag} if the work really takes longer"
            raise self._failed(replica, method, f"hung: {error.message}", hint) from error
        except ReplicaError:
            raise
        except ForgeError as error:
            # PIDs, addresses and the like differ between two occurrences of one error.
            raised = progress, re.sub(r"\d+", "#", f"{method}: {error.message}")
            # Exactly ServiceError: it wraps other libraries' exceptions, whereas its subclasses are forge_rl's own.
            is_foreign, is_repeated = type(error) is ServiceError, self._raised == raised
            self._raised = raised if is_foreign else None
            if is_foreign and not is_repeated:
                raise self._failed(replica, method, f"call {method} failed: {error.message}") from error
            raise
        if work:
            seconds = (replica.clock() - began) / work
            self._slowest[method] = max(seconds, self._slowest.get(method, 0.0))
        return results

    async def call(
        self, replica: Replica, method: str, args_of_rank: Callable[[int], Sequence[object]], deadline_s: float
    ) -> list[Any]:
        """Call a method on all ranks, with each rank's own arguments.

        Raises:
            ReplicaError: a rank died or hung, even if another rank reported it first, through a failed collective.
        """
        try:
            return await replica.call_ranks(method, args_of_rank, deadline_s=deadline_s)
        except (ReplicaError, DeadlineError):
            raise
        except ForgeError as error:
            if replica.ranks > 1:
                # The rank that died may be noticed only after the ranks whose collective failed because of it.
                await asyncio.wait((replica.death,), timeout=NOTICE_S)
            if not replica.death.done():
                raise
            raise self._error(replica, method, replica.death.result()) from error

    def _failed(self, replica: Replica, method: str, cause: str, hint: str = "") -> ReplicaError:
        """Mark the replica as dead, and return the error to raise."""
        self._service.mark_failed(replica, cause)
        return self._error(replica, method, cause, hint)

    def _error(self, replica: Replica, method: str, cause: str, hint: str = "") -> ReplicaError:
        return ReplicaError(
            cause, service=self._service.name, replica=replica.index, call=method, hint=hint or f"see {replica.log}"
        )
