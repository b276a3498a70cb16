"""Restart policy for dead replicas: exponential backoff, then periodic attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import check_flags
from forge_rl.flags.categories import Category

_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Restart policy for dead replicas.

    Restart(max_restarts=3, backoff_s=2.0)  # at once, after 2 s, after 4 s, then every 5 minutes
    """

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    max_restarts: int = 5
    """Maximum consecutive restarts of a replica that keeps dying; then it pauses, and if no other replica is left the
    run stops. 0 disables restarts."""
    backoff_s: float = 1.0
    """Seconds before the second consecutive restart, doubled for each further one up to a minute. The first is
    immediate."""
    pause_s: float = 300.0
    """Seconds between further restart attempts once max_restarts is reached."""
    healthy_s: float = 60.0
    """Seconds of service after which a replica counts as recovered: its next death counts as the first."""

    def __post_init__(self) -> None:
        check_flags(self, "restart.", minimum=dict.fromkeys(vars(self), 0))

    def delay_s(self, deaths: int) -> float:
        """Return the delay before a restart after this many consecutive deaths."""
        if deaths > self.max_restarts:
            return self.pause_s
        return 0.0 if deaths < 2 else min(_LONGEST_BACKOFF_S, self.backoff_s * 2.0 ** (deaths - 2))
