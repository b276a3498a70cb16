"""Reads the phases and faults of a run from its trace, bounded and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 26
"""Bytes that are read from the start of a trace, and as many from its end."""
_MOST_PHASES = 20_000
_MOST_MARKS = 2_000


def read_trace(folder: Path) -> dict[str, list[list[Any]]]:
    """Return the latest phases, `[name, begin in s, seconds]`, and marks of replicas, `[lane, name, time in s, seconds,
    cause]`: faults and recoveries."""
    lanes: dict[Any, str] = {}
    phases: list[list[Any]] = []
    marks: list[list[Any]] = []
    begun: dict[str, tuple[str, float]] = {}
    # Becomes the text by which lines of the controller's lane are recognised, once that lane has been named.
    of_controller = b"?"
    for line in _lines(folder / "trace.json"):
        # Substrings decide which lines are worth parsing as JSON.
        is_lane, is_mark = b'"thread_name"' in line, b'"ph":"i"' in line or b" recovery" in line
        if not (is_lane or is_mark or (of_controller in line and b'"ph":"X"' in line)):
            continue
        try:
            event = json.loads(line.rstrip(b",\r\n ]"))
        except (ValueError, RecursionError):
            continue
        match event:
            case {"ph": "M", "name": "thread_name", "tid": int(tid), "args": {"name": str(name)}}:
                lanes[tid] = name[:80]
                of_controller = f'"tid":{tid}}}'.encode() if name == "controller" else of_controller
            case {"ph": "X", "ts": int(ts), "dur": int(took), "name": str(name), "tid": int(tid)}:
                if lanes.get(tid) == "controller":
                    phases.append([name[:40], ts / 1e6, took / 1e6])
            case {"ph": "i", "ts": int(ts), "name": str(name), "tid": int(tid), "args": {"cause": str(cause)}}:
                marks.append([lanes.get(tid, ""), name[:40], ts / 1e6, 0, cause[:400]])
            # Recoveries only: other overlapping spans are requests, of which there are too many.
            case {"ph": "b", "ts": int(ts), "id": str(id_), "cat": str(lane)} if is_mark and len(begun) < _MOST_MARKS:
                begun[id_] = lane[:80], ts / 1e6
            case {"ph": "e", "ts": int(ts), "id": str(id_)} if id_ in begun:
                lane, since = begun.pop(id_)
                marks.append([lane, "recovery", since, ts / 1e6 - since, ""])
            case _:
                pass
        phases, marks = _latest(phases, _MOST_PHASES), _latest(marks, _MOST_MARKS)
    return {"phases": phases[-_MOST_PHASES:], "marks": marks[-_MOST_MARKS:]}


def _latest(events: list[list[Any]], max_events: int) -> list[list[Any]]:
    # Cut at twice the bound, so that most events cost no copy.
    return events[-max_events:] if len(events) > 2 * max_events else events


def _lines(path: Path) -> list[bytes]:
    try:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
            end = file.seek(0, 2)
            if end > _MOST_BYTES:
                file.seek(max(_MOST_BYTES, end - _MOST_BYTES))
                # The last line of the first part and the first line of the second are cut in two.
                lines = lines[:-1] + file.read(_MOST_BYTES).splitlines()[1:]
    except OSError:
        return []
    return lines
