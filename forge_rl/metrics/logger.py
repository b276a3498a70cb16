"""The log of a run, which fans out to the display and every sink."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

from forge_rl.errors import ForgeError
from forge_rl.metrics.advisories import Advisories
from forge_rl.metrics.display.console import Display
from forge_rl.metrics.episode_files import Kind, RecordedEpisode
from forge_rl.metrics.sinks import JSONLSink, Level, Metric, RunInfo, RunOutcome, Sink
from forge_rl.system.redaction import without_credentials
from forge_rl.system.terminal import TRACE_LETTERS, shortened
from forge_rl.types import Batch, Episode

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{8,}\b|\d+(\.\d+)?(e-?\d+)?")
"""Quotations, numbers and digests."""
_KIND_LETTERS = 100
"""Number of leading characters that distinguish kinds of warnings; model output may follow."""
_MOST_KINDS = 200
"""Most kinds of warnings to tell apart; the rest share one."""


class RunLog:
    """Fans out to the display and the sinks.

    Every call reaches all of them, even if one fails. Only `start` raises a sink's error: later, for example on a full
    disk, the run continues without the lost entries, and the others log a warning when a sink begins to fail.

    Example:
        log = RunLog(display, JSONLSink(folder / "metrics.jsonl"), EpisodeSink(folder / "episodes.jsonl"))
        log.start(info)
        log.log(1, {"loss": 0.1}, batch)
        log.event("generator/1 failed: killed", "fault")

    Args:
        max_lag: the schedule's bound on the lag, for advisories; 0 for none.

    A JSONLSink among the sinks also restores the history of a resumed run's display.
    """

    def __init__(self, display: Display, *sinks: Sink, max_lag: int = 0) -> None:
        self.display = display
        self._sinks = sinks
        self._max_lag = max_lag
        self._advisories = Advisories(max_lag=max_lag)
        self._lost: dict[tuple[int, str], int] = {}
        """Consecutive failures, by the sink's id and the method."""
        self._warnings: dict[str, int] = {}
        """Number of warnings so far by kind: the start of the text without its variable parts."""
        self._folded: dict[str, str] = {}
        """Latest unreported warning by kind."""

    def start(self, info: RunInfo) -> None:
        """Open all; on a resumed run, drop entries after `info.step`."""
        self._advisories = Advisories(max_lag=self._max_lag, settings=info.config)
        for sink in self._sinks:
            sink.start(info)
        history = next((sink.history() for sink in self._sinks if isinstance(sink, JSONLSink)), ())
        self.display.start(info, history)

    def rollback(self, step: int) -> None:
        """Return to an earlier step, dropping the entries after it."""
        self._each(self._sinks, "rollback", step)
        self._advisories.rollback()
        self.display.rollback(step)

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """Log the values of a step, and its training batch to keep samples of.

        Files are written before the display shows the values. Advisories that begin to hold become warnings.
        """
        self._each((*self._sinks, self.display), "log", step, values, batch)
        # Copied, as `look_at` changes it: what is missing afterwards has ended.
        old_advisories = dict(self._advisories.current)
        for advisory in self._advisories.look_at(step, values):
            self.warn(str(advisory))
            self._each(self._sinks, "advisory", advisory, ended=False)
        for kind in old_advisories.keys() - self._advisories.current.keys():
            self._each(self._sinks, "advisory", old_advisories[kind], ended=True)

    def episode(self, episode: Episode) -> None:
        """Offer an ended episode to the sinks, which may keep it as a sample."""
        self._each(self._sinks, "episode", episode)

    def record(self, step: int, kind: Kind, episodes: Callable[[], Iterable[RecordedEpisode]]) -> None:
        """Keep whole episodes of a step, see `Sink.record`."""
        self._each(self._sinks, "record", step, kind, episodes)

    def event(self, text: str, level: Level = "info") -> None:
        """Log an event between steps, with credentials removed.

        Warnings that differ only in numbers and quotations are counted as one kind: the first, 10th, 100th, ... are
        logged, and the total on `close`. Long texts are shortened.
        """
        text = shortened(text)
        if level == "warning":
            kind = _VARIABLE.sub("#", text)[:_KIND_LETTERS]
            if kind not in self._warnings and len(self._warnings) >= _MOST_KINDS:
                kind = ""
            count = self._warnings[kind] = self._warnings.get(kind, 0) + 1
            if count > 1:
                self._folded[kind] = text
                # Not a power of ten: counted, and logged with the next one.
                if math.log10(count) % 1:
                    return
                del self._folded[kind]
                text = f"{text} ({count} like it so far)"
        self._tell(text, level)

    def warn(self, text: str) -> None:
        """Log a warning."""
        self.event(text, "warning")

    def keep(self, text: str, level: Level) -> None:
        """Write an event, such as a long stack trace, to the sinks only."""
        self._each(self._sinks, "event", without_credentials(shortened(text, TRACE_LETTERS)), level)

    def end(self, outcome: RunOutcome, cause: str = "") -> None:
        """Tell the sinks how the run ends."""
        self._each(self._sinks, "end", outcome, shortened(cause))

    def close(self) -> None:
        """Flush pending entries and stop the display."""
        folded_warnings, self._folded = self._folded, {}
        for kind, text in folded_warnings.items():
            self._tell(f"{text} ({self._warnings[kind]} like it in all)", "warning")
        self._each((self.display, *self._sinks), "close")

    def _tell(self, text: str, level: Level) -> None:
        safe_text = without_credentials(text)
        self._each((self.display, *self._sinks), "event", safe_text, level)

    def _each(self, sinks: Iterable[Sink], method: str, *args: object, **more: object) -> None:
        """Call a method of each sink; warn when one begins to fail and when it recovers."""
        warnings: list[str] = []
        for sink in sinks:
            name, key = f"{type(sink).__name__}.{method}", (id(sink), method)
            try:
                getattr(sink, method)(*args, **more)
            except Exception as error:
                self._lost[key] = self._lost.get(key, 0) + 1
                if self._lost[key] == 1:
                    cause = error.message if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
                    warnings.append(f"{name} fails, and the run goes on without it: {shortened(cause)}")
            else:
                if num_lost := self._lost.pop(key, 0):
                    warnings.append(f"{name} works again; what it was given {num_lost} times is lost")
        # Warnings go to the same sinks, so they wait until each has got the entry itself.
        for text in warnings:
            self._tell(text, "warning")
