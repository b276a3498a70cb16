"""Which replica takes the next request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from forge_rl.errors import ServiceError


class Load(Protocol):
    """What routing looks at."""

    @property
    def index(self) -> int: ...

    @property
    def load(self) -> int: ...

    @property
    def serving(self) -> bool: ...


R = TypeVar("R", bound=Load)


def least_loaded(service: str, replicas: Sequence[R]) -> R:
    """The serving replica with the least load; the lowest index among equals.

    Raises:
        ServiceError: none serves. A dead one has no load either, so it is left out before loads are compared.
    """
    serving = [replica for replica in replicas if replica.serving]
    if not serving:
        raise ServiceError("no replica is alive", service=service, hint="see the replicas' logs in the run folder")
    return min(serving, key=lambda replica: (replica.load, replica.index))
