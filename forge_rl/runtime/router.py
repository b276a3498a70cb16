"""Routing: which replica takes the next request."""

from __future__ import annotations

from collections.abc import Iterable

from forge_rl.runtime.replica import Replica


def least_loaded(replicas: Iterable[Replica]) -> Replica | None:
    """Return the serving replica with the least load, the lowest index among equals; None if none serves.

    A dead one has no load either, so it is left out before loads are compared.
    """
    serving = (replica for replica in replicas if replica.serving)
    return min(serving, key=lambda replica: (replica.load, replica.index), default=None)
