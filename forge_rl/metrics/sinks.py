"""Sinks for metrics: their base class, and the files of a run folder, which go back to a step on resume."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from forge_rl.errors import CheckpointError
from forge_rl.metrics.values import Histogram
from forge_rl.types import Batch, Episode

Level = Literal["info", "warning", "fault"]
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
    """Steps done already: a resumed run goes on after this one, and what was logged beyond it is dropped."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The flags of the run, flat."""


class Sink:
    """A place that metrics go to. A subclass overrides what it keeps; the rest does nothing.

    Example:
        class Printer(Sink):
            def event(self, text: str, level: Level) -> None:
                print(level, text)
    """

    def start(self, info: RunInfo) -> None:
        """Open, and drop what was logged beyond `info.step`."""
        self.rollback(info.step)

    def rollback(self, step: int) -> None:
        """Go on from an earlier step: drop what was logged beyond it, where that can be."""

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        """Keep the values of a step, and samples of the batch that it trained on.

        Steps never go back, except by `rollback`; a step that is logged again gains values.
        """

    def event(self, text: str, level: Level) -> None:
        """Keep what happened between steps."""

    def close(self) -> None:
        """Write what is held back. Does nothing when never started or closed already."""


class JSONLSink(Sink):
    """`{"step": 3, "reward": 0.4, ...}`: exactly one line for each step, flushed at once.

    NaN and infinity are null; a histogram is an object, `{"0": 512, "1": 40}`.

    Raises:
        CheckpointError: there is no space, or the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._lines = _StepLines(path)
        self._row: dict[str, object] = {}
        self.history: Steps = []
        """Steps in the file up to the one that the run resumed from, without their histograms."""

    def rollback(self, step: int) -> None:
        rows = self._lines.open(step)
        self._row = rows[-1] if rows else {}
        self.history = [(_step(row), _floats(row)) for row in rows]

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        assert "step" not in values, "a metric may not be named 'step'"
        again = self._row.get("step") == step
        row: dict[str, object] = {name: _as_json(value) for name, value in values.items()}
        self._row = (self._row if again else {"step": step}) | row
        self._lines.append(step, self._row, replace=again)

    def close(self) -> None:
        self._lines.close()


class EventSink(Sink):
    """`{"time": ..., "level": "fault", "text": ...}`: what happened in this folder's runs, also in those cut short.

    Args:
        path: the file, which only grows.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: BinaryIO | None = None

    def start(self, info: RunInfo) -> None:
        self._file = open_append(self._path)

    def event(self, text: str, level: Level) -> None:
        assert self._file is not None, "the sink was not started"
        with writing(self._path):
            write_all(self._file, _encode({"time": round(self._clock(), 3), "level": level, "text": text}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class EpisodeSink(Sink):
    """Samples for a person to read: a few episodes of each batch, spread evenly over its groups.

    Args:
        path: the file, such as `episodes.jsonl`.
        episodes_per_step: number to write for each batch; all of them if the batch has fewer.
    """

    def __init__(self, path: Path, episodes_per_step: int = 8) -> None:
        self._lines = _StepLines(path)
        self._episodes_per_step = episodes_per_step

    def rollback(self, step: int) -> None:
        self._lines.open(step)

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        episodes = batch.episodes if batch is not None else ()
        chosen = min(self._episodes_per_step, len(episodes))
        for i in range(chosen):
            self._lines.append(step, _sample(step, episodes[i * len(episodes) // chosen]))

    def close(self) -> None:
        self._lines.close()


def _sample(step: int, episode: Episode) -> dict[str, object]:
    shown = (f"{message['role']}: {message['content']}" for message in episode.task.messages)
    return {
        "step": step,
        "task": episode.task.id,
        "source": episode.task.source,
        "prompt": "\n\n".join(shown),
        "answer": episode.text,
        "reward": _as_json(episode.reward),
        "outcome": episode.outcome.value,
        "turns": len(episode.turns),
        "tokens": episode.response_tokens,
    }


class _StepLines:
    """A file of JSON lines whose steps never go back, so that going back to a step is one truncation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._step = 0
        self._last = 0  # where the last line begins, in bytes
        self._end = 0

    def open(self, step: int) -> list[dict[str, object]]:
        """Drop what lies beyond the step, and return what stays."""
        self.close()
        rows: list[dict[str, object]] = []
        with writing(self._path):
            if self._path.is_file():
                rows = self._read(step)
                os.truncate(self._path, self._end)
        self._file = open_append(self._path)
        self._step = _step(rows[-1]) if rows else 0
        return rows

    def append(self, step: int, row: Mapping[str, object], *, replace: bool = False) -> None:
        assert self._file is not None, "the sink was not started"
        assert step >= self._step, f"step {step} was logged after step {self._step}"
        data = _encode(row)
        with writing(self._path):
            if replace:
                self._file.truncate(self._last)
                self._end = self._last
            try:
                write_all(self._file, data)
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._end)
                raise
        self._step, self._last, self._end = step, self._end, self._end + len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, step: int) -> list[dict[str, object]]:
        """Rows up to the step; moves `_last` and `_end`. Only the last line can have been torn by a crash."""
        rows: list[dict[str, object]] = []
        self._last = self._end = 0
        with open(self._path, "rb") as file:
            lines = file.readlines()
        for number, line in enumerate(lines, 1):
            row = _decode(line)
            if row is None and number < len(lines):
                raise CheckpointError(
                    f"line {number} of {self._path} is not a step: {line[:60]!r}",
                    hint="move the file away, or correct the line, then run the same command again",
                )
            if row is None or _step(row) > step:
                break
            rows.append(row)
            self._last, self._end = self._end, self._end + len(line)
        return rows


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a CheckpointError that names the file and what to do, where the body meets an OSError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space" if full else "make the folder writable, or choose another run folder"
        message = f"cannot write {path}: {'no space left' if full else error.strerror or error}"
        raise CheckpointError(message, hint=f"{hint}, then run the same command again: it resumes") from error


def open_append(path: Path) -> BinaryIO:
    """Open a file to append to, unbuffered: what is written reaches the kernel or raises, not only when it is closed.

    Raises:
        CheckpointError: it cannot be opened.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all of it: the write that meets a full disk may first be cut short."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _encode(row: Mapping[str, object]) -> bytes:
    # A lone surrogate, which a model can spell, becomes the escape that JSON has for it.
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _decode(line: bytes) -> dict[str, object] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _step(row: Mapping[str, object]) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _floats(row: Mapping[str, object]) -> dict[str, float]:
    """Read the metrics of a line; null becomes NaN again."""
    return {
        name: float(value) if isinstance(value, int | float) else math.nan
        for name, value in row.items()
        if name != "step" and not isinstance(value, dict)
    }


def _as_json(value: Metric) -> object:
    if isinstance(value, Histogram):
        return {str(number): count for number, count in sorted(value.counts.items())}
    return float(value) if math.isfinite(value) else None
