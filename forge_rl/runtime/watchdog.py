"""Looks for replicas that hang, which no end of a process tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from forge_rl.runtime.replica import Replica

_POLL_S = 0.5
_STOPPED_POLLS = 3
"""Number of looks in a row, over a second, that must see a process stopped."""
_SILENT_POLLS = 60
"""Number of looks, over 30 s, during which a link may leave its poll unanswered. Looks are counted, not seconds: when
this process itself was stopped, nobody is late."""
_MOST_PROCESSES = 64
"""Number of a replica's processes that are looked at."""


async def watch_for_hangs(
    replicas: Sequence[Replica], *, descendants: bool, mark_failed: Callable[[Replica, str], None]
) -> None:
    """Look at the replicas of a service twice a second, until cancelled.

    Args:
        replicas: of the service, as they are at the time.
        descendants: look also at the processes that a replica's own ones started.
        mark_failed: told which replica hangs, and how.
    """
    while True:
        await asyncio.sleep(_POLL_S)
        for replica in list(replicas):
            if replica.alive and (cause := _hang_of(replica, descendants)):
                mark_failed(replica, cause)


def _hang_of(replica: Replica, descendants: bool) -> str:
    """Return how a replica hangs, "" if it does not."""
    most = _MOST_PROCESSES if descendants else len(replica.tree.roots)
    replica.stopped_polls = replica.stopped_polls + 1 if replica.tree.has_stopped(most=most) else 0
    if replica.stopped_polls >= _STOPPED_POLLS:
        return "hung: its process was stopped"
    if replica.link.open:
        replica.link.silent_polls += 1
        if replica.link.silent_polls > _SILENT_POLLS:
            return "hung: its event loop does not answer (what blocks it for long must run in a thread)"
    return ""
