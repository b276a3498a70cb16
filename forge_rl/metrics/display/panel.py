"""The live panel: draws a Progress at any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forge_rl.metrics.display import format as fmt
from forge_rl.metrics.display.progress import GAP, GRAD, LOSS, Progress, Startup, busy, phases
from forge_rl.metrics.status import RolloutStatus

WIDEST = 100
"""Columns: beyond this, bars stretch and say no more."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
COLORS = {"info": "dim", "warning": "yellow", "fault": "bold red"}
DEVICES_SHOWN = 4
"""Devices of one service that are shown each; more are shown as their mean and range."""
DEAF_S = 10.0
"""Seconds that the controller may go without a look at itself before the panel says so."""


class LivePanel:
    """A renderable that asks for the present state each time it is drawn.

    Args:
        progress: gives the state.
        phase: gives the current phase or "", seconds in it, and seconds since the step began.
        clock: the clock of the state's times.
    """

    def __init__(
        self,
        progress: Callable[[], Progress],
        phase: Callable[[], tuple[str, float, float]],
        clock: Callable[[], float],
    ) -> None:
        self._progress = progress
        self._phase = phase
        self._clock = clock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress, now = self._progress(), self._clock()
        width = min(options.max_width, WIDEST)
        rows = list(_rows(progress, self._phase(), now))
        # Events get the lines that are left: what does not fit on the screen is cut by rich at the bottom.
        used = len(console.render_lines(_grid(rows), options.update(width=width - 4)))
        rows += _events(progress, options.size.height - used - 4)
        title, folder = _titles(progress, width - 8)
        yield Panel(
            _grid(rows),
            title=title,
            title_align="left",
            subtitle=folder,
            subtitle_align="right",
            border_style="cyan",
            width=width,
        )


def _titles(progress: Progress, width: int) -> tuple[Text, Text]:
    if progress.info is None:
        return Text("forge_rl"), Text()
    named = f"{progress.info.recipe} · {progress.info.model}"
    return (
        Text(fmt.keep_start(named, width), style="bold"),
        Text(fmt.keep_end(str(progress.info.folder), width), style="dim"),
    )


def _grid(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for label, content in rows:
        table.add_row(label, content)
    return table


def _rows(progress: Progress, phase: tuple[str, float, float], now: float) -> Iterator[tuple[str, RenderableType]]:
    name, in_phase, in_step = phase
    spin = SPINNER[int(now * 8) % len(SPINNER)]
    yield from _services(progress, now, spin)
    for job, done in progress.jobs.items():
        yield "load", _Line(Text(f"{job} "), partial(bar, done), Text(f" {fmt.percent(done)}"))
    if progress.training and progress.info is not None:
        yield "step", _steps(progress, in_step)
        current = Text.assemble((f"{spin} {name} ", "bold cyan"), fmt.duration(in_phase)) if name else Text("none")
        yield "phase", _Flow([current, _pair("elapsed", fmt.countdown(now - progress.begun))])
    if progress.rollout is not None:
        yield "rollout", _rollout(progress.rollout)
    for text in _waits(progress, now):
        yield "waiting", Text(text, style="yellow")
    if progress.rewards:
        yield "reward", _Rewards(progress.rewards)
    if progress.held_out:
        yield "held-out", _Flow([_score(*item) for item in progress.held_out.items()])
    last = progress.last
    shown = (("loss", LOSS, 3), ("gap", GAP, 4), ("grad", GRAD, 2))
    update = [_pair(label, fmt.number(last[key], decimals)) for label, key, decimals in shown if key in last]
    if update:
        yield "update", _Flow(update)
    if spent := phases(last):
        yield "took", _Flow([_spent(phase, *item) for phase, item in spent.items()])
    if shares := busy(last):
        rolling = busy(last, "rollout")
        chips = [chip for name, devices in shares.items() for chip in _busy(name, devices, rolling.get(name, {}))]
        yield "busy", _Flow(chips)


def _services(progress: Progress, now: float, spin: str) -> Iterator[tuple[str, RenderableType]]:
    marks = {
        "starting": Text(spin, style="cyan"),
        "ready": Text("✓", style="green"),
        "failed": Text("✗", style="bold red"),
    }
    names = [name for name, row in progress.services.items() if not (progress.training and row.state == "ready")]
    for i, name in enumerate(names):
        row: Startup = progress.services[name]
        took = fmt.duration((now if row.ended is None else row.ended) - row.begun)
        line = Text.assemble(marks[row.state], " ", (name, "bold"), f" {took}")
        if row.detail:
            line.append(f"  {row.detail}", style="red" if row.state == "failed" else "dim")
        yield "services" if i == 0 else "", line


def _waits(progress: Progress, now: float) -> Iterator[str]:
    """What is waited for, and for how long."""
    if progress.waiting is not None:
        text, since = progress.waiting
        yield f"{text}, {fmt.duration(now - since)} so far"
    if progress.looked is not None and now - progress.looked >= DEAF_S:
        # Only the drawing thread can tell; what was waited for before may be over.
        yield f"the controller, whose event loop has been blocked for {fmt.duration(now - progress.looked)}"
    elif progress.stalled is not None:
        text, since = progress.stalled
        yield f"{text}; {fmt.duration(now - since)} without progress"


def _rollout(status: RolloutStatus) -> RenderableType:
    weak = status.engines_serving < status.engines
    start = Text.assemble((f"batch {status.batch} ", "bold"), bar(status.share, 16))
    pairs = [
        Text.assemble((f"{name} ", "dim"), (number, "yellow" if weak and name == "engines" else ""))
        for name, number in status.parts()
    ]
    return _Flow([start, *pairs])


def _steps(progress: Progress, in_step: float) -> RenderableType:
    assert progress.info is not None
    total = max(progress.info.steps, 1)
    share = min(progress.step / total, 1.0)
    eta = progress.eta_s(in_step)
    left = "" if eta is None else f"  eta {fmt.countdown(eta)}"
    return _Line(
        Text(f"{progress.step}/{progress.info.steps} ", style="bold"),
        partial(bar, share),
        Text(f" {fmt.percent(share)}{left}"),
    )


class _Rewards:
    """The curve of mean reward beside its numbers, or below them where there is little room."""

    def __init__(self, rewards: Sequence[float]) -> None:
        self._rewards = rewards

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rewards = self._rewards
        finite = [reward for reward in rewards if math.isfinite(reward)] or [math.nan]
        now = Text(f"{fmt.number(rewards[-1], 3)} ", style="bold")
        ends = Text(f" min {fmt.number(min(finite), 2)} max {fmt.number(max(finite), 2)}", style="dim")
        room = options.max_width - now.cell_len - ends.cell_len
        if room >= min(len(rewards), 20):
            yield Text.assemble(now, (fmt.sparkline(rewards, room), "green"), ends, no_wrap=True)
        else:
            yield Text.assemble(now, ends, no_wrap=True, overflow="ellipsis")
            yield Text(fmt.sparkline(rewards, options.max_width), style="green", no_wrap=True)


def _score(name: str, scores: tuple[float, ...]) -> Text:
    line = Text(f"{name} " if name else "")
    if len(scores) > 1:
        line.append(f"{scores[0]:.2f} → ", style="dim")
    line.append(f"{scores[-1]:.2f}", style="bold green" if scores[-1] > scores[0] else "bold")
    return line.append(f" {fmt.sparkline(scores, 12)}" if len(scores) > 2 else "", style="green")


def _pair(label: str, value: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), value)


def _spent(phase: str, seconds: float, tokens_per_s: float | None) -> Text:
    line = _pair(phase, fmt.duration(seconds))
    return line if tokens_per_s is None else line.append(f" {fmt.count(tokens_per_s)} tok/s", style="cyan")


def _busy(service: str, devices: dict[str, float], rolling: dict[str, float]) -> Iterator[Text]:
    """The share of the step, and of the rollout phase where that is known."""
    if len(devices) <= DEVICES_SHOWN:
        for device, share in devices.items():
            yield _share(device, share, f"rollout {fmt.percent(rolling[device])}" if device in rolling else "")
        return
    mean = sum(devices.values()) / len(devices)
    spread = f"{fmt.percent(min(devices.values()))} to {fmt.percent(max(devices.values()))}"
    inside = f", rollout {fmt.percent(sum(rolling.values()) / len(rolling))}" if rolling else ""
    yield _share(f"{service} x{len(devices)}", mean, spread + inside)


def _share(name: str, share: float, more: str) -> Text:
    return Text.assemble(f"{name} ", bar(share, 8), f" {fmt.percent(share)}", (f" ({more})" if more else "", "dim"))


def _events(progress: Progress, room: int) -> Iterator[tuple[str, RenderableType]]:
    """The newest events, in about that many lines, but one event at least."""
    lines = 2 if room >= 4 else 1
    newest = progress.events[-min(max(room // lines, 1), 5) :]
    for i, event in enumerate(newest):
        text = event.text.partition("\n")[0]
        at = fmt.countdown(event.at - progress.begun)
        yield "events" if i == 0 else "", _Cut(Text.assemble((f"{at} ", "dim"), (text, COLORS[event.level])), lines)
    if progress.warnings or progress.faults:
        counts = [
            Text(f"{count} {word}{'s' * (count != 1)}", style=COLORS[word])
            for word, count in (("fault", progress.faults), ("warning", progress.warnings))
            if count
        ]
        yield "", _Flow(counts)


def bar(share: float, width: int) -> Text:
    """A bar that also reads without color."""
    done = round(min(max(share, 0.0), 1.0) * width) if math.isfinite(share) else 0
    return Text.assemble(("━" * done, "cyan"), ("─" * (width - done), "dim"))


class _Line:
    """One line: a start and an end, with something between them that takes the room left."""

    def __init__(self, start: Text, middle: Callable[[int], Text], end: Text) -> None:
        self._start, self._middle, self._end = start, middle, end

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - self._start.cell_len - self._end.cell_len
        yield Text.assemble(self._start, self._middle(max(room, 0)), self._end, no_wrap=True, overflow="ellipsis")


class _Flow:
    """Pieces side by side, broken into lines between pieces and never within one that fits."""

    def __init__(self, pieces: Sequence[Text]) -> None:
        self._pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for piece in self._pieces:
            if line and line.cell_len + 3 + piece.cell_len > options.max_width:
                yield line
                line = Text()
            line.append_text(Text.assemble("   " if line else "", piece))
        yield line


class _Cut:
    """Text of a few lines at most; what is beyond them is cut."""

    def __init__(self, text: Text, lines: int) -> None:
        self._text, self._lines = text, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrapped = self._text.wrap(console, options.max_width)
        if len(wrapped) > self._lines:
            last = wrapped[self._lines - 1]
            last.truncate(max(options.max_width - 1, 1))
            last.append("…")
        yield from wrapped[: self._lines]
