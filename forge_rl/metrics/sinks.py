"""Sinks for metrics: the base class, and a run folder's files, which can be truncated to a step on resume."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_rl.errors import CheckpointError
from forge_rl.metrics.advisories import Advisory
from forge_rl.metrics.episode_files import Kind, RecordedEpisode
from forge_rl.metrics.values import Histogram
from forge_rl.types import Batch, Episode, Message

Level = Literal["info", "warning", "fault"]
RunOutcome = Literal["finished", "stopped", "failed"]
"""How a run ended: at its last step, by a request or a signal, or by an error."""
Metric = float | Histogram
Steps = list[tuple[int, dict[str, float]]]


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
        self._lines = _StepLines(path)
        self.history: Steps = []
        """Steps in the file up to the one the run resumed from, without histograms."""

    def rollback(self, step: int) -> None:
        self.history = [(past, _floats(row)) for past, row in self._lines.rollback(step)]

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        row = {name: _as_json(value) for name, value in values.items()}
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
        _append(self._path, _encode({"time": round(self._clock(), 3), "level": level, "text": text}))


class EpisodeSink(Sink):
    """Writes the text of episodes to search in: a sample of each batch, spread evenly over its groups; up to as many
    failed episodes per step; and, if a run ends before its first batch, the last episodes that ended."""

    def __init__(self, path: Path, episodes_per_step: int = 8) -> None:
        self._lines = _StepLines(path)
        self._episodes_per_step = episodes_per_step
        self._next(0)

    def rollback(self, step: int) -> None:
        self._lines.rollback(step)
        self._next(step)

    def episode(self, episode: Episode) -> None:
        if episode.outcome.scored:
            self._waiting.append(episode)
        elif self._failed < self._episodes_per_step:
            self._failed += 1
            self._lines.append(self._step + 1, episode_sample(episode))

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        episodes = batch.episodes if batch is not None else ()
        chosen = min(self._episodes_per_step, len(episodes))
        for i in range(chosen):
            self._lines.append(step, episode_sample(episodes[i * len(episodes) // chosen]))
        if chosen:
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
    said = [
        text
        for turn in episode.turns
        for text in (*map(_said, turn.messages), f"assistant: {turn.text}")
        if turn.messages
    ]
    return {
        "task": episode.task.id,
        "source": episode.task.source,
        "prompt": "\n\n".join(map(_said, episode.task.messages)),
        **({"conversation": "\n\n".join(said)} if len(episode.turns) > 1 and said else {}),
        "answer": episode.text,
        "reward": _as_json(episode.reward),
        "outcome": episode.outcome.value,
        **({"problem": episode.problem} if episode.problem else {}),
        "turns": len(episode.turns),
        "tokens": episode.response_tokens,
    }


def _said(message: Message) -> str:
    return f"{message['role']}: {message.get('content') or ''}"


class _StepLines:
    """A file of JSON lines in step order, so that a rollback is one truncation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.step = -1
        """Step of the last line; -1 if there is none."""
        self._end: int | None = None

    def rollback(self, step: int) -> list[tuple[int, dict[str, object]]]:
        """Drop rows after the step and return the rest. A crash can only have torn the last line."""
        rows: list[tuple[int, dict[str, object]]] = []
        self._end = 0
        with writing(self._path):
            lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        for number, line in enumerate(lines, 1):
            found = _decode(line)
            if found is None and number < len(lines):
                raise CheckpointError(
                    f"line {number} of {self._path} is not a step: {line[:60]!r}",
                    hint="move the file away, or correct the line, then run the same command again",
                )
            if found is None or found[0] > step:
                break
            rows.append(found)
            self._end += len(line)
        _append(self._path, b"", at=self._end)
        self.step = rows[-1][0] if rows else -1
        return rows

    def append(self, step: int, row: Mapping[str, object]) -> None:
        assert self._end is not None, "the sink was not started"
        assert step >= self.step, f"step {step} was logged after step {self.step}"
        assert "step" not in row, "a metric may not be named 'step'"
        data = _encode({"step": step, **row})
        _append(self._path, data, at=self._end)
        self.step, self._end = step, self._end + len(data)

    def amend(self, step: int, values: Mapping[str, object]) -> None:
        """Add values to the last line of a step, inserting one if there is none; the whole file is replaced."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        with writing(self._path):
            lines = self._path.read_bytes()[: self._end].splitlines(keepends=True)
            place = len(lines)
            while place and (found := _decode(lines[place - 1])) is not None and found[0] > step:
                place -= 1
            same = _decode(lines[place - 1]) if place else None
            before = same[1] if same is not None and same[0] == step else None
            lines[place - (before is not None) : place] = [_encode({"step": step, **(before or {}), **values})]
            partial.write_bytes(b"".join(lines))
            partial.replace(self._path)
        self._end = sum(map(len, lines))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError in the body to a CheckpointError that names the file and the fix."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space" if full else "make the folder writable, or choose another run folder"
        message = f"cannot write {path}: {'no space left' if full else error.strerror or error}"
        raise CheckpointError(message, hint=f"{hint}, then run the same command again: it resumes") from error


def _append(path: Path, data: bytes, *, at: int | None = None) -> None:
    """Append to a file, first truncating it to `at` bytes: a write that hit a full disk leaves it longer."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if at is not None and file.tell() > at:
                file.truncate(at)
            file.write(data)


def _encode(row: Mapping[str, object]) -> bytes:
    # A lone surrogate, which a model can produce, becomes a JSON escape.
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _decode(line: bytes) -> tuple[int, dict[str, object]] | None:
    """Return a line's step and values; None if it is incomplete or malformed."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
        return row.pop("step"), row
    return None


def _floats(row: Mapping[str, object]) -> dict[str, float]:
    """Read the metrics of a line; null becomes NaN again."""
    return {
        name: float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else math.nan
        for name, value in row.items()
        if not isinstance(value, dict)
    }


def _as_json(value: Metric) -> object:
    if isinstance(value, Histogram):
        return {str(number): count for number, count in sorted(value.counts.items())}
    return float(value) if math.isfinite(value) else None
