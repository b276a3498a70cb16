"""List runs with their step, score and state.

forge-rl runs
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_rl.errors import ConfigError
from forge_rl.look.past_runs import PastRun, list_runs
from forge_rl.metrics.display.format import number
from forge_rl.run.launch import launch
from forge_rl.system.terminal import clipped

_STYLES = {"running": "green", "finished": "", "stopped": "yellow", "failed": "red", "unknown": "", "unreadable": "dim"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """List the runs in a folder, the latest last."""

    place: tyro.conf.Positional[Path] = Path("runs")
    """Folder of run folders."""


async def main(config: Config) -> None:
    """List the runs."""
    await asyncio.to_thread(show, config, Console(highlight=False))


def show(config: Config, console: Console) -> None:
    """Read the folders and print; see `Config`.

    Raises:
        ConfigError: there are none.
    """
    runs = list_runs(config.place)
    if not runs:
        raise ConfigError(f"{config.place} has no runs", hint="name the folder of your runs")
    table = Table(box=None, header_style="bold")
    for column in ("run", "state", "step", "reward", "score before", "score", "best at", "last step", "model"):
        table.add_column(column, justify="left" if column in ("run", "state", "model") else "right")
    for run in runs:
        table.add_row(*_row(run))
    console.print(table)


def _row(run: PastRun) -> list[Text]:
    scores = [run.reward, run.score_before, run.score_after]
    ago = _ago(time.time() - run.changed_s) if run.changed_s else ""
    return [
        Text(clipped(run.folder.name, lines=1, width=40), no_wrap=True),
        Text(run.state, _STYLES[run.state]),
        Text(f"{run.step} of {run.steps}" if run.steps is not None else str(run.step) * (run.state != "unreadable")),
        *(Text("" if value is None else number(value)) for value in scores),
        Text("" if run.best_step is None else f"step {run.best_step}"),
        Text(ago),
        Text(clipped(run.model, lines=1, width=40), no_wrap=True),
    ]


def _ago(seconds: float) -> str:
    """Say how long ago something was, in its largest whole unit: `42 min ago`."""
    units = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")]
    size, unit = next((pair for pair in units if seconds >= pair[0]), units[-1])
    return f"{max(0.0, seconds) // size:.0f} {unit} ago"


if __name__ == "__main__":
    launch(Config, main, shows_only=True)
