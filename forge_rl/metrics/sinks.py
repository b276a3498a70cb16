"""Sinks for metrics: the base class, and a run folder's files, which can be truncated to a step on resume."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_rl.metrics.advisories import Advisory
from forge_rl.metrics.episode_files import Kind, RecordedEpisode
from forge_rl.metrics.step_lines import StepLines, append_bytes, encode
from forge_rl.metrics.values import Histogram
from forge_rl.system.terminal import shortened
from forge_rl.types import Batch, Episode, Message

Level = Literal["info", "warning", "fault"]
RunOutcome = Literal["finished", "stopped", "failed"]
"""How a run ended: at its last step, by a request or a signal, or by an error."""
Metric = float | Histogram
Steps = Iterable[tuple[int, dict[str, float]]]
"""Numbers of each step."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Description of a run, given to each sink once."""

    recipe: str
    model: str
    folder: Path
    """The run folder."""
    steps: int
    """Optimizer steps when the run is complete."""
    step: int = 0
    """Steps already done: a resumed run continues after this one, and later entries are dropped."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The flags of the run, flat."""


class Sink:
    """A destination for metrics. Every method but `start` does nothing unless a subclass overrides it.

    Example:
        class Printer(Sink):
            def event(self, text: str, level: Level) -> None:
                print(level, text)
    """

    def start(self, info: RunInfo) -> None:
        """Open, and drop entries after `info.step`."""
        self.rollback(info.step)

    def rollback(self, step: int) -> None:
        """Return to an earlier step, dropping the entries after it where possible."""

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """Keep the values of a step, and samples of its training batch.

        Logging a step again, even an earlier one, adds values to it: evaluation results come late. Steps of batches
        only go back after `rollback`.
        """

    def episode(self, episode: Episode) -> None:
        """Keep an ended episode, even one that no step will train on."""

    def record(self, step: int, kind: Kind, episodes: Callable[[], Iterable[RecordedEpisode]]) -> None:
        """Keep whole episodes of a step; recording a kind again replaces the episodes of that step and kind.

        Args:
            episodes: makes the records, which may take seconds; call it in a thread.
        """

    def event(self, text: str, level: Level) -> None:
        """Keep an event between steps."""

    def advisory(self, advisory: Advisory, *, ended: bool) -> None:
        """Note that an advisory begins or, if `ended`, ends."""

    def end(self, outcome: RunOutcome, cause: str) -> None:
        """Note that the run ends, and the cause if it failed."""

    def close(self) -> None:
        """Flush pending entries. Does nothing if never started or already closed."""


class JSONLSink(Sink):
    """Writes exactly one JSON line for each step, flushed at once: `{"step": 3, "reward": 0.4, ...}`.

    NaN and infinity become null; a histogram becomes an object, `{"0": 512, "1": 40}`.

    Raises:
        CheckpointError: the disk is full, or the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._lines = StepLines(path)

    def start(self, info: RunInfo) -> None:
        # A damaged file is refused before the rollback changes it.
        self._lines.check(info.step)
        super().start(info)

    def rollback(self, step: int) -> None:
        self._lines.rollback(step)

    def history(self) -> Steps:
        """Yield the steps in the file, without histograms."""
        return ((step, _floats(row)) for step, row in self._lines.rows())

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        row = {name: _as_json(value) for name, value in values.items()}
        # Late values, such as an evaluation's, belong to an earlier step and come without a batch.
        if step == self._lines.step or (step < self._lines.step and batch is None):
            self._lines.amend(step, row)
        else:
            self._lines.append(step, row)


class EventSink(Sink):
    """Appends events as JSON lines, `{"time": ..., "level": "fault", "text": ...}`, after any from earlier runs."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def event(self, text: str, level: Level) -> None:
        append_bytes(self._path, encode({"time": round(self._clock(), 3), "level": level, "text": text}))


class EpisodeSink(Sink):
    """Writes episodes as searchable text: a sample of each batch, spread evenly over its groups; up to as many failed
    episodes per step; and, if a run ends before its first batch, the last episodes that ended."""

    def __init__(self, path: Path, episodes_per_step: int = 8) -> None:
        self._lines = StepLines(path)
        self._episodes_per_step = episodes_per_step
        self._next(0)

    def start(self, info: RunInfo) -> None:
        self._lines.check(info.step)
        super().start(info)

    def rollback(self, step: int) -> None:
        self._lines.rollback(step)
        self._next(step)

    def episode(self, episode: Episode) -> None:
        if episode.outcome.scored:
            self._waiting.append(episode)
        elif self._failed < self._episodes_per_step:
            self._failed += 1
            # It failed during the step that follows the last one logged.
            self._lines.append(self._step + 1, episode_sample(episode))

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        episodes = batch.episodes if batch is not None else ()
        # Evenly spaced places, as the episodes of a group lie one after another.
        num_episodes = min(self._episodes_per_step, len(episodes))
        for i in range(num_episodes):
            self._lines.append(step, episode_sample(episodes[i * len(episodes) // num_episodes]))
        # Only a batch ends the collection of a step, not values that come late.
        if num_episodes:
            self._next(step)

    def close(self) -> None:
        if self._step == 0:
            for episode in self._waiting:
                self._lines.append(1, episode_sample(episode))
        self._waiting.clear()

    def _next(self, step: int) -> None:
        """Start collecting for the step after this one."""
        self._step, self._failed = step, 0
        self._waiting: deque[Episode] = deque(maxlen=self._episodes_per_step)


def episode_sample(episode: Episode) -> dict[str, object]:
    """Describe an episode in text, as JSON; with the conversation if it has several turns."""
    conversation = [
        text
        for turn in episode.turns
        for text in (*map(_said, turn.messages), f"assistant: {turn.text}")
        if turn.messages
    ]
    return {
        "task": episode.task.id,
        "source": episode.task.source,
        "prompt": "\n\n".join(map(_said, episode.task.messages)),
        **({"conversation": "\n\n".join(conversation)} if len(episode.turns) > 1 and conversation else {}),
        "answer": episode.text,
        "reward": _as_json(episode.reward),
        "outcome": episode.outcome.value,
        **({"problem": shortened(episode.problem)} if episode.problem else {}),
        "turns": len(episode.turns),
        "tokens": episode.response_tokens,
    }


def _said(message: Message) -> str:
    return f"{message['role']}: {message.get('content') or ''}"


def _floats(row: Mapping[str, object]) -> dict[str, float]:
    """Read the metrics of a line; null becomes NaN again."""
    return {
        # A larger integer could not be converted; it reads as NaN, like null.
        name: float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else math.nan
        for name, value in row.items()
        if not isinstance(value, dict)
    }


def _as_json(value: Metric) -> object:
    if isinstance(value, Histogram):
        return {str(number): count for number, count in sorted(value.counts.items())}
    return float(value) if math.isfinite(value) else None
