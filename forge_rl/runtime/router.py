"""Routing: which replica takes the next request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Load(Protocol):
    """State of a replica that routing looks at."""

    @property
    def index(self) -> int: ...

    @property
    def load(self) -> int: ...

    @property
    def serving(self) -> bool: ...


R = TypeVar("R", bound=Load)


def least_loaded(replicas: Iterable[R]) -> R | None:
    """Return the serving replica with the least load, the lowest index among equals; None if none serves.

    A dead one has no load either, so it is left out before loads are compared.
    """
    serving = (replica for replica in replicas if replica.serving)
    return min(serving, key=lambda replica: (replica.load, replica.index), default=None)
