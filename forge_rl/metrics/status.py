"""What a display is told of a phase while it lasts: how far the rollouts are, and whether anything moves at all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutStatus:
    """How far the rollouts of a batch are, as of now."""

    batch: int
    """Number of the batch that is waited for."""
    groups_done: int
    groups: int
    """P: groups that the batch needs."""
    episodes_done: int = 0
    episodes: int = 0
    """Episodes that the batch needs; 0 where only groups are counted."""
    episodes_running: int = 0
    """Decode now, of any batch."""
    episodes_waiting: int = 0
    """Wait for a tool, a world or a score, of any batch."""
    queue: int = 0
    """Wait for an engine."""
    engines_serving: int = 0
    engines: int = 0
    lag_max: int = 0
    """Largest lag of a token so far."""

    @property
    def share(self) -> float:
        """Of the batch that is done, from 0 to 1."""
        done, needed = (self.episodes_done, self.episodes) if self.episodes else (self.groups_done, self.groups)
        return done / needed if needed else 0.0

    def parts(self) -> list[tuple[str, str]]:
        """What there is to say beside the batch's number: names and numbers as text."""
        shown = [("episodes", f"{self.episodes_done}/{self.episodes}")] if self.episodes else []
        return [
            *shown,
            ("groups", f"{self.groups_done}/{self.groups}"),
            ("decoding", str(self.episodes_running)),
            ("in tools", str(self.episodes_waiting)),
            ("queued", str(self.queue)),
            ("engines", f"{self.engines_serving}/{self.engines}"),
            ("lag up to", str(self.lag_max)),
        ]

    def __str__(self) -> str:
        return f"batch {self.batch}: " + ", ".join(f"{name} {number}" for name, number in self.parts())


class StallDetector:
    """Since when nothing has changed."""

    def __init__(self) -> None:
        self._mark: Hashable = None
        self._since = 0.0

    def since(self, mark: Hashable, now: float) -> float:
        """When the mark became what it is, as far as was looked."""
        if mark != self._mark:
            self._mark, self._since = mark, now
        return self._since
