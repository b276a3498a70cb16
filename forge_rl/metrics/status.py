"""Status of a live run: progress of its rollouts, and its faults."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.errors import Fault
from forge_rl.metrics.display.format import duration
from forge_rl.metrics.sinks import Level


@dataclass(frozen=True, kw_only=True)
class RolloutStatus:
    """Current progress of a batch's rollouts."""

    batch: int
    """Number of the pending batch."""
    groups_done: int
    groups: int
    """P: groups that the batch needs."""
    episodes_running: int = 0
    """Episodes of any batch that are decoding."""
    episodes_waiting: int = 0
    """Episodes of any batch waiting for a tool, an environment or a score."""
    queue: int = 0
    """Episodes waiting for an engine."""
    engines_serving: int = 0
    engines: int = 0
    """Engines of the run; 0 if nothing decodes."""
    lag_max: int = 0
    """Largest lag of a token so far."""
    evaluated: int = 0
    """Completed episodes of the current evaluation."""
    to_evaluate: int = 0
    """Episodes of the current evaluation, or of the last one."""

    @property
    def share(self) -> float:
        """Share of the batch's groups that are complete, from 0 to 1."""
        return self.groups_done / self.groups if self.groups else 0.0

    def parts(self) -> dict[str, str]:
        """Return the figures other than the batch's number, formatted, by label."""
        if not self.engines:
            return {"groups": f"{self.groups_done}/{self.groups}"}
        return {
            "groups": f"{self.groups_done}/{self.groups}",
            "decoding": str(self.episodes_running),
            "in tools": str(self.episodes_waiting),
            "queued": str(self.queue),
            "engines": f"{self.engines_serving}/{self.engines}",
            "lag up to": str(self.lag_max),
            **({"evaluated": f"{self.evaluated}/{self.to_evaluate}"} if self.evaluated < self.to_evaluate else {}),
        }

    def __str__(self) -> str:
        return f"batch {self.batch}: " + ", ".join(f"{name} {number}" for name, number in self.parts().items())


def outcome_of(fault: Fault) -> str:
    """Return the formatted duration of the recovery, "fatal", or "no"."""
    if fault.recovered_s is not None:
        return duration(fault.recovered_s)
    return "fatal" if fault.fatal else "no"


def event_of(fault: Fault) -> tuple[str, Level]:
    """Return text and level for the event log: the recovery if there was one, otherwise the fault."""
    if fault.recovered_s is not None:
        return f"{fault.name} has recovered after {outcome_of(fault)}", "info"
    return f"{fault.name} failed{f' in phase {fault.phase}' if fault.phase else ''}: {fault.cause}", "fault"
