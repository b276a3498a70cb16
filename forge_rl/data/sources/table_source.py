"""Source of tasks from files, shuffled by a seed, epoch after epoch, with a few megabytes in memory at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from forge_rl.data.sources.order import key_of, permuted, shuffled
from forge_rl.data.sources.rows import Columns
from forge_rl.data.sources.tables import Chunk, Identity, RowError, Table
from forge_rl.errors import ForgeError, TaskError
from forge_rl.types import Task

WINDOW_BYTES = 1 << 22
"""Size of the window of rows shuffled together, in bytes of the file."""
_FEW_ROWS = 1000
"""Minimum number of rows to which the maximum share of bad rows applies."""
_PLACE_BITS = 44
"""Bits of a row's place in its file; the bits above are the file's index."""

Place = tuple[int, int]
"""Index of a file, and a row's place in it."""


@dataclass(frozen=True)
class ReadRow:
    """Result of reading a row: its task, or the error."""

    place: Place
    task: Task | None
    problem: int = 0
    """Problem key, see Columns.read."""
    error: RowError | None = None


@dataclass
class _Position:
    """Position in the endless order of rows: a window of an epoch, and a row in it."""

    epoch: int = 0
    block: int = 0
    """Index of the window's first block in the epoch's order."""
    chunk: int = 0
    """Index of the window's first chunk in that block."""
    row: int = 0
    """Number of rows drawn from the window."""


@dataclass
class _Window:
    """Rows shuffled together."""

    rows: Sequence[tuple[int, int, object]]
    """File, place in it and row, in the order of drawing."""
    next_block: int
    """Position of the next window, as in `_Position`."""
    next_chunk: int


@dataclass(eq=False, repr=False)
class TableSource:
    """Source of tasks from files; implements Source.

        source = TableSource("train", open_tables(find_files("data/*.jsonl")), Columns(), seed=0, held_out_share=0.1)

    Each epoch yields every row once, except held-out ones. The seed orders the blocks of all files; windows of 4 MiB of
    blocks are read at a time and their rows shuffled. A saved position is a few numbers, and resuming reads nothing
    before its window.

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
        self._ends = list(itertools.accumulate(table.blocks for table in self.tables))
        if not self._ends or self._ends[-1] == 0:
            raise TaskError(f"the files of {self.name!r} have no rows", hint="leave these tasks out")
        try:
            self.files = [Identity.of(table.path) for table in self.tables]
        except OSError as error:
            raise TaskError(f"{error.filename} cannot be read: {error.strerror}", hint="check the file") from error
        # Constant size for any number of files, because the state is saved with each batch.
        digest = f"{key_of(*((each.size, each.digest) for each in self.files)):016x}"
        self._files = [len(self.files), sum(each.size for each in self.files), digest]
        self._position = _Position()
        self._window: _Window | None = None
        self._reading: tuple[tuple[int, int, int], Iterator[Chunk]] | None = None
        """Position where the last window ended, and the chunks from there, to avoid rereading a large block."""
        self._usable = True
        """False while the epoch has yielded no task."""
        self._drawn = 0
        self._left_out = np.empty(0, np.uint64)

    def __repr__(self) -> str:
        return f"{self.name}({len(self.tables)} files) seed {self.seed}, epoch {self.epoch:.2f}"

    @property
    def epoch(self) -> float:
        """Passes over the files so far: 1.5 is halfway through the second."""
        at = self._position
        within = at.row / len(self._window.rows) if self._window is not None and self._window.rows else 0.0
        blocks = self._window.next_block - at.block if self._window is not None else 1
        return at.epoch + min(1.0, (at.block + within * blocks) / self._ends[-1])

    def draw(self) -> Task:
        """Return the next task to train on.

        Raises:
            TaskError: too many bad rows; no row can be trained on; a file has changed.
        """
        while True:
            read = self._next()
            if read.error is not None:
                self._count_bad(read)
            elif read.task is not None and not self.is_held_out(read.problem) and not self._is_left_out(read.place):
                self._usable = True
                return read.task

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return held-out tasks, see Source.held_out; possibly none with few tasks and a small share.

        Raises:
            TaskError: held_out_share is 0, there is no task to evaluate on, or a row is bad.
        """
        if tasks > 0 and self.held_out_share == 0:
            raise TaskError(f"nothing of {self.name!r} is held out", hint="set --data.held-out-share, or --eval-tasks")
        found: dict[int, Task] = {}
        key, size = key_of("held out"), self._ends[-1]
        for number in range(size if tasks > 0 else 0):
            for read in self.read_block(permuted(number, size, key)):
                if read.error is not None and self.max_bad_rows == 0:
                    raise self.failure(read)
                if read.task is not None and self.is_held_out(read.problem) and not self._is_left_out(read.place):
                    found.setdefault(read.problem, read.task)
                if len(found) == tasks:
                    return tuple(found.values())
        if tasks > 0 and not found and self.held_out_share == 1:
            raise TaskError(f"no task of {self.name!r} can be evaluated on", hint="inspect it: python -m apps.data")
        return tuple(found.values())

    @property
    def blocks(self) -> int:
        """Number of blocks in all files."""
        return self._ends[-1]

    def read_block(self, block: int) -> Iterator[ReadRow]:
        """Read the rows of a block, in file order, without changing the source's position."""
        file, number = self._find(block)
        for chunk in self._chunks(file, number):
            for place, row in chunk.rows:
                yield self._parsed(file, place, row)

    def leave_out(self, places: Sequence[Place]) -> None:
        """Exclude the tasks of these rows, for example because of overlong prompts."""
        self._left_out = np.array(sorted(file << _PLACE_BITS | place for file, place in places), np.uint64)

    def is_held_out(self, problem: int) -> bool:
        """Return True if the problem with this key is held out, which does not depend on the seed."""
        return problem < self.held_out_share * 2**64

    def failure(self, read: ReadRow) -> TaskError:
        """Return the error for a bad row, with file, line, column and value."""
        assert read.error is not None
        return TaskError(
            f"{self.describe(read.place)}: {read.error}",
            hint=read.error.hint or "fix it, or allow some bad rows with --data.max-bad-rows 0.01",
        )

    def describe(self, place: Place) -> str:
        """Describe a place by its file and its line or row."""
        table = self.tables[place[0]]
        return f"{table.path}, {table.describe(place[1])}"

    def state(self) -> dict[str, object]:
        return {
            "files": self._files,
            "seed": self.seed,
            "held_out_share": self.held_out_share,
            **asdict(self._position),
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from a saved position.

        Raises:
            TaskError: the state has other files, files that have changed, or another seed or share.
        """
        position = {name: state.get(name) for name in asdict(self._position)}
        if not all(isinstance(number, int) and number >= 0 for number in position.values()):
            raise TaskError(f"the saved state of source {self.name!r} is malformed: {dict(state)}")
        expected = self.state()
        if state.get("files") != expected["files"]:
            difference = _difference(state.get("files"), self._files)
            raise TaskError(
                f"the files of {self.name!r} have changed since the run was saved: {difference}",
                hint="restore the old files to resume, or start a new run with another --out",
            )
        if {**expected, **position} != dict(state):
            raise TaskError(
                f"the saved state of source {self.name!r} has {_settings(state)}, this one {_settings(expected)}",
                hint="resume with the original settings, or start a new run",
            )
        self._position, self._window, self._reading = _Position(**position), None, None  # type: ignore[arg-type]
        self._usable = True

    def _next(self) -> ReadRow:
        """Read the next row of the endless order."""
        at = self._position
        while True:
            if self._window is None:
                if at.block >= self._ends[-1]:
                    if not self._usable:
                        raise TaskError(
                            f"no row of {self.name!r} can be trained on: all are held out, too long or bad",
                            hint="inspect them: python -m apps.data",
                        )
                    at = self._position = _Position(epoch=at.epoch + 1)
                if (at.block, at.chunk, at.row) == (0, 0, 0):
                    self._usable = False
                self._window = self._load(at)
            if at.row < len(self._window.rows):
                file, place, row = self._window.rows[at.row]
                at.row += 1
                self._drawn += 1
                return self._parsed(file, place, row)
            at = self._position = _Position(at.epoch, self._window.next_block, self._window.next_chunk)
            self._window = None

    def _load(self, at: _Position) -> _Window:
        """Read the window that begins at a position."""
        key, size = key_of(self.seed, at.epoch), self._ends[-1]
        rows: list[tuple[int, int, object]] = []
        gathered, block, first = 0, at.block, at.chunk
        while block < size:
            file, number = self._find(permuted(block, size, key))
            if self._reading is not None and self._reading[0] == (at.epoch, block, first):
                chunks = self._reading[1]
            else:
                chunks = itertools.islice(self._chunks(file, number), first, None)
            for index, chunk in enumerate(chunks, first):
                if gathered >= WINDOW_BYTES:
                    self._reading = (at.epoch, block, index), itertools.chain([chunk], chunks)
                    return _Window(_in_order(rows, key_of(key, at.block, at.chunk)), block, index)
                rows += [(file, place, row) for place, row in chunk.rows]
                gathered += max(1, chunk.bytes)
            block, first, self._reading = block + 1, 0, None
        return _Window(_in_order(rows, key_of(key, at.block, at.chunk)), block, 0)

    def _find(self, block: int) -> tuple[int, int]:
        """Return the index of a block's file, and the block's index in that file."""
        file = bisect.bisect_right(self._ends, block)
        return file, block - (self._ends[file - 1] if file else 0)

    def _chunks(self, file: int, block: int) -> Iterator[Chunk]:
        table = self.tables[file]
        try:
            if table.path.stat().st_size != self.files[file].size:
                raise TaskError(f"{table.path} changed while it was being read", hint="start the run again")
            yield from table.chunks(block)
        except OSError as error:
            raise TaskError(f"{table.path} cannot be read: {error.strerror or error}", hint="check the file") from error

    def _parsed(self, file: int, place: int, row: object) -> ReadRow:
        try:
            written = row if isinstance(row, bytes) else b""
            task, problem = self.columns.read(self.tables[file].parse(row), self.name, written)
        except RowError as error:
            return ReadRow((file, place), None, error=error)
        return ReadRow((file, place), task, problem)

    def _is_left_out(self, place: Place) -> bool:
        if not len(self._left_out):
            return False
        number = np.uint64(place[0] << _PLACE_BITS | place[1])
        index = int(np.searchsorted(self._left_out, number))
        return index < len(self._left_out) and bool(self._left_out[index] == number)

    def _count_bad(self, read: ReadRow) -> None:
        self.bad_rows += 1
        if self.bad_rows > self.max_bad_rows * max(self._drawn, _FEW_ROWS):
            raise self.too_many_bad(self.bad_rows, self._drawn, read) if self.max_bad_rows else self.failure(read)

    def too_many_bad(self, bad: int, rows: int, read: ReadRow) -> ForgeError:
        """Return the error for exceeding the maximum share of bad rows."""
        return TaskError(
            f"{bad} of {rows} rows of {self.name!r} are bad, more than --data.max-bad-rows {self.max_bad_rows:g}; one "
            f"is {self.describe(read.place)}: {read.error}",
            hint=read.error.hint if read.error else "",
        )


def _in_order(rows: list[tuple[int, int, object]], key: int) -> Sequence[tuple[int, int, object]]:
    order: npt.NDArray[np.int64] = shuffled(len(rows), key)
    return [rows[index] for index in order.tolist()]


def _difference(saved: object, now: Sequence[object]) -> str:
    """Describe how the files changed since the state was saved."""
    match saved, now:
        case [int(files), int(size), _], [int(files_now), int(size_now), _] if (files, size) != (files_now, size_now):
            return f"there were {files:,} with {size:,} bytes, there are {files_now:,} with {size_now:,}"
    return "their contents differ"


def _settings(state: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {state.get(name)}" for name in ("seed", "held_out_share"))
