"""Tables: files of rows, each read by its index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_SAMPLES = 16
"""Number of samples, from head to tail, whose bytes identify a file."""
_SAMPLE_BYTES = 4096
BLANK = object()
"""Stands for a row that is a blank line."""


class RowError(Exception):
    """Error of an unusable row; the source adds file and line.

    Args:
        problem: predicate of the error message, after the column's name.
        column: the column, or "" for the whole row.
        value: the value seen.
        hint: how to fix it.
    """

    def __init__(self, problem: str, *, column: str = "", value: object = None, hint: str = "") -> None:
        super().__init__(problem)
        self.column = column
        self.value = value
        self.hint = hint

    def __str__(self) -> str:
        location = f"column {self.column!r} " if self.column else "the row "
        value_text = "" if self.value is None else f": {shortened(self.value)}"
        return f"{location}{self.args[0]}{value_text}"


class FilledRow(dict[str, object]):
    """Row of a columnar format, which writes null for each field of other rows' messages that a message lacks."""


class Table(Protocol):
    """Rows of a file, numbered from 0."""

    @property
    def path(self) -> Path: ...

    def __len__(self) -> int:
        """Return the number of rows, blank lines included."""

    def row(self, index: int) -> object:
        """Return a row as `parse` takes it, or BLANK if its line is blank.

        Raises:
            TaskError: the file has changed.
            OSError: the file cannot be read.
        """

    def rows(self, first: int, end: int) -> Iterator[tuple[int, object]]:
        """Yield the number of each row from `first` to before `end`, and the row; skips blank lines."""

    def parse(self, row: object) -> Mapping[str, object]:
        """Return a row's columns.

        Raises:
            RowError: the row cannot be parsed.
        """

    def describe(self, row: int) -> str:
        """Describe a row's place in the file, such as "line 17"."""


@dataclass(frozen=True)
class Identity:
    """Size of a file and a digest of samples from head to tail, to detect that it has changed."""

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Identity:
        size = path.stat().st_size
        digest = hashlib.blake2b(digest_size=8)
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                # Evenly from the first byte to the last 4 KiB; hashing all of a large file would delay every start.
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        return cls(size, digest.hexdigest())


def shortened(value: object) -> str:
    """Format a value for a message, in at most about 80 characters that cannot control a terminal."""
    text = ascii(value[:200]) if isinstance(value, str | bytes) else ascii(value)
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-10:]}"
