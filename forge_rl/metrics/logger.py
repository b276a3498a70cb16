"""The one place that a run logs to: it fans out to the display and to every sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from forge_rl.metrics.display.console import Display
from forge_rl.metrics.sinks import JSONLSink, Level, Metric, RunInfo, Sink, Steps
from forge_rl.types import Batch


class RunLog:
    """Fans out to the display and to the sinks.

    Every call reaches all of them, also when one fails; then the first error is raised, and notes name the others.

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

    def start(self, info: RunInfo) -> None:
        """Open all; on a resumed run, drop what they hold beyond `info.step`."""
        _each(self._sinks, lambda sink: sink.start(info))
        self.display.start(info, self._history)

    def rollback(self, step: int) -> None:
        """Go on from an earlier step: drop what was logged beyond it."""
        _each(self._sinks, lambda sink: sink.rollback(step))
        self.display.rollback(step, self._history)

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """Log the values of a step, and the batch that it trained on, if samples of it shall be kept."""
        _each((self.display, *self._sinks), lambda sink: sink.log(step, values, batch))

    def event(self, text: str, level: Level = "info") -> None:
        """Tell of something that happened between steps."""
        _each((self.display, *self._sinks), lambda sink: sink.event(text, level))

    def close(self) -> None:
        """Write what is held back and stop the display."""
        _each((self.display, *self._sinks), lambda sink: sink.close())

    @property
    def _history(self) -> Steps:
        return next((sink.history for sink in self._sinks if isinstance(sink, JSONLSink)), [])


def _each(sinks: Iterable[Sink], call: Callable[[Sink], None]) -> None:
    errors: list[Exception] = []
    for sink in sinks:
        try:
            call(sink)
        except Exception as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"also failed: {other}")
        raise errors[0]
