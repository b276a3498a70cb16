"""The live panel: draws a run with rich at any width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from forge_rl.metrics.display.curve import Curve
from forge_rl.metrics.display.format import duration, number, sparkline
from forge_rl.metrics.display.state import UPDATE, RunState, phases, reward_of_all_groups
from forge_rl.metrics.phases import PhaseClock
from forge_rl.system.terminal import visible

WIDEST = 100
"""Most columns used; wider bars would show no more."""
_MOST_PARTS = 8
_OF_ALL_SOURCES = ("reward/mean", "reward/max", "reward/min", "reward/std")
BLOCKED_S = 10.0
"""Seconds without a poll of the controller after which the panel reports its event loop as blocked."""


class RunPanel:
    """A renderable of the run's current state; `clock` gives monotonic seconds."""

    def __init__(self, state: RunState, phase_clock: PhaseClock, console: Console, clock: Callable[[], float]) -> None:
        self._state = state
        self._phase_clock = phase_clock
        self._clock = clock
        self._begun = clock()
        self._spinner = Spinner("dots", style="cyan")
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(Column(no_wrap=True)),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column()),
            console=console,
            get_time=clock,
            expand=True,
        )
        self._ids: dict[str, TaskID] = {}

    def show(self, name: str, share: float | None, detail: str = "", *, service: bool = False) -> None:
        """Show a bar: the share done from 0 to 1, or None if unknown. Bars of services vanish once done."""
        detail = visible(detail)
        if name not in self._ids:
            self._ids[name] = self._bars.add_task(visible(name), total=None, detail=detail, service=service)
        total = None if share is None else 1.0
        self._bars.update(self._ids[name], total=total, completed=share or 0.0, detail=detail)

    def remove(self, name: str) -> None:
        """Remove the bar, if there is one."""
        if name in self._ids:
            self._bars.remove_task(self._ids.pop(name))

    def __rich__(self) -> Constrain:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(ratio=1)
        # Once a phase has begun, services that are ready need no bar.
        training = self._phase_clock.used or bool(self._state.last)
        tasks = [task for task in self._bars.tasks if not (training and task.finished and task.fields["service"])]
        for label, content in self._rows(training):
            grid.add_row(label, content)
        info = self._state.info
        title = Text(visible(f"{info.recipe} · {info.model}") if info else "forge_rl", style="bold")
        content = Group(self._bars.make_tasks_table(tasks), grid)
        return Constrain(Panel(content, title=title, title_align="left", border_style="cyan"), WIDEST)

    def _rows(self, training: bool) -> Iterator[tuple[str, RenderableType]]:
        state, current_time = self._state, self._clock()
        name, in_phase, in_step = self._phase_clock.now()
        if state.info is not None:
            yield "folder", Text(str(state.info.folder), style="dim", overflow="fold")
        if training:
            self._spinner.update(text=Text.assemble((name, "bold cyan"), f" {duration(in_phase)}"))
            times = {"elapsed": duration(current_time - self._begun)}
            if (eta := state.eta_s(in_step)) is not None:
                times["eta"] = duration(eta)
            yield "phase", _flow(times, self._spinner if name else Text("none"))
        # Read once each: the controller may set them to None while this thread draws.
        rollout, polled, waiting = state.rollout, state.polled_at, state.waiting
        if state.pause is not None and state.pause.paused:
            text = f"for {duration(state.pause.lasts_s)}; attach to the folder and resume() to continue"
            yield "paused", Text(text, style="bold yellow")
        if rollout is not None:
            yield "rollout", _flow(rollout.parts(), Text(f"batch {rollout.batch}", style="bold"))
        if polled is not None and current_time - polled >= BLOCKED_S:
            # Only the drawing thread notices this; the last known `waiting` may be out of date.
            text = f"the controller, whose event loop has been blocked for {duration(current_time - polled)}"
            yield "waiting", Text(text, style="yellow")
        elif waiting is not None:
            text = f"{visible(waiting[0])}; {duration(current_time - waiting[1])} without progress"
            yield "waiting", Text(text, style="yellow")
        yield from _results(state)
        problems = {"faults": state.faults, "warnings": state.warnings}
        if any(problems.values()):
            yield "problems", _flow({name: str(count) for name, count in problems.items() if count}, style="yellow")


def _results(state: RunState) -> Iterator[tuple[str, RenderableType]]:
    """Curves of reward and held-out scores, and the values of the last step."""
    last = state.last
    rewards = state.rewards  # read once, see above
    if rewards.points:
        ends = f" min {rewards.low:.2f} max {rewards.high:.2f}"
        line = (sparkline(rewards.means, 24), "green")
        ends += f" of all groups {of_all}" if (of_all := reward_of_all_groups(last)) else ""
        yield "reward", Text.assemble((f"{rewards.last:.3f} ", "bold"), line, (ends, "dim"))
    if state.held_out:
        yield "held-out", _flow({name: _score(scores) for name, scores in state.held_out.items()})
    for label, prefix in (("parts", "reward_parts/"), ("sources", "reward/")):
        if mean_rewards := _parts(last, prefix):
            yield label, _flow(mean_rewards)
    if state.sample is not None:
        title, text = map(visible, state.sample)
        yield "answer", Text.assemble((f"{title}: ", "dim"), text, overflow="fold")
    update = {label: number(last[name]) for label, name in UPDATE.items() if name in last}
    for label, pairs in (("update", update), ("took", phases(last)), ("busy", _busy(last))):
        if pairs:
            yield label, _flow(pairs)


def _parts(values: Mapping[str, float], prefix: str) -> dict[str, str]:
    """Format the mean rewards of parts or of sources, the first few of many."""
    mean_rewards = {
        name.removeprefix(prefix): number(value)
        for name, value in values.items()
        if name.startswith(prefix) and name not in _OF_ALL_SOURCES
    }
    first_rewards = dict(list(mean_rewards.items())[:_MOST_PARTS])
    return first_rewards | (
        {"": f"and {len(mean_rewards) - _MOST_PARTS} more"} if len(mean_rewards) > _MOST_PARTS else {}
    )


def _score(scores: Curve) -> str:
    start = f"{scores.first:.2f} → " if len(scores.points) > 1 else ""
    return f"{start}{scores.last:.2f}" + (f" {sparkline(scores.means, 12)}" if len(scores.points) > 2 else "")


def _busy(values: Mapping[str, float]) -> dict[str, str]:
    """Format each service's share of the step spent computing, and of the rollout phase where known."""
    shares: dict[str, dict[str, list[float]]] = {"busy": {}, "busy_rollout": {}}
    for name, share in values.items():
        kind, _, device = name.partition("/")
        if kind in shares:
            shares[kind].setdefault(device.partition("/")[0], []).append(share)
    texts: dict[str, str] = {}
    for service, step in shares["busy"].items():
        details = [f"{min(step):.0%} to {max(step):.0%}"] if len(step) > 1 else []
        if rollout := shares["busy_rollout"].get(service):
            details.append(f"rollout {fmean(rollout):.0%}")
        name = f"{service} x{len(step)}" if len(step) > 1 else service
        texts[name] = f"{fmean(step):.0%}" + (f" ({', '.join(details)})" if details else "")
    return texts


def _flow(pairs: Mapping[str, str], *first: RenderableType, style: str = "") -> Columns:
    """Lay out names and values side by side, wrapping as needed."""
    visible_pairs = [(visible(f"{name} " if name else ""), visible(value)) for name, value in pairs.items()]
    texts = [Text.assemble((name, "dim"), (value, style)) for name, value in visible_pairs]
    return Columns([*first, *texts], padding=(0, 3))
