"""The summary of a completed run: scores, faults and places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_rl.errors import Fault
from forge_rl.metrics.display.format import duration
from forge_rl.metrics.display.state import RunState
from forge_rl.metrics.status import outcome_of
from forge_rl.system.terminal import visible


def print_summary(
    console: Console, state: RunState, seconds: float, places: Mapping[str, str], faults: Sequence[Fault]
) -> None:
    """Print first and last scores, steps, wall time, faults and places; see Display.summary."""
    console.print()
    if faults:
        console.print(_table(faults))
        console.print()
    rows: list[tuple[str, Text]] = []
    for name, scores in state.held_out.items():
        first, last = scores.first, scores.last
        change = (f" ({last - first:+.2f})", "green" if last > first else "")
        rows.append((f"held-out {name}".strip(), Text.assemble((f"{first:.2f} -> {last:.2f}", "bold"), change)))
    rows.append(("steps", Text(f"{state.step} of {state.info.steps}" if state.info else str(state.step))))
    rows.append(("wall time", Text(duration(seconds))))
    num_recovered = sum(row.recovered_s is not None for row in faults)
    total = f"{len(faults)}, {num_recovered} recovered" if faults else str(state.faults)
    losses = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in state.errors.items())
    total += f"; episodes lost: {losses}" if losses else ""
    has_problem = bool(losses) or (num_recovered < len(faults) if faults else state.faults > 0)
    rows.append(("faults", Text(total, style="bold red" if has_problem else "")))
    rows += [(name, Text(place)) for name, place in places.items()]
    widest = max(len(name) for name, _ in rows)
    for name, content in rows:
        # Lines, not a table: a path or command wrapped in a column could not be copied.
        console.print(Text.assemble((visible(f"{name:<{widest}}  "), "dim"), content), soft_wrap=True)


def _table(faults: Sequence[Fault]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("at", "fault of", "phase", "recovered"):
        table.add_column(name, justify="right" if name in ("at", "recovered") else "left", no_wrap=True)
    table.add_column("cause", overflow="fold")
    for row in sorted(faults, key=lambda row: row.at_s):
        outcome = Text(outcome_of(row), style="green" if row.recovered_s is not None else "bold red")
        table.add_row(duration(row.at_s), Text(visible(row.name)), row.phase, outcome, Text(row.cause.strip()))
    return table
