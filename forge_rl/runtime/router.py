"""Which replica takes the next request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forge_rl.errors import ServiceError


class Load(Protocol):
    """What routing looks at."""

    @property
    def index(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def alive(self) -> bool: ...


def least_loaded(service: str, replicas: Sequence[Load]) -> int:
    """Index of the living replica with the fewest requests in flight; the lowest index among equals.

    Raises:
        ServiceError: none is alive. A dead one has no load either, so it is left out before loads are compared.
    """
    living = [replica for replica in replicas if replica.alive]
    if not living:
        raise ServiceError("no replica is alive", service=service, mend="see the replicas' logs in the run folder")
    return min(living, key=lambda replica: (replica.in_flight, replica.index)).index
