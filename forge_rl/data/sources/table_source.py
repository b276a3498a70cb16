"""Source of tasks from files, shuffled by a seed, epoch after epoch, with one row in memory at a time."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forge_rl.data.sources.order import key_of, permuted
from forge_rl.data.sources.rows import Columns
from forge_rl.data.sources.tables import BLANK, Identity, RowError, Table
from forge_rl.errors import TaskError
from forge_rl.types import Task

_SHOWN_ROWS = 5
"""Bad rows that an error shows."""
_REMEMBERED_ROWS = 10_000
_FEW_ROWS = 1000
"""Minimum number of rows to which the maximum share of bad rows applies."""


class ReadRow(NamedTuple):
    """Result of reading a row: its task, or the error."""

    row: int
    """Index of the row across all files of its source."""
    task: Task | None
    problem: int = 0
    """Problem key, see Columns.read."""
    error: RowError | None = None


@dataclass(eq=False, repr=False)
class TableSource:
    """Source of tasks from files; implements Source.

        source = TableSource("train", open_tables(find_files("data/*.jsonl")), Columns(), seed=0, held_out_share=0.1)

    Each epoch yields every row once, except held-out ones, in an order that the seed and the epoch choose. A saved
    position is the number of rows passed so far.

    Raises:
        TaskError: the files have no rows or cannot be read.
    """

    name: str
    tables: Sequence[Table]
    columns: Columns
    seed: int
    """Seed of the order."""
    held_out_share: float
    """Share of all problems that is held out, from 0 to 1; with 1, the source is evaluation-only."""
    max_bad_rows: float = 0.0
    """Maximum share of bad rows, which are skipped and counted. With 0, the first one is an error."""
    bad_rows: int = field(default=0, init=False)
    """Number of bad rows drawn and skipped."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_share <= 1:
            raise TaskError(f"held_out_share is {self.held_out_share}", hint="set it from 0 to 1, such as 0.1")
        self._ends = list(itertools.accumulate(map(len, self.tables)))
        if not self._ends or self._ends[-1] == 0:
            raise TaskError(f"the files of {self.name!r} have no rows", hint="leave these tasks out")
        try:
            self.files = [Identity.of(table.path) for table in self.tables]
        except OSError as error:
            raise TaskError(f"{error.filename} cannot be read: {error.strerror}", hint="check the file") from error
        # Constant size for any number of files, because the state is saved with each batch.
        identities = ((file.size, file.digest, len(table)) for file, table in zip(self.files, self.tables, strict=True))
        self._files = [len(self.files), sum(file.size for file in self.files), f"{key_of(*identities):016x}"]
        self._position = 0
        self._drawn = 0
        """Rows drawn since this source was made."""
        # One byte a row; empty until rows are left out.
        self._left_out = np.zeros(0, np.bool_)
        self._last_rows: OrderedDict[str, int] = OrderedDict()
        """Rows of the tasks drawn last, by the tasks' ids."""

    def __repr__(self) -> str:
        return f"{self.name}({len(self.tables)} files) seed {self.seed}, epoch {self.epoch:.2f}"

    def __len__(self) -> int:
        """Return the number of rows in all files, blank lines included."""
        return self._ends[-1]

    @property
    def epoch(self) -> float:
        """Passes over the files so far: 1.5 is halfway through the second."""
        return self._position / len(self)

    def draw(self) -> Task:
        """Return the next task to train on.

        Raises:
            TaskError: too many bad rows; no row can be trained on; a file has changed.
        """
        for _ in range(2 * len(self)):  # includes a whole epoch, wherever it begins
            epoch, place = divmod(self._position, len(self))
            self._position += 1
            # The position alone decides the row, so resuming is one assignment, whatever the size of the files.
            row = permuted(place, len(self), key_of(self.seed, epoch))
            if (read_row := self._read(row)) is None:
                continue
            self._drawn += 1
            if read_row.error is not None:
                self._count_bad(read_row)
            elif read_row.task is not None and not self.is_held_out(read_row.problem) and not self._is_left_out(row):
                self._last_rows[read_row.task.id] = row
                if len(self._last_rows) > _REMEMBERED_ROWS:
                    self._last_rows.popitem(last=False)
                return read_row.task
        raise TaskError(
            f"no row of {self.name!r} can be trained on: all are held out, too long or bad",
            hint="inspect them: python -m apps.data",
        )

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return held-out tasks, see Source.held_out; possibly none with few tasks and a small share.

        Raises:
            TaskError: held_out_share is 0, no task can be evaluated on, or a row is bad.
        """
        if tasks > 0 and self.held_out_share == 0:
            raise TaskError(f"nothing of {self.name!r} is held out", hint="set --data.held-out-share, or --eval-tasks")
        held_out_tasks: dict[int, Task] = {}
        # A fixed key instead of the seed: every run of these files evaluates the same tasks, in the same order.
        key = key_of("held out")
        for place in range(len(self) if tasks > 0 else 0):
            row = permuted(place, len(self), key)
            if (read_row := self._read(row)) is None:
                continue
            if read_row.error is not None and self.max_bad_rows == 0:
                raise self.failure(read_row)
            if read_row.task is not None and self.is_held_out(read_row.problem) and not self._is_left_out(row):
                # A problem that several rows word differently is evaluated once.
                held_out_tasks.setdefault(read_row.problem, read_row.task)
            if len(held_out_tasks) == tasks:
                break
        if tasks > 0 and not held_out_tasks and self.held_out_share == 1:
            raise TaskError(f"no task of {self.name!r} can be evaluated on", hint="inspect it: python -m apps.data")
        return tuple(held_out_tasks.values())

    def read(self, first: int, end: int) -> Iterator[ReadRow]:
        """Read the rows from `first` to before `end`, without blank lines and without changing the position."""
        while first < end:
            table, offset = self._table_of(first)
            table_end = min(end, offset + len(table))
            try:
                for row, raw_row in table.rows(first - offset, table_end - offset):
                    yield self._parsed(table, offset + row, raw_row)
            except OSError as error:
                raise _unreadable(table, error) from error
            first = table_end

    def _read(self, row: int) -> ReadRow | None:
        """Read one row; returns None if it is a blank line."""
        table, offset = self._table_of(row)
        try:
            raw_row = table.row(row - offset)
        except OSError as error:
            raise _unreadable(table, error) from error
        return None if raw_row is BLANK else self._parsed(table, row, raw_row)

    def _table_of(self, row: int) -> tuple[Table, int]:
        """Return the table with a row, and the number of its own first row."""
        file = bisect.bisect_right(self._ends, row)
        table = self.tables[file]
        return table, self._ends[file] - len(table)

    def leave_out(self, rows: Sequence[int]) -> None:
        """Exclude the tasks of these rows, for example because of overlong prompts."""
        self._left_out = np.zeros(len(self), np.bool_)
        self._left_out[list(rows)] = True

    def is_held_out(self, problem: int) -> bool:
        """Return True if the problem with this key is held out, which does not depend on the seed."""
        return problem < self.held_out_share * 2**64

    def failure(self, read_row: ReadRow, *following: ReadRow) -> TaskError:
        """Return the error for a bad row, with file, line, column and value; also names the next bad ones, if any."""
        assert read_row.error is not None
        bad_rows = [row for row in following if row.error is not None]
        more = [f"  {self.describe(row.row)}: {row.error}" for row in bad_rows[: _SHOWN_ROWS - 1]]
        if bad_rows:
            more.append(f"  {len(bad_rows) + 1:,} of {len(following) + 1:,} rows from there on are bad")
        return TaskError(
            "\n".join([f"{self.describe(read_row.row)}: {read_row.error}", *more]),
            hint=read_row.error.hint or "fix it, or allow some bad rows with --data.max-bad-rows 0.01",
        )

    def describe(self, row: int) -> str:
        """Describe a row's place by its file and its line or number."""
        table, offset = self._table_of(row)
        return f"{table.path}, {table.describe(row - offset)}"

    def describe_task(self, task: Task) -> str:
        """Describe a recently drawn task's place by its file and its line or number; "" if it is not known."""
        row = self._last_rows.get(task.id)
        return "" if row is None else self.describe(row)

    def state(self) -> dict[str, object]:
        return {
            "files": self._files,
            "seed": self.seed,
            "held_out_share": self.held_out_share,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from a saved position.

        Raises:
            TaskError: the state has other files, files that have changed, or another seed or share.
        """
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise TaskError(f"the saved state of source {self.name!r} is malformed: {dict(state)}")
        expected = {**self.state(), "position": position}
        # Compared first, as changed files are the likeliest cause, and the message can say how they differ.
        if state.get("files") != expected["files"]:
            difference = _difference(state.get("files"), self._files)
            raise TaskError(
                f"the files of {self.name!r} have changed since the run was saved: {difference}",
                hint="restore the old files to resume, or start a new run with another --out",
            )
        if expected != dict(state):
            raise TaskError(
                f"the saved state of source {self.name!r} has {_settings(state)}, this one {_settings(expected)}",
                hint="resume with the original settings, or start a new run",
            )
        self._position = position

    def reseed(self, seed: int) -> None:
        """Begin again, in the order of another seed."""
        self.seed, self._position = seed, 0

    def _parsed(self, table: Table, row: int, raw_row: object) -> ReadRow:
        try:
            raw_bytes = raw_row if isinstance(raw_row, bytes) else b""
            task, problem = self.columns.read(table.parse(raw_row), self.name, raw_bytes)
        except RowError as error:
            return ReadRow(row, None, error=error)
        return ReadRow(row, task, problem)

    def _is_left_out(self, row: int) -> bool:
        return len(self._left_out) > 0 and bool(self._left_out[row])

    def _count_bad(self, read_row: ReadRow) -> None:
        self.bad_rows += 1
        # A share of few rows says little: the first bad row of ten must not end a run that allows 1%.
        if self.bad_rows <= self.max_bad_rows * max(self._drawn, _FEW_ROWS):
            return
        if self.max_bad_rows == 0:
            raise self.failure(read_row)
        raise TaskError(
            f"{self.bad_rows} of {self._drawn} rows of {self.name!r} are bad, more than --data.max-bad-rows "
            f"{self.max_bad_rows:g}; one is {self.describe(read_row.row)}: {read_row.error}",
            hint=read_row.error.hint if read_row.error else "",
        )


def _unreadable(table: Table, error: OSError) -> TaskError:
    return TaskError(f"{table.path} cannot be read: {error.strerror or error}", hint="check the file")


def _difference(saved_state: object, current_state: Sequence[object]) -> str:
    """Describe how the files changed since the state was saved."""
    match saved_state, current_state:
        case [int(files), int(size), _], [int(files_now), int(size_now), _] if (files, size) != (files_now, size_now):
            return f"there were {files:,} with {size:,} bytes, there are {files_now:,} with {size_now:,}"
    return "their contents differ"


def _settings(state: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {state.get(name)}" for name in ("seed", "held_out_share"))
