"""What a person sees of a run: a live panel on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from forge_rl.errors import ConfigError
from forge_rl.metrics import format as fmt
from forge_rl.metrics.panel import COLORS, LivePanel
from forge_rl.metrics.progress import (
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
from forge_rl.metrics.sinks import Level, RunInfo, Steps
from forge_rl.metrics.timer import PhaseClock

Mode = Literal["auto", "live", "plain", "none"]


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
        self._live: Live | None = None
        terminal = self._console.file.isatty() and not self._console.is_dumb_terminal
        if mode == "live" and not terminal:
            raise ConfigError("the live display needs a terminal, and stdout is none", mend='use "auto" or "plain"')
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
        progress = replace(self._progress, info=info)
        for step, values in history or []:
            progress = progress.logged(step, values)
        self._progress = replace(progress, step=info.step)
        resumed = f"  resumed after step {info.step}" if info.step else ""
        self._line(f"{info.recipe}  {info.model}  {info.folder}  {info.steps} steps{resumed}")
        if self.mode == "live" and self._live is None:
            panel = self.panel
            self._live = Live(get_renderable=lambda: panel, console=self._console, refresh_per_second=4)
            self._live.start(refresh=True)

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

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a step: see `progress.py` for the names that are shown."""
        self._progress = replace(self._progress, training=True).logged(step, values)
        self._line(self._step_line(step, values))

    def event(self, text: str, level: Level = "info") -> None:
        """Something that happened; warnings are yellow, faults red."""
        self._progress = self._progress.happened(Event(text=text, level=level, at=self._clock()))
        self._line(text if level == "info" else f"{level}: {text}", style="" if level == "info" else COLORS[level])

    def print(self, text: str) -> None:
        """Print above the panel, as it is."""
        if self.mode != "none":
            self._console.print(Text(self._plain(text)), soft_wrap=True)

    def summary(self, places: Mapping[str, object] | None = None, commands: Mapping[str, str] | None = None) -> None:
        """End the display and print what came of the run.

        Args:
            places: where things lie: {"run folder": path, "checkpoint": path, ...}.
            commands: what to run to look further: {"see curves": "tensorboard --logdir ...", ...}.
        """
        self.close()
        if self.mode == "none":
            return
        progress = self._progress
        rows: list[tuple[str, Text]] = []
        for name, evaluated in progress.held_out.items():
            first, last = evaluated[0], evaluated[-1]
            change = (f" ({last - first:+.2f})", "green" if last > first else "")
            scores = (self._plain(f"{first:.2f} → {last:.2f}"), "bold")
            rows.append((f"held-out {name}".strip(), Text.assemble(scores, change)))
        total = f" of {progress.info.steps}" if progress.info is not None else ""
        rows.append(("steps", Text(f"{progress.step}{total}")))
        rows.append(("wall time", Text(fmt.duration(self._clock() - progress.begun))))
        rows.append(("faults", Text(str(progress.faults), style="bold red" if progress.faults else "")))
        for name, place in {**(places or {}), **(commands or {})}.items():
            rows.append((name, Text(self._plain(str(place)))))
        widest = max(len(name) for name, _ in rows)
        self._console.print()
        for name, content in rows:
            # No column of a table: a path or a command that we broke into lines could not be copied.
            self._console.print(Text.assemble((f"{name:<{widest}}  ", "dim"), content), soft_wrap=True)

    def close(self) -> None:
        """Stop drawing; the last panel stays on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

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
