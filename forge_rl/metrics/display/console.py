"""The display of a run: a live panel on a terminal, otherwise a line for each step."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Literal, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from forge_rl.errors import ConfigError, Fault
from forge_rl.metrics.display.format import duration, number
from forge_rl.metrics.display.output import Output
from forge_rl.metrics.display.panel import RunPanel
from forge_rl.metrics.display.state import (
    REWARD,
    UPDATE,
    Pause,
    RunState,
    held_out_scores,
    phases,
    reward_of_all_groups,
)
from forge_rl.metrics.display.summary import print_summary
from forge_rl.metrics.phases import PhaseClock
from forge_rl.metrics.sinks import Level, Metric, RunInfo, Sink, Steps
from forge_rl.metrics.status import RolloutStatus
from forge_rl.metrics.values import Histogram
from forge_rl.system.terminal import visible
from forge_rl.types import Batch

Mode = Literal["auto", "live", "plain", "none"]

PATIENCE_S = 10.0
"""Seconds without progress after which the display names the pending call."""
PLAIN_PATIENCE_S = 60.0
"""Seconds without progress after which plain mode prints a line, or twice the longest time of the phase so far if that
is more, to stay silent about normal waits."""
REPORT_EVERY_S = 30.0
"""Least seconds between two reports in plain mode."""
_POLL_EVERY_S = 1.0


class Display(Sink):
    """Shows a run. Call it from one thread; in live mode a thread of rich draws, so times advance meanwhile.

    Example:
        display = Display(phase_clock=PhaseClock())
        display.start(RunInfo(recipe="grpo", model="tiny", folder=Path("runs/a"), steps=20))
        display.log(1, {"reward/mean": 0.4, "seconds/step": 9.5})
        display.summary({"run folder": "runs/a"})

    Args:
        mode: "live", a panel that stays in place below the events; "plain", lines; "none", nothing; "auto", live if
            stdout is a terminal that no prompt shares, and plain otherwise.
        console: where to write; stdout by default.

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
        self._output = Output(sys.stdout)
        self._console = console if console is not None else Console(highlight=False, file=cast(IO[str], self._output))
        self._phase_clock = phase_clock
        self._clock = clock
        self._begun = clock()
        self._state = RunState()
        self.panel = RunPanel(self._state, phase_clock, self._console, clock)
        """The live panel."""
        self._starting: dict[str, float] = {}
        self._quarters: dict[str, int] = {}
        self._longest: dict[str, float] = {}
        """Longest time of each phase in a step so far, in seconds."""
        self._changes = 0
        self._moved: tuple[object, float] = (None, self._begun)  # state of the run, and the time it last changed
        self._reported_at = -math.inf
        self._live: Live | None = None
        terminal = self._console.file.isatty() and not self._console.is_dumb_terminal
        if mode == "live" and not terminal:
            raise ConfigError("the live display needs a terminal, and stdout is none", hint='use "auto" or "plain"')
        # A prompt (python -i, IPython) and a panel would overwrite each other.
        prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        utf8 = self._console.encoding.startswith("utf")
        automatic: Mode = "live" if terminal and utf8 and not prompt else "plain"
        self.mode: Mode = automatic if mode == "auto" else mode

    def start(self, info: RunInfo, history: Steps = ()) -> None:
        """Show the run's title and, in live mode, the panel; `history` extends a resumed run's curves to step 0."""
        self._state.info = info
        self._state.restore(info.step, history)
        self._show_step()
        suffix = f"  resumed after step {info.step}" if info.step else ""
        self._print(f"{info.recipe}  {info.model}  {info.folder}  {info.steps} steps{suffix}")
        if self.mode == "live" and self._live is None:
            self._live = Live(self.panel, console=self._console, refresh_per_second=4)
            self._live.start(refresh=True)

    def rollback(self, step: int) -> None:
        """Return to an earlier step."""
        self._state.rollback(step)
        self._show_step()

    def startup(self, name: str, state: Literal["starting", "ready", "failed"], detail: str = "") -> None:
        """Show that a service is starting, is ready, or has failed to start."""
        self._changes += 1
        current_time = self._clock()
        if state == "starting":
            self._starting[name] = current_time
        seconds = duration(current_time - self._starting.get(name, current_time))
        text = {"starting": "starting", "ready": f"ready in {seconds}", "failed": f"failed after {seconds}"}[state]
        # A service that starts again gets a new bar, whose time begins at 0.
        if state != "ready":
            self.panel.remove(name)
        if state != "failed":
            self.panel.show(name, 1.0 if state == "ready" else None, detail, service=True)
        line = f"{name} {text}" + (f"  {detail}" if detail else "")
        self._print(line, "bold red" if state == "failed" else "", live=state == "failed")

    def progress(self, name: str, fraction: float) -> None:
        """Show the progress of a long job, from 0 to 1."""
        self._changes += 1
        quarter = int(fraction * 4)
        if quarter != self._quarters.get(name):
            self._print(f"{name} {quarter * 25}%")
        self._quarters[name] = quarter
        self.panel.show(name, fraction, service=True)

    def pause(self, pause: Pause) -> None:
        """Show a pause on request while it lasts."""
        self._state.pause = pause

    async def watch(
        self,
        *,
        waiting: Callable[[], str],
        status: Callable[[], RolloutStatus | None],
        training: Callable[[], tuple[int, int] | None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Call `poll` once a second until cancelled; runs as a task on the run's event loop.

        If writing to stdout fails, the display turns itself off and passes the cause to `tell`.
        """
        try:
            while True:
                self.poll(waiting=waiting, status=status, training=training)
                if self._output.failure and self.mode != "none":
                    self.close()
                    self.mode = "none"
                    tell(f"nothing more is shown, as stdout cannot be written: {self._output.failure}")
                await asyncio.sleep(_POLL_EVERY_S)
        finally:
            self._forget_status()

    def poll(
        self,
        *,
        waiting: Callable[[], str] = str,
        status: Callable[[], RolloutStatus | None] = lambda: None,
        training: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        """Update the progress of the phase; after 10 s without any, show the pending call.

        Plain mode prints a line about longer waits and long rollouts, every 30 s at most.

        Args:
            waiting: names the pending call, such as "generator replica 1, call load"; "" if unknown.
            training: returns the microbatches done and in all of the current training step; None if nothing trains.
        """
        current_time, rollout, microbatches = self._clock(), status(), training()
        phase, in_phase, _ = self._phase_clock.now()
        progress = (rollout.batch, rollout.groups_done, rollout.evaluated) if rollout is not None else None
        # A change of any of these is progress.
        state = (phase, self._phase_clock.since, self._changes, progress, microbatches)
        paused = self._state.pause is not None and self._state.pause.paused
        # A run that is paused on request is not stuck.
        if state != self._moved[0] or paused:
            self._moved = state, current_time
        since = self._moved[1]
        # The pending call is named only once there has been no progress for a while.
        text = waiting() if current_time - since >= PATIENCE_S else ""
        old_rollout, self._state.rollout = self._state.rollout, rollout
        self._state.polled_at, self._state.waiting = current_time, (text, since) if text else None
        # Each batch has a bar of its own.
        if old_rollout is not None and (rollout is None or rollout.batch != old_rollout.batch):
            self.panel.remove("batch")
        if rollout is not None:
            self.panel.show("batch", rollout.share, f"{rollout.groups_done}/{rollout.groups}")
        if microbatches is not None:
            self.panel.show(
                "update", microbatches[0] / microbatches[1], f"{microbatches[0]}/{microbatches[1]} microbatches"
            )
        else:
            self.panel.remove("update")
        line = ""
        if text and current_time - since >= max(PLAIN_PATIENCE_S, 2 * self._longest.get(phase, 0.0)):
            line = f"{phase or 'run'}: waiting for {text}; {duration(current_time - since)} without progress"
        elif rollout is not None and phase == "rollout" and in_phase >= REPORT_EVERY_S and not paused:
            line = f"rollout: {rollout}"
        if line and current_time - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = current_time
            self._print(line)

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """Show the values of a step; `state.py` lists the displayed names."""
        self._changes += 1
        numbers = {name: value for name, value in values.items() if not isinstance(value, Histogram)}
        self._state.log(step, numbers)
        if batch is not None and batch.episodes:
            self._state.show_answer_of(step, batch)
        for name, value in numbers.items():
            kind, _, phase = name.partition("/")
            # A wait is normal as long as the phase has taken before; see PLAIN_PATIENCE_S.
            if kind == "seconds":
                self._longest[phase] = max(value, self._longest.get(phase, 0.0))
        self._show_step()
        self._print(self._step_line(step, numbers))

    def event(self, text: str, level: Level = "info") -> None:
        """Print an event, above the panel in live mode; warnings are yellow, faults red."""
        self._state.warnings += level == "warning"
        self._state.faults += level == "fault"
        style = {"info": "", "warning": "yellow", "fault": "bold red"}[level]
        elapsed = f"{duration(self._clock() - self._begun)}  " if self.mode == "live" else ""
        self._print(elapsed + (text if level == "info" else f"{level}: {text}"), style, live=True)

    def summary(self, places: Mapping[str, object] | None = None, faults: Sequence[Fault] = ()) -> None:
        """End the display and print the run's summary: a table of the faults, scores, and `places`.

        `places` holds paths and follow-up commands: {"run folder": path, "curves": "tensorboard ..."}.
        """
        self.close()
        if self.mode != "none":
            printable_places = {name: self._writable(str(place)) for name, place in (places or {}).items()}
            printable_faults = [replace(row, cause=self._writable(row.cause)) for row in faults]
            print_summary(self._console, self._state, self._clock() - self._begun, printable_places, printable_faults)

    def close(self) -> None:
        """Stop drawing; the last panel stays on the screen."""
        self._forget_status()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _forget_status(self) -> None:
        """Drop the state set by `poll`."""
        self._state.rollout = self._state.waiting = self._state.polled_at = None
        for name in ("batch", "update"):
            self.panel.remove(name)

    def _show_step(self) -> None:
        if self._state.info is not None:
            step, steps = self._state.step, self._state.info.steps
            self.panel.show("step", min(step / max(steps, 1), 1.0), f"{step}/{steps}")

    def _step_line(self, step: int, values: Mapping[str, float]) -> str:
        steps = self._state.info.steps if self._state.info is not None else 0
        parts = [f"step {step:>{len(str(steps))}}/{steps}" if steps else f"step {step}"]
        labels = {"reward": REWARD, **UPDATE}
        parts += [f"{label} {number(values[name])}" for label, name in labels.items() if name in values]
        parts += [f"reward of all groups {reward}" for reward in (reward_of_all_groups(values),) if reward]
        parts += [f"{f'held-out {name}'.strip()} {number(score)}" for name, score in held_out_scores(values).items()]
        parts += [f"{phase} {took}" for phase, took in phases(values).items()]
        if "seconds/step" in values and (eta := self._state.eta_s()):
            parts.append(f"eta {duration(eta)}")
        return "  ".join(parts)

    def _print(self, text: str, style: str = "", *, live: bool = False) -> None:
        """Print a line in plain mode and, if `live`, above the panel in live mode."""
        if self.mode == "plain" or (live and self.mode == "live"):
            self._console.print(Text(self._writable(text), style=style), soft_wrap=True)

    def _writable(self, text: str) -> str:
        """Escape terminal control characters, and replace characters outside the console's encoding."""
        return visible(text).encode(self._console.encoding, "replace").decode(self._console.encoding)
