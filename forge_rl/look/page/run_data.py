"""Everything that the page shows of a run folder, as JSON. A folder may be anybody's: reads are bounded and checked."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.look.page.episode_json import clip, coded, episode_json, rounded
from forge_rl.look.page.trace_reader import read_trace
from forge_rl.look.past_runs import as_float, flag_of, metrics_of, read_bounded, read_run, settings_of
from forge_rl.metrics.advisories import advisories_of
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import FOLDER, recorded_files
from forge_rl.metrics.vocabulary import read_vocabulary

MOST_EPISODES = 200_000
"""Episodes in the page's list, the latest ones."""
_MOST_METRICS, _MOST_STEPS = 600, 20_000
_MOST_SETTINGS = 2_000
_MOST_EVENTS = 2_000
_EVENTS_BYTES = 1 << 22
_MOST_FAULTS = 1_000
_TEXTS = {"set": 80, "source": 80, "task": 120, "outcome": 40, "problem": 200, "answer": 80, "asked": 80, "said": 80}
"""Columns of text in the list, and their maximum lengths."""
_NUMBERS = ("group", "index", "version", "seconds", "reward", "advantage", "tokens", "turn_count")


class RunData:
    """Reads a run folder for the page; files of episodes that have not changed are read once.

        run = RunData(Path("runs/grpo-1a2b3c4d"))
        run.data()["episodes"], run.episode("12-trained-7")

    Raises:
        ConfigError: it is not a run folder.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a run folder", hint="list runs with: forge-rl runs")
        self.folder = folder
        self._columns: dict[Path, tuple[tuple[int, int], dict[str, list[Any]] | str]] = {}
        """Columns of each file or its problem, by its time and size."""
        self._pieces: list[bytes] = []

    def state(self) -> list[object]:
        """Return JSON that changes whenever `data` does, apart from the trace; takes milliseconds."""
        names = ("config.json", "versions.json", "metrics.jsonl", "events.jsonl", "summary.json")
        paths = [*(self.folder / name for name in names), *(path for _, _, path in recorded_files(self.folder))]
        return [read_run(self.folder).state, *(_stamp(path) for path in paths)]

    def data(self) -> dict[str, Any]:
        """Return everything but whole episodes."""
        run, versions = read_run(self.folder), read_bounded(self.folder / "versions.json")
        summary = read_bounded(self.folder / "summary.json")
        settings = settings_of(read_bounded(self.folder / "config.json"))
        metrics, left_out = self._metrics()
        episodes, problems = self._episodes()
        if left_out:
            problems.append(f"{left_out} metrics are left out: the page shows at most {_MOST_METRICS}")
        seconds = as_float(summary.get("seconds"))
        return {
            "name": clip(self.folder.resolve().name, 200),
            "model": clip(run.model, 200),
            "state": run.state,
            "step": run.step,
            "steps": run.steps,
            "changed_s": run.changed_s,
            "seconds": seconds,
            "score_before": run.score_before,
            "score_after": run.score_after,
            "best_step": run.best_step,
            "settings": _texts_of({flag_of(name): value for name, value in settings.items()}),
            "versions": _texts_of(settings_of(versions)),
            "metrics": metrics,
            "events": _events(self.folder),
            "faults": _faults(summary.get("faults")),
            "trace": read_trace(self.folder),
            "episodes": episodes,
            "advisories": [
                [clip(advisory.text, 600), advisory.since, end]
                for advisory, end in advisories_of(
                    map(_numbers_of, self._rows()), max_lag=self._max_lag(), settings=settings
                )
            ],
            "problems": problems,
        }

    def episode(self, name: str) -> dict[str, Any]:
        """Return a whole episode by its name, such as 12-trained-7.

        Raises:
            ConfigError: the run has no such episode.
            ForgeError: its file cannot be read.
        """
        file_name, _, row = name.rpartition("-")
        path = next((path for step, kind, path in recorded_files(self.folder) if f"{step}-{kind}" == file_name), None)
        place = int(row) if row.isascii() and row.isdecimal() and len(row) < 10 else -1
        file = None if path is None else EpisodeFile(path)
        if file is None or not 0 <= place < len(file):
            raise ConfigError(f"{self.folder} has no episode {name[:100]!r}", hint="reload the page")
        # Read when first needed, and again while it is missing.
        self._pieces = self._pieces or read_vocabulary(self.folder / FOLDER)
        return episode_json(name, file[place], self._pieces)

    def sample(self) -> Iterator[str]:
        """Yield the names of episodes, the most telling first: of each file the worst, the best and a random one, or
        the first failed ones; then all others. Files are spread over the run."""
        files = [(step, kind, path) for step, kind, path in recorded_files(self.folder) if self._listed(path)]
        rest: list[list[str]] = []
        for step, kind, path in _spread(files):
            columns = self._listed(path)
            assert columns is not None, "it was listed"
            rewards: list[float | None] = columns["reward"]
            rows = list(range(len(rewards)))
            scored = [(reward, row) for row, reward in enumerate(rewards) if reward is not None]
            sampled_rows = rows[:3]
            if scored:
                # Seeded by the step, so that a page that is written again holds the same episodes.
                sampled_rows = [min(scored)[1], max(scored)[1], random.Random(step).choice(scored)[1]]
            yield from (f"{step}-{kind}-{row}" for row in dict.fromkeys(sampled_rows))
            rest.append([f"{step}-{kind}-{row}" for row in rows if row not in sampled_rows])
        for names in rest:
            yield from names

    def _rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the latest steps, in order."""
        rows: dict[int, dict[str, Any]] = {}
        for row in metrics_of(self.folder):
            rows.setdefault(row["step"], {}).update(row)
        return [rows[step] for step in sorted(rows)[-_MOST_STEPS:]]

    def _max_lag(self) -> int:
        match read_bounded(self.folder / "config.json"):
            case {"schedule": {"max_lag": int(lag)}}:
                return lag
        return 0

    def _metrics(self) -> tuple[dict[str, Any], int]:
        rows = {row["step"]: row for row in self._rows()}
        steps = list(rows)
        names = dict.fromkeys(
            name for step in steps for name, value in rows[step].items() if as_float(value) is not None
        )
        names.pop("step", None)
        shown_names = [name for name in names if len(name) <= 200][:_MOST_METRICS]
        columns = {name: [rounded(as_float(rows[step].get(name))) for step in steps] for name in shown_names}
        return {"steps": steps, "columns": columns}, len(names) - len(shown_names)

    def _episodes(self) -> tuple[dict[str, Any], list[str]]:
        """Return the list of episodes in columns, the earliest first, and the files that cannot be read."""
        tables, problems, count = [], list[str](), 0
        files = recorded_files(self.folder)
        # The latest first, so that the bound leaves out the earliest.
        for place, (step, kind, path) in enumerate(reversed(files)):
            columns = self._listed(path)
            if columns is None:
                problems.append(clip(str(self._columns[path][1]), 300))
                continue
            count += len(columns["step"])
            if count > MOST_EPISODES:
                left_out = f"{len(files) - place} files up to step {step} are left out"
                problems.append(f"the page lists the latest {MOST_EPISODES} episodes; {left_out}")
                break
            tables.append((step, kind, columns))
        tables.reverse()
        paths = {path for _, _, path in files}
        # Files that the run has deleted are forgotten.
        self._columns = {path: entry for path, entry in self._columns.items() if path in paths}
        sizes = [[step, kind, len(columns["step"])] for step, kind, columns in tables]
        listed: dict[str, Any] = {"files": sizes, "columns": {}, "texts": {}}
        for name, letters in _TEXTS.items():
            texts = (text or "" for _, _, columns in tables for text in columns[name])
            # Texts recur, so each is held once and the column refers to it by number.
            listed["columns"][name], listed["texts"][name] = coded(texts, letters)
        for name in _NUMBERS:
            listed["columns"][name] = [rounded(value) for _, _, columns in tables for value in columns[name]]
        listed["columns"]["since"] = [
            rounded(offset_s) for _, _, columns in tables for offset_s in _since(columns["began"])
        ]
        return listed, problems

    def _listed(self, path: Path) -> dict[str, list[Any]] | None:
        """Return the columns of a file; None if it cannot be read."""
        state = _stamp(path)
        cached = self._columns.get(path)
        # A file that changes is read again, even one that could not be read.
        if cached is None or cached[0] != state:
            columns: dict[str, list[Any]] | str
            try:
                columns = EpisodeFile(path).columns()
            except ForgeError as error:
                columns = error.message
            cached = self._columns[path] = state, columns
        return None if isinstance(cached[1], str) else cached[1]


def _since(began: list[float | None]) -> list[float | None]:
    """Return when each episode of a file began, in seconds after the first one."""
    first = min((begin_s for begin_s in began if begin_s is not None), default=0.0)
    return [None if begin_s is None else begin_s - first for begin_s in began]


def _numbers_of(row: dict[str, Any]) -> dict[str, object]:
    """Return the finite numbers of a step, and its "step"."""
    values = {name: as_float(value) for name, value in row.items()}
    return {**{name: value for name, value in values.items() if value is not None}, "step": row["step"]}


def _stamp(path: Path) -> tuple[int, int]:
    """Return a file's time of last change and its size; zeros if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _spread(files: list[Any]) -> Iterator[Any]:
    """Yield the last, the first, the middle, the quarters, and so on."""
    used_places, count = set[int](), len(files)
    parts = 1
    while len(used_places) < count:
        for part in range(parts, -1, -1):
            place = part * (count - 1) // parts
            if place not in used_places:
                used_places.add(place)
                yield files[place]
        parts *= 2


def _texts_of(settings: dict[str, object]) -> dict[str, str]:
    texts = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items())
    return {clip(name, 200): clip(text, 2_000) for name, text in list(texts)[:_MOST_SETTINGS]}


def _events(folder: Path) -> list[list[Any]]:
    """Return the latest events, `[time in s since 1970, level, text]`."""
    path, events = folder / "events.jsonl", []
    try:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _EVENTS_BYTES))
            lines = file.read(_EVENTS_BYTES).splitlines()[-_MOST_EVENTS:]
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(line):
                case {"time": int() | float() as time, "level": str(level), "text": str(text)}:
                    events.append([as_float(time), clip(level, 20), clip(text, 4_000)])
    return events


def _faults(faults: object) -> list[dict[str, Any]]:
    """Return the faults of a summary."""
    records = []
    for fault in faults[:_MOST_FAULTS] if isinstance(faults, list) else ():
        if isinstance(fault, dict):
            replica = fault.get("replica")
            records.append(
                {
                    "name": clip(f"{fault.get('service')}{'' if replica is None else f'/{replica}'}", 80),
                    "cause": clip(str(fault.get("cause", "")), 2_000),
                    "phase": clip(str(fault.get("phase", "")), 40),
                    "at_s": as_float(fault.get("at_s")),
                    "fatal": fault.get("fatal") is True,
                    "recovered_s": as_float(fault.get("recovered_s")),
                }
            )
    return records
