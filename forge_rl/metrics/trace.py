"""The trace of a run, a timeline of lanes: open the file in ui.perfetto.dev or chrome://tracing.

It uses the JSON array form of the Trace Event Format, one event a line. Both viewers accept a missing closing bracket.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from forge_rl.errors import CheckpointError
from forge_rl.metrics.step_lines import writing
from forge_rl.system.folders import is_there

_BEGIN = b"[\n"
_FLUSH_S = 1.0
_RESERVE_BYTES = 2048
"""Reserved for the notice that the file is full, its lane, and the closing bracket."""
_SERVICES = ("controller", "trainer", "generator", "environment", "reward", "weights")
"""Services in the order of their lanes from top to bottom; others follow."""
_PIDS, _ROWS = 1 << 20, 1 << 10
"""Maximum numbers of other services, and of lanes of a service; tids have 31 bits."""


class Trace:
    """Writes spans, instants and counters of a run to a file that is readable at any time.

    A lane is a service or replica: "controller", "generator/0". Existing events are kept, and times continue after
    them. Events are flushed by the first one at least a second after the last flush, by `flush` and by `close`.

    Example:
        trace = Trace(folder / "trace.json")
        trace.span("controller", "rollout", begin_s, end_s)
        trace.instant("generator/0", "fault", cause="killed")
        trace.close()

    Args:
        clock: monotonic seconds, as used for the times of spans.
        most_bytes: file size limit; a last event marks that it was reached.

    Raises:
        CheckpointError: the disk is full, the file cannot be read or written, or it is not a trace.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic, most_bytes: int = 256 << 20) -> None:
        self._path = path
        self._clock = clock
        self._most_bytes = most_bytes
        self._named: set[str] = set()
        """Lanes that this process has named in the file."""
        self._spans = 0
        """Number of overlapping spans so far."""
        self._start_us = 0
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bytes = self._resume() if is_there(path) else 0
            # The buffer holds more than arrives between two flushes, so that no partial line is written.
            self._file = open(path, "ab", buffering=1 << 22)  # noqa: SIM115 (closed by close)
            # Drops what `_resume` does not keep: the closing bracket and a torn line.
            self._file.truncate(self._bytes)
        self._full = self._bytes > most_bytes - _RESERVE_BYTES
        self._origin_s = self._flushed_s = clock()
        if not self._bytes:
            self._write(_BEGIN)
            self.flush()

    def span(self, lane: str, name: str, begin_s: float, end_s: float, *, overlapping: bool = False) -> None:
        """Draw a completed span; times are clock seconds.

        Spans of a lane must be disjoint or nested unless they are `overlapping`, such as an engine's requests, which
        get rows of their own, labelled with lane and name.
        """
        begin = self._micros(begin_s)
        end = max(begin, self._micros(end_s))
        if not overlapping:
            self._add(lane, {"ph": "X", "ts": begin, "dur": end - begin, "name": name})
            return
        # Viewers group asynchronous spans by process and name, not by thread: hence the lane in the name.
        id_ = f"{self._start_us}-{self._spans}"  # unlike those of earlier processes
        common: dict[str, object] = {"id": id_, "cat": lane, "name": f"{lane} {name}"}
        self._spans += 1
        self._add(lane, {"ph": "b", "ts": begin} | common, {"ph": "e", "ts": end} | common)

    def instant(self, lane: str, name: str, cause: str) -> None:
        """Mark an event now, such as a fault, with its cause."""
        self._add(lane, {"ph": "i", "ts": self._now(), "s": "t", "name": name, "args": {"cause": cause}})

    def counter(self, name: str, value: float) -> None:
        """Set a curve's value from now on."""
        self._add("counters", {"ph": "C", "ts": self._now(), "name": name, "args": {"value": value}})

    def flush(self) -> None:
        """Write buffered events."""
        self._flushed_s = self._clock()
        with writing(self._path):
            self._file.flush()

    def close(self) -> None:
        """Write buffered events and end the array. Does nothing if already closed."""
        if not self._file.closed:
            with writing(self._path), self._file:
                self._file.write(b"\n]\n")

    def _now(self) -> int:
        return self._micros(self._clock())

    def _micros(self, seconds: float) -> int:
        """Convert to trace time in whole microseconds, so that a span can begin exactly where another ends."""
        return max(self._start_us, self._start_us + round((seconds - self._origin_s) * 1e6))

    def _add(self, lane: str, *events: dict[str, object]) -> None:
        """Add all of the events, or none if they do not fit."""
        if self._full:
            return
        lines = self._encode(lane, *events)
        if self._bytes + len(lines) > self._most_bytes - _RESERVE_BYTES:
            self._full = True
            name = "the trace is full: nothing is written after this"
            args = {"most_bytes": self._most_bytes}
            lines = self._encode("trace", {"ph": "i", "ts": self._now(), "s": "g", "name": name, "args": args})
        self._write(lines)
        if self._full or self._clock() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def _write(self, data: bytes) -> None:
        with writing(self._path):
            self._bytes += self._file.write(data)

    def _encode(self, lane: str, *events: dict[str, object]) -> bytes:
        """Encode events as lines; a lane's first events follow lines that name and order the lane and its service."""
        service, _, replica = lane.partition("/")
        # A number from the name, by a checksum that is the same in every process, unlike `hash`.
        order = (
            _SERVICES.index(service) if service in _SERVICES else len(_SERVICES) + zlib.crc32(service.encode()) % _PIDS
        )
        row = int(replica) + 1 if replica.isdecimal() else 0
        # Viewers take a thread whose tid equals a pid for that process's main thread, and Perfetto finds the thread to
        # name by its tid alone.
        ids = {"pid": order + 1, "tid": (order + 1) * _ROWS + row}
        names: dict[str, object] = {
            "process_name": {"name": service},
            "process_sort_index": {"sort_index": order},
            "thread_name": {"name": lane},
            "thread_sort_index": {"sort_index": row},
        }
        if lane in self._named:
            names = {}
        self._named.add(lane)
        rows = [*({"ph": "M", "name": name, "args": args} for name, args in names.items()), *events]
        lines = (json.dumps(row | ids, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for row in rows)
        # A comma before each line but the first, so that the file is an array that lacks only its bracket.
        return (b",\n" if self._bytes > len(_BEGIN) else b"") + ",\n".join(lines).encode("utf-8", "replace")

    def _resume(self) -> int:
        """Find the last time in the file; return how many bytes of it to keep.

        Drops the closing bracket, and a last line torn by a kill.
        """
        with self._path.open("rb") as file:
            line = file.readline()
            if line in (b"", b"["):
                return 0
            offset = keep = len(line)
            is_trace = line == _BEGIN
            while is_trace and (line := file.readline()):
                text = line.rstrip(b",\n")
                try:
                    event = json.loads(text)
                except (ValueError, RecursionError):
                    break
                match event:
                    # Lines that name lanes have no time.
                    case {"ph": "M"}:
                        pass
                    case {"ph": str(), "ts": int(begin)} if isinstance(duration := event.get("dur", 0), int):
                        self._start_us = max(self._start_us, begin + duration)
                    case _:
                        is_trace = False
                # Kept up to the event's end, without its comma: the next event brings one.
                keep, offset = offset + len(text), offset + len(line)
        if not is_trace:
            raise CheckpointError(
                f"{self._path} holds something else than the trace of a run: {line[:60]!r}",
                hint=f"move {self._path} away, then run the same command again",
            )
        return keep
