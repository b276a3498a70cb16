"""Faults and recoveries, as a table and as JSON for the summary and as lines for the events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from rich.table import Table
from rich.text import Text

from forge_rl.metrics.display import format as fmt
from forge_rl.metrics.sinks import Level


class Seen(Protocol):
    """What is read of a fault."""

    @property
    def service(self) -> str: ...
    @property
    def replica(self) -> int | None: ...
    @property
    def cause(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def at_s(self) -> float: ...
    @property
    def fatal(self) -> bool: ...
    @property
    def recovered_s(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A fault and what became of it."""

    service: str
    replica: int | None
    """None where the whole service failed."""
    cause: str
    phase: str
    """That the controller was in; "" between phases."""
    at_s: float
    """Seconds since the run began."""
    fatal: bool = False
    """Whether it ended the run."""
    recovered_s: float | None = None
    """Seconds from the fault to full strength; None while the replica does not serve."""

    @classmethod
    def of(cls, fault: Seen, begun_s: float) -> Recovery:
        """From a fault whose time is a reading of a clock, in a run that began at that reading."""
        return cls(
            service=fault.service,
            replica=fault.replica,
            cause=fault.cause,
            phase=fault.phase,
            at_s=round(fault.at_s - begun_s, 3),
            fatal=fault.fatal,
            recovered_s=None if fault.recovered_s is None else round(fault.recovered_s, 3),
        )

    @property
    def name(self) -> str:
        """`generator/1`."""
        return self.service if self.replica is None else f"{self.service}/{self.replica}"

    @property
    def outcome(self) -> str:
        if self.recovered_s is not None:
            return fmt.duration(self.recovered_s)
        return "fatal" if self.fatal else "no"

    @property
    def event(self) -> tuple[str, Level]:
        """A line for the events: of the recovery where there was one, and of the fault otherwise."""
        if self.recovered_s is not None:
            return f"{self.name} has recovered after {self.outcome}", "info"
        return f"{self.name} failed{f' in phase {self.phase}' if self.phase else ''}: {self.cause}", "fault"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def recoveries_table(recoveries: Sequence[Recovery]) -> Table:
    """One row each, in the order of time."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column, justify in (("at", "right"), ("fault of", "left"), ("phase", "left"), ("recovered", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("cause", overflow="fold")
    for row in sorted(recoveries, key=lambda row: row.at_s):
        style = "green" if row.recovered_s is not None else "bold red"
        table.add_row(
            fmt.countdown(row.at_s), row.name, row.phase, Text(row.outcome, style=style), Text(row.cause.strip())
        )
    return table
