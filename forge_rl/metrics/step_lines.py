"""A file of JSON lines in step order, which changes only at its end: lines are appended, amended and dropped."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from forge_rl.errors import CheckpointError
from forge_rl.system.folders import is_there, reading

_BLOCK_BYTES = 1 << 16

Row = tuple[int, dict[str, object]]
"""Step and values of a line."""


class StepLines:
    """A file of JSON lines in step order, `{"step": 3, ...}`. All calls but `check` and `rows` read only the last lines
    that they need.

        lines = StepLines(folder / "metrics.jsonl")
        lines.check(3)
        lines.rollback(3)
        lines.append(4, {"loss": 0.5})
        lines.amend(3, {"eval/held_out": 0.25})

    Methods raise CheckpointError if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.step = -1
        """Step of the last line; -1 if there is none."""
        self._path = path
        self._journal = path.with_name(f".{path.name}.tail")
        """What `amend` is about to write, so that a process that is killed meanwhile leaves no torn line."""
        self._end: int | None = None
        self._due: int | None = None
        """Step of a rollback that failed."""

    def check(self, step: int) -> None:
        """Check that all lines up to a step are whole, except for the last one, which a crash can have torn."""
        self._finish_amendment()
        torn: tuple[int, bytes] | None = None
        for number, line in enumerate(self._lines(), 1):
            # A crash can only tear the last line; before another one, it is damage.
            if torn is not None:
                raise CheckpointError(
                    f"line {torn[0]} of {self._path} is not a step: {torn[1][:60]!r}",
                    hint="move the file away, or correct the line, then run the same command again",
                )
            row = _decode(line)
            if row is None:
                torn = number, line
            elif row[0] > step:
                break

    def rollback(self, step: int) -> None:
        """Drop the lines after a step. If the file cannot be read, the next row does this first."""
        # Due until the file has been cut: if that fails, the next row does it first.
        self._due, end, last = step, 0, -1
        self._finish_amendment()
        with reading(self._path):
            size = self._path.stat().st_size if is_there(self._path) and self._path.is_file() else 0
        # Backwards, so that this takes as long as the lines to drop, however long the file is.
        for place, line in self._backwards(size):
            row = _decode(line)
            if row is not None and row[0] <= step:
                last, end = row[0], place + len(line)
                break
        append_bytes(self._path, b"", end=end)
        self._due, self._end, self.step = None, end, last

    def _catch_up(self) -> None:
        """Finish the amendment and the rollback that an earlier call could not."""
        if self._due is not None:
            self.rollback(self._due)
        else:
            self._finish_amendment()

    def rows(self) -> Iterator[Row]:
        """Yield the file's rows."""
        for line in self._lines():
            if (row := _decode(line)) is not None:
                yield row

    def append(self, step: int, row: Mapping[str, object]) -> None:
        """Add a line."""
        self._catch_up()
        assert self._end is not None, "the sink was not started"
        assert step >= self.step, f"step {step} was logged after step {self.step}"
        assert "step" not in row, "a metric may not be named 'step'"
        data = encode({"step": step, **row})
        append_bytes(self._path, data, end=self._end)
        self.step, self._end = step, self._end + len(data)

    def amend(self, step: int, values: Mapping[str, object]) -> None:
        """Add values to the last line of a step, inserting one if there is none; later lines are written again."""
        self._catch_up()
        assert self._end is not None, "the sink was not started"
        start, old_values, later_lines = 0, dict[str, object](), list[bytes]()
        for place, line in self._backwards(self._end):
            row = _decode(line)
            if row is not None and row[0] <= step:
                start, old_values = (place, row[1]) if row[0] == step else (place + len(line), {})
                break
            later_lines.append(line)
        tail = b"".join([encode({"step": step, **old_values, **values}), *reversed(later_lines)])
        # The journal fits no file with the rest of a line that a full disk has torn.
        append_bytes(self._path, b"", end=self._end)
        # First the journal, then the file: if the process dies in between, `check` completes the amendment.
        with writing(self._path):
            self._journal.write_bytes(b"%d %d %d\n" % (start, self._end, len(tail)) + tail)
        # Before the file is written: if the disk is full, the next call completes the amendment and goes on from there.
        self._end = start + len(tail)
        self._finish_amendment()

    def _finish_amendment(self) -> None:
        """Write what the journal holds, if it is whole and the file was not written to since."""
        with writing(self._path):
            if not self._journal.is_file():
                return
            head, _, tail = self._journal.read_bytes().partition(b"\n")
            numbers = [int(word) for word in head.split() if word.isdigit()]
            size = self._path.stat().st_size if self._path.is_file() else 0
            if len(numbers) == 3 and numbers[2] == len(tail):
                start, end = numbers[0], numbers[0] + len(tail)
                # The size of a file that the journal still fits: not cut yet, or cut and partly written.
                if start <= size <= max(end, numbers[1]):
                    with self._path.open("r+b" if size else "w+b") as file:
                        file.seek(start)
                        file.write(tail)
                        file.truncate(end)
            # Even a torn one: its amendment has not begun.
            self._journal.unlink()

    def _lines(self) -> Iterator[bytes]:
        """Yield the file's lines."""
        with reading(self._path):
            if is_there(self._path) and self._path.is_file():
                with self._path.open("rb") as file:
                    yield from file

    def _backwards(self, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the place and content of each line before a place, from the last to the first."""
        with reading(self._path):
            if not end:
                return
            with self._path.open("rb") as file:
                tail, size = b"", _BLOCK_BYTES
                while end:
                    size = min(size, end)
                    file.seek(end - size)
                    lines = (file.read(size) + tail).splitlines(keepends=True)
                    end -= size
                    # The first line of a block may begin in the block before.
                    tail = lines.pop(0) if end else b""
                    size = _BLOCK_BYTES + len(tail)  # a long line is read in few pieces
                    place = end + len(tail) + sum(map(len, lines))
                    for line in reversed(lines):
                        place -= len(line)
                        yield place, line


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


def append_bytes(path: Path, data: bytes, *, end: int | None = None) -> None:
    """Append to a file, first truncating it to `end` bytes: a write that hit a full disk leaves it longer."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if end is not None and file.tell() > end:
                file.truncate(end)
            file.write(data)


def encode(row: Mapping[str, object]) -> bytes:
    """Return a row as a line of JSON."""
    # A lone surrogate, which a model can produce, becomes a JSON escape.
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _decode(line: bytes) -> Row | None:
    """Return a line's step and values; None if it is incomplete or malformed."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
        return row.pop("step"), row
    return None
