"""The one place that a run logs to: it fans out to the display and to every sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from forge_rl.metrics.display.console import Display
from forge_rl.metrics.recoveries import Recovery
from forge_rl.metrics.sinks import EpisodeSink, JSONLSink, Level, Metric, RunInfo, Sink, Steps
from forge_rl.types import Batch


class RunLog:
    """Fans out to the display, the sinks, and the file of sample episodes.

    Every call reaches all of them, also when one fails; then the first error is raised, and notes name the others.

    Args:
        display: what a person sees.
        sinks: where values and events go. A JSONLSink among them also gives a resumed run's display its past.
        episodes: where samples of each batch go, if anywhere.
    """

    def __init__(self, display: Display, *sinks: Sink, episodes: EpisodeSink | None = None) -> None:
        self.display = display
        self._sinks = sinks
        self._episodes = episodes

    def start(self, info: RunInfo) -> None:
        """Open all; on a resumed run, drop what they hold beyond `info.step`."""
        calls = [partial(sink.start, info) for sink in self._sinks]
        if self._episodes is not None:
            calls.append(partial(self._episodes.start, info))
        _all(calls)
        self.display.start(info, self._past)

    def rollback(self, step: int) -> None:
        """The run goes on from an earlier step: drop what was logged beyond it."""
        calls = [partial(sink.rollback, step) for sink in self._sinks]
        if self._episodes is not None:
            calls.append(partial(self._episodes.rollback, step))
        _all(calls)
        self.display.rollback(step, self._past)

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """The values of a step, and the batch that it trained on, if samples of it shall be kept."""
        calls = [partial(sink.log, step, values) for sink in (self.display, *self._sinks)]
        if self._episodes is not None and batch is not None:
            calls.append(partial(self._episodes.log, step, batch))
        _all(calls)

    def event(self, text: str, level: Level = "info") -> None:
        """Something that happened between steps."""
        _all([partial(sink.event, text, level) for sink in (self.display, *self._sinks)])

    def fault(self, recovery: Recovery) -> None:
        """A fault, or that one has been recovered from: an event like others."""
        self.event(*recovery.event)

    @property
    def _past(self) -> Steps:
        return next((sink.history for sink in self._sinks if isinstance(sink, JSONLSink)), [])

    def close(self) -> None:
        """Write what is held back and stop the display."""
        calls = [sink.close for sink in (self.display, *self._sinks)]
        if self._episodes is not None:
            calls.append(self._episodes.close)
        _all(calls)


def _all(calls: Sequence[Callable[[], None]]) -> None:
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"also failed: {other}")
        raise errors[0]
