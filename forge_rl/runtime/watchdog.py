"""Notices replicas that hang, which no end of a process tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from forge_rl.runtime.processes import family_of
from forge_rl.runtime.replica import Replica

_POLL_S = 0.5
_STOPPED_POLLS = 3
"""So often in a row a process must be seen stopped, over a second."""
_SILENT_POLLS = 60
"""So many polls a link may leave unanswered, over 30 s. Polls are counted, not seconds: when this process itself was
stopped, nobody is late."""
_MOST_PROCESSES = 64
"""Of one replica that are looked at."""


class Watchdog:
    """Looks at the replicas of a service twice a second.

    Args:
        replicas: of the service, as they are at the time.
        descendants: also look at the processes that a replica's own ones started.
        mark_failed: told which replica hangs, and how.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, descendants: bool, mark_failed: Callable[[Replica, str], None]
    ) -> None:
        self._replicas = replicas
        self._descendants = descendants
        self._condemn = mark_failed

    async def run(self) -> None:
        """Look until it is cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            for replica in list(self._replicas):
                if replica.alive and (cause := self._look(replica)):
                    self._condemn(replica, cause)

    def _look(self, replica: Replica) -> str:
        """Why a replica is to be condemned; "" if it is not."""
        most = _MOST_PROCESSES if self._descendants else len(replica.roots)
        family = family_of(replica.roots, most=most)
        replica.family = {pid: start for pid, (_, start) in family.items()}
        stopped = any(state in "Tt" for state, _ in family.values())
        replica.stopped_polls = replica.stopped_polls + 1 if stopped else 0
        if replica.stopped_polls >= _STOPPED_POLLS:
            return "hung: its process was stopped"
        if replica.link.open:
            replica.link.silent_polls += 1
            if replica.link.silent_polls > _SILENT_POLLS:
                return "hung: its event loop does not answer (what blocks it for long must run in a thread)"
        return ""
