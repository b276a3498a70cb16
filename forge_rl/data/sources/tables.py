"""Tables: files of rows, read in blocks, any of which can be read by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CHUNK_BYTES = 1 << 20
"""Size of the pieces in which a block is read where it is larger."""
_SAMPLES = 16
"""Places of a file, head and tail included, whose bytes identify it."""
_SAMPLE_BYTES = 4096


class RowError(Exception):
    """A row that cannot be used; the source adds file and line.

    Args:
        problem: what is wrong, to follow the column.
        column: the column, or "" if it is the whole row.
        value: the value seen.
        hint: what to do about it.
    """

    def __init__(self, problem: str, *, column: str = "", value: object = None, hint: str = "") -> None:
        super().__init__(problem)
        self.column = column
        self.value = value
        self.hint = hint

    def __str__(self) -> str:
        where = f"column {self.column!r} " if self.column else "the row "
        seen = "" if self.value is None else f": {shortened(self.value)}"
        return f"{where}{self.args[0]}{seen}"


@dataclass(frozen=True)
class Chunk:
    """Rows that lie beside one another in a file."""

    rows: Sequence[tuple[int, object]]
    """Place of each row in its file, and the row as `Table.parse` takes it."""
    bytes: int


class Table(Protocol):
    """Rows of a file."""

    @property
    def path(self) -> Path: ...

    @property
    def blocks(self) -> int:
        """Number of blocks; some may hold no row."""

    def chunks(self, block: int) -> Iterator[Chunk]:
        """Read the rows of a block, in the order of the file."""

    def parse(self, row: object) -> Mapping[str, object]:
        """Return a row's columns.

        Raises:
            RowError: it has none.
        """

    def describe(self, place: int) -> str:
        """Say where in the file a row is, such as "line 17"."""


@dataclass(frozen=True)
class Identity:
    """Size of a file and a digest of bytes from its head to its tail: enough to tell that it has changed."""

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Identity:
        size = path.stat().st_size
        digest = hashlib.blake2b(digest_size=8)
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        return cls(size, digest.hexdigest())


def shortened(value: object) -> str:
    """Write a value for a message, in at most about 80 letters, none of which does anything to a terminal."""
    text = ascii(value[:200]) if isinstance(value, str | bytes) else ascii(value)
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-10:]}"
