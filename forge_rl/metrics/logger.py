"""The one place that a run logs to: it fans out to the display and to every sink."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from forge_rl.errors import ForgeError
from forge_rl.metrics.display.console import Display
from forge_rl.metrics.sinks import JSONLSink, Level, Metric, RunInfo, Sink, Steps
from forge_rl.redaction import without_credentials
from forge_rl.types import Batch, Episode

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{8,}\b|\d+(\.\d+)?(e-?\d+)?")
"""Quotations, numbers and digests."""
_KIND_LETTERS = 100
"""Number of leading letters that distinguish kinds of warnings; a model's own words may follow."""
_MOST_KINDS = 200
"""Kinds of warnings that are kept; all others are one."""


class RunLog:
    """Fans out to the display and to the sinks.

    Every call reaches all of them, also when one fails. Only `start` raises an error of a sink: later, as on a full
    disk, the run continues without the entries that were lost. The others are warned when a sink begins to fail.

    Example:
        log = RunLog(display, JSONLSink(folder / "metrics.jsonl"), EpisodeSink(folder / "episodes.jsonl"))
        log.start(info)
        log.log(1, {"loss": 0.1}, batch)
        log.event("generator/1 failed: killed", "fault")

    A JSONLSink among the sinks also gives a resumed run's display its past.
    """

    def __init__(self, display: Display, *sinks: Sink) -> None:
        self.display = display
        self._sinks = sinks
        self._lost: dict[tuple[int, str], int] = {}
        """Failures in a row, by the sink's id and the method that failed when it was called last."""
        self._warnings: dict[str, int] = {}
        """Number of warnings so far, by their kind: the beginning of the text, without what varies."""
        self._folded: dict[str, str] = {}
        """The last one of those that are not told yet."""

    def start(self, info: RunInfo) -> None:
        """Open all; on a resumed run, drop what they hold beyond `info.step`."""
        for sink in self._sinks:
            sink.start(info)
        self.display.start(info, self._history)

    def rollback(self, step: int) -> None:
        """Go on from an earlier step: drop what was logged beyond it."""
        self._each(self._sinks, "rollback", step)
        self.display.rollback(step, self._history)

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """Log the values of a step, and the batch that it trained on, if samples of it shall be kept.

        What is shown has been written.
        """
        self._each((*self._sinks, self.display), "log", step, values, batch)

    def episode(self, episode: Episode) -> None:
        """Keep an episode that has ended, if it may be a sample worth reading."""
        self._each(self._sinks, "episode", episode)

    def event(self, text: str, level: Level = "info") -> None:
        """Tell of something that happened between steps; `without_credentials`, as it is kept in files.

        Warnings that begin alike but for numbers and quotations are one: after the first, the 10th, 100th, ... are
        told, and at the end how many there were.
        """
        if level == "warning":
            kind = _VARIABLE.sub("#", text)[:_KIND_LETTERS]
            if kind not in self._warnings and len(self._warnings) >= _MOST_KINDS:
                kind = ""
            count = self._warnings[kind] = self._warnings.get(kind, 0) + 1
            if count > 1:
                self._folded[kind] = text
                if math.log10(count) % 1:
                    return
                del self._folded[kind]
                text = f"{text} ({count} like it so far)"
        self._tell(text, level)

    def keep(self, text: str, level: Level) -> None:
        """Write an event into the files, such as a long trace, and leave the display alone."""
        self._each(self._sinks, "event", without_credentials(text), level)

    def close(self) -> None:
        """Write what is held back and stop the display."""
        folded, self._folded = self._folded, {}
        for kind, text in folded.items():
            self._tell(f"{text} ({self._warnings[kind]} like it in all)", "warning")
        self._each((self.display, *self._sinks), "close")

    def _tell(self, text: str, level: Level) -> None:
        told = without_credentials(text)
        self._each((self.display, *self._sinks), "event", told, level)

    @property
    def _history(self) -> Steps:
        return next((sink.history for sink in self._sinks if isinstance(sink, JSONLSink)), [])

    def _each(self, sinks: Iterable[Sink], method: str, *args: object) -> None:
        """Call a method of all, and tell when one of them begins to fail and when it works again."""
        told: list[str] = []
        for sink in sinks:
            name, key = f"{type(sink).__name__}.{method}", (id(sink), method)
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                self._lost[key] = self._lost.get(key, 0) + 1
                if self._lost[key] == 1:
                    cause = error.message if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
                    told.append(f"{name} fails, and the run goes on without it: {cause}")
            else:
                if lost := self._lost.pop(key, 0):
                    told.append(f"{name} works again; what it was given {lost} times is lost")
        for text in told:
            self._tell(text, "warning")
