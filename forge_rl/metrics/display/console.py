"""What a person sees of a run: a live panel on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from forge_rl.errors import ConfigError
from forge_rl.metrics.display import format as fmt
from forge_rl.metrics.display.panel import COLORS, LivePanel
from forge_rl.metrics.display.progress import (
    GAP,
    GRAD,
    LOSS,
    REWARD,
    Event,
    Progress,
    State,
    held_out_scores,
    phases,
)
from forge_rl.metrics.histogram import Histogram
from forge_rl.metrics.phases import PhaseClock
from forge_rl.metrics.recoveries import Recovery, recoveries_table
from forge_rl.metrics.sinks import Level, Metric, RunInfo, Steps
from forge_rl.metrics.status import RolloutStatus, StallDetector

Mode = Literal["auto", "live", "plain", "none"]

PATIENCE_S = 10.0
"""Seconds without progress after which the display says what is waited for."""
SAY_EVERY_S = 30.0
"""Plain mode tells of one phase at most once in so many seconds."""
_LOOK_EVERY_S = 1.0


class Display:
    """Shows a run. One thread calls it; in live mode a thread of rich draws, so times move while the caller waits.

    Args:
        mode: "live", a panel that stays in place; "plain", lines; "none", nothing; "auto", live if stdout is a terminal
            that no prompt shares, and plain otherwise.
        phase_clock: knows the current phase.
        console: where to write; stdout by default.
        clock: monotonic seconds.

    Raises:
        ConfigError: live mode without a terminal.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        phase_clock: PhaseClock,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self._phase_clock = phase_clock
        self._clock = clock
        self._progress = Progress(begun=clock())
        self._quarters: dict[str, int] = {}
        self._stillness = StallDetector()
        self._said = -math.inf
        self._live: Live | None = None
        terminal = self._console.file.isatty() and not self._console.is_dumb_terminal
        if mode == "live" and not terminal:
            raise ConfigError("the live display needs a terminal, and stdout is none", hint='use "auto" or "plain"')
        # A prompt (python -i, IPython) and a panel would overwrite each other.
        prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        automatic: Mode = "live" if terminal and self._utf8 and not prompt else "plain"
        self.mode: Mode = automatic if mode == "auto" else mode

    @property
    def state(self) -> Progress:
        """All that is shown, as of now."""
        # Called by the drawing thread, which therefore changes nothing.
        return replace(self._progress, training=True) if self._phase_clock.used else self._progress

    @property
    def panel(self) -> RenderableType:
        """The live panel, which shows the state at the time it is drawn."""
        return LivePanel(lambda: self.state, self._phase_clock.now, self._clock)

    def start(self, info: RunInfo, history: Steps | None = None) -> None:
        """Show the run's title, and in live mode the panel.

        Args:
            info: what the run is.
            history: what a resumed run has logged before, so that its curves begin at the first step.
        """
        self._progress = replace(self._progress, info=info)
        self.rollback(info.step, history)
        resumed = f"  resumed after step {info.step}" if info.step else ""
        self._line(f"{info.recipe}  {info.model}  {info.folder}  {info.steps} steps{resumed}")
        if self.mode == "live" and self._live is None:
            panel = self.panel
            self._live = Live(get_renderable=lambda: panel, console=self._console, refresh_per_second=4)
            self._live.start(refresh=True)

    def rollback(self, step: int, history: Steps | None = None) -> None:
        """The run goes on from an earlier step; `history` as for `start`."""
        progress = replace(self._progress, rewards=(), held_out={}, last={}, step_seconds=())
        for past, values in history or []:
            progress = progress.logged(past, values)
        self._progress = replace(progress, step=step)

    def startup(self, name: str, state: State, detail: str = "") -> None:
        """A service starts, is ready, or has failed to start."""
        self._progress = self._progress.service(name, state, detail, self._clock())
        row = self._progress.services[name]
        took = (
            ""
            if row.ended is None
            else f" {'in' if state == 'ready' else 'after'} {fmt.duration(row.ended - row.begun)}"
        )
        self._line(f"{name} {state}{took}{f'  {detail}' if detail else ''}")

    def progress(self, name: str, fraction: float) -> None:
        """How far a long job is, from 0 to 1; at 1 it is done."""
        self._progress = self._progress.job(name, fraction)
        quarter = int(fraction * 4)
        if quarter > self._quarters.get(name, -1):
            self._line(f"{name} {quarter * 25}%")
        if fraction >= 1.0:
            self._quarters.pop(name, None)
        else:
            self._quarters[name] = quarter

    def waiting(self, text: str) -> None:
        """What the run waits for, past the time it should take; "" when it waits no more, as does the next `log`."""
        if text and (self._progress.waiting is None or self._progress.waiting[0] != text):
            self._progress = replace(self._progress, waiting=(text, self._clock()))
            self._line(f"waiting for {text}")
        elif not text:
            self._progress = replace(self._progress, waiting=None)

    async def watch(
        self,
        *,
        waiting: Callable[[], str] | None = None,
        status: Callable[[], RolloutStatus | None] | None = None,
    ) -> None:
        """Look once a second, until cancelled; a task of the run's own loop. For the arguments see `look`."""
        try:
            while True:
                self.look(waiting=waiting, status=status)
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self._look_away()

    def look(
        self,
        *,
        waiting: Callable[[], str] | None = None,
        status: Callable[[], RolloutStatus | None] | None = None,
    ) -> None:
        """See how far the phase is; where nothing has moved for 10 s, show what is waited for.

        Plain mode tells it in a line, and of a rollout that lasts how far it is, every 30 s at most.

        Args:
            waiting: what is waited for, such as "generator replica 1, call load for 34 s"; "" if that is not known.
            status: how far the rollouts are; None while there are none.
        """
        now, clock = self._clock(), self._phase_clock
        rollout = status() if status is not None else None
        since = self._stillness.since(self._mark(rollout), now)
        text = waiting() if waiting is not None and now - since >= PATIENCE_S else ""
        stalled = (text, since) if text else None
        self._progress = replace(self._progress, rollout=rollout, stalled=stalled, looked=now)
        if self.mode == "plain" and now - self._said >= SAY_EVERY_S:
            phase, in_phase, _ = clock.now()
            if text:
                where = f"{phase}: " if phase else ""
                self._say(f"{where}waiting for {text}; {fmt.duration(now - since)} without progress", now)
            elif rollout is not None and phase == "rollout" and in_phase >= SAY_EVERY_S:
                self._say(f"rollout: {rollout}", now)

    def log(self, step: int, values: Mapping[str, Metric]) -> None:
        """The values of a step: see `progress.py` for the names that are shown."""
        numbers = {name: value for name, value in values.items() if not isinstance(value, Histogram)}
        self._progress = replace(self._progress, training=True).logged(step, numbers)
        self._line(self._step_line(step, numbers))

    def event(self, text: str, level: Level = "info") -> None:
        """Something that happened; warnings are yellow, faults red."""
        self._progress = self._progress.happened(Event(text=text, level=level, at=self._clock()))
        self._line(text if level == "info" else f"{level}: {text}", style="" if level == "info" else COLORS[level])

    def print(self, text: str) -> None:
        """Print above the panel, as it is."""
        if self.mode != "none":
            self._console.print(Text(self._plain(text)), soft_wrap=True)

    def summary(
        self,
        places: Mapping[str, object] | None = None,
        commands: Mapping[str, str] | None = None,
        faults: Sequence[Recovery] = (),
    ) -> None:
        """End the display and print what came of the run.

        Args:
            places: where things lie: {"run folder": path, "checkpoint": path, ...}.
            commands: what to run to look further: {"see curves": "tensorboard --logdir ...", ...}.
            faults: what failed, and what became of it; a table above the rest.
        """
        self.close()
        if self.mode == "none":
            return
        progress = self._progress
        self._console.print()
        if faults:
            self._console.print(recoveries_table([replace(row, cause=self._plain(row.cause)) for row in faults]))
            self._console.print()
        rows: list[tuple[str, Text]] = []
        for name, evaluated in progress.held_out.items():
            first, last = evaluated[0], evaluated[-1]
            change = (f" ({last - first:+.2f})", "green" if last > first else "")
            scores = (self._plain(f"{first:.2f} → {last:.2f}"), "bold")
            rows.append((f"held-out {name}".strip(), Text.assemble(scores, change)))
        total = f" of {progress.info.steps}" if progress.info is not None else ""
        rows.append(("steps", Text(f"{progress.step}{total}")))
        rows.append(("wall time", Text(fmt.duration(self._clock() - progress.begun))))
        rows.append(("faults", _fault_count(progress.faults, faults)))
        for name, place in {**(places or {}), **(commands or {})}.items():
            rows.append((name, Text(self._plain(str(place)))))
        widest = max(len(name) for name, _ in rows)
        for name, content in rows:
            # No column of a table: a path or a command that we broke into lines could not be copied.
            self._console.print(Text.assemble((f"{name:<{widest}}  ", "dim"), content), soft_wrap=True)

    def close(self) -> None:
        """Stop drawing; the last panel stays on the screen."""
        self._look_away()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _look_away(self) -> None:
        """What is seen only by looking is not known any more."""
        self._progress = replace(self._progress, rollout=None, stalled=None, looked=None)

    def _mark(self, rollout: RolloutStatus | None) -> Hashable:
        """What changes whenever the run gets on."""
        progress = self._progress
        done = (rollout.batch, rollout.groups_done, rollout.episodes_done) if rollout is not None else ()
        services = tuple((name, row.state, row.begun) for name, row in progress.services.items())
        return self._phase_clock.current, self._phase_clock.since, progress.step, services, *progress.jobs.items(), done

    def _say(self, text: str, now: float) -> None:
        self._said = now
        self._line(text)

    def _step_line(self, step: int, values: Mapping[str, float]) -> str:
        steps = self._progress.info.steps if self._progress.info is not None else 0
        parts = [f"step {step:>{len(str(steps))}}/{steps}" if steps else f"step {step}"]
        shown = (("reward", REWARD, 3), ("loss", LOSS, 3), ("gap", GAP, 4), ("grad", GRAD, 2))
        parts += [f"{label} {fmt.number(values[key], digits)}" for label, key, digits in shown if key in values]
        parts += [
            f"{f'held-out {name}'.strip()} {fmt.number(score, 3)}" for name, score in held_out_scores(values).items()
        ]
        for phase, (seconds, rate) in phases(values).items():
            parts.append(f"{phase} {fmt.duration(seconds)}" + ("" if rate is None else f" {fmt.count(rate)} tok/s"))
        eta = self._progress.eta_s()
        if eta and "seconds/step" in values:
            parts.append(f"eta {fmt.countdown(eta)}")
        return "  ".join(parts)

    def _line(self, text: str, style: str = "") -> None:
        if self.mode == "plain":
            self._console.print(Text(self._plain(text), style=style), soft_wrap=True)

    @property
    def _utf8(self) -> bool:
        return self._console.encoding.startswith("utf")

    def _plain(self, text: str) -> str:
        """The text in letters that the console can write."""
        if self._utf8:
            return text
        encoding = self._console.encoding
        return text.replace("→", "->").encode(encoding, "replace").decode(encoding)


def _fault_count(seen: int, faults: Sequence[Recovery]) -> Text:
    """How many there were; red where one was not recovered from."""
    if not faults:
        return Text(str(seen), style="bold red" if seen else "")
    recovered = sum(row.recovered_s is not None for row in faults)
    left = recovered < len(faults)
    return Text(f"{len(faults)}, {recovered} recovered", style="bold red" if left else "green")
