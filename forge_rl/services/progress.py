"""Tracks whether busy engines make progress, by the chunks that they send."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from forge_rl.runtime.replica import Replica

_SILENT_S = 30.0
"""Time without a chunk after which a busy engine counts as unresponsive."""


class Progress:
    """Records each engine's last chunk: `progress.note(replica)`, `progress.goes_on(replica)`."""

    def __init__(self) -> None:
        self._last_s: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()

    def note(self, replica: Replica) -> None:
        """Record that an engine sent a chunk."""
        self._last_s[replica] = replica.clock()

    def goes_on(self, replica: Replica) -> bool:
        """Return whether an engine is idle or sent a chunk recently."""
        last_s = max(self._last_s.get(replica, 0.0), replica.busy_since)
        return not replica.in_flight or replica.clock() - last_s < _SILENT_S
