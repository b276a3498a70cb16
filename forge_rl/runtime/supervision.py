"""Restart policy for dead replicas: exponential backoff, then periodic attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import check_flags
from forge_rl.flags.categories import Category

BACKOFF_S = 1.0
"""Seconds before the second consecutive restart, doubled for each further one; the first is immediate. Most causes of
deaths are momentary: gone at once, or within seconds."""
LONGEST_BACKOFF_S = 60.0
PAUSE_S = 300.0
"""Seconds between further attempts once no restart is left. A start may load a model for minutes, and takes CPU time
from the replicas that still work."""
HEALTHY_S = 60.0
"""Seconds of service after which a replica counts as recovered; a faulty start kills it sooner."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Restart policy for dead replicas.

    Restart(max_restarts=3)  # at once, after 1 s, after 2 s, then every 5 minutes
    """

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    max_restarts: int = 5
    """Maximum consecutive restarts of a replica that keeps dying; then it pauses, and if no other replica is left the
    run stops. 0 disables restarts."""

    def __post_init__(self) -> None:
        check_flags(self, "restart.", minimum={"max_restarts": 0})

    def delay_s(self, deaths: int) -> float:
        """Return the delay before a restart after this many consecutive deaths."""
        if deaths > self.max_restarts:
            return PAUSE_S
        return 0.0 if deaths < 2 else min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** (deaths - 2))

    def recovered(self, served_s: float) -> bool:
        """Return whether a replica that served this long has recovered, so that its next death counts as the first."""
        return served_s >= HEALTHY_S
