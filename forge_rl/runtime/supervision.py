"""Policy for restarts of dead replicas: a growing delay if they keep dying, then a rest."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.errors import check_flags

_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Policy for replicas that die.

    Restart(max_restarts=3, backoff_s=2.0)  # at once, after 2 s, after 4 s, then every 5 minutes
    """

    max_restarts: int = 5
    """Most restarts in a row of a replica that keeps dying; then it rests, and without any other the run stops. 0
    restarts never."""
    backoff_s: float = 1.0
    """Wait before the second restart in a row, doubled for each further one up to a minute. The first is at once."""
    pause_s: float = 300.0
    """Rest of a replica that was restarted so often, after which it is tried once more, again and again."""
    healthy_s: float = 60.0
    """Time of service in seconds after which a replica has recovered: its next death counts as the first."""

    def __post_init__(self) -> None:
        check_flags(self, "restart.", least=dict.fromkeys(vars(self), 0))

    def delay_s(self, deaths: int) -> float:
        """Return the wait before a restart after so many deaths in a row."""
        if deaths > self.max_restarts:
            return self.pause_s
        return 0.0 if deaths < 2 else min(_LONGEST_BACKOFF_S, self.backoff_s * 2.0 ** (deaths - 2))
