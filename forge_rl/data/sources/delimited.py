"""Reads CSV and TSV files with a header (RFC 4180) from any position, including line breaks inside quotes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from forge_rl.data.sources.jsonl import BLOCK_BYTES, MOST_ROW_BYTES, JSONLines
from forge_rl.data.sources.tables import Chunk, RowError
from forge_rl.errors import TaskError

_NOT_UTF8 = "is not UTF-8"


class Delimited:
    """Rows of strings, with the columns named by the first row.

    A line break ends a row if the number of quotes before it is even. Opening the file counts the quotes of each block
    in one pass (a second for 2 GB), so that a block can be read alone. A block has the rows that begin in it.
    """

    def __init__(self, path: Path, delimiter: str) -> None:
        self.path = path
        self._delimiter = delimiter
        self._bytes = path.stat().st_size
        self.blocks = -(-self._bytes // BLOCK_BYTES)
        self._quoted = bytearray()
        """1 for each block whose preceding byte is inside quotes, else 0."""
        csv.field_size_limit(MOST_ROW_BYTES)
        with path.open("rb") as file:
            quotes = file.read(BLOCK_BYTES - 1).count(b'"')
            self._quoted.append(0)
            for _ in range(1, self.blocks):
                self._quoted.append(quotes % 2)
                quotes += file.read(BLOCK_BYTES).count(b'"')
            quotes += file.read().count(b'"')
            if quotes % 2:
                raise TaskError(
                    f"{path} has an unclosed quote: {quotes} quotes in total",
                    hint='write a quote inside a field as "", and quote the whole field',
                )
            self._head = self._next_row(file, 0, quoted=False, limit=MOST_ROW_BYTES) or self._bytes
            file.seek(0)
            head = file.read(self._head)
        try:
            self.columns = next(self._reader([head.decode("utf-8-sig")]), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise TaskError(f"{path}: the first row cannot be read: {error}", hint="save it as UTF-8") from error
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice or not any(self.columns):
            seen = f"names the column {twice[0]!r} twice" if twice else "is empty"
            raise TaskError(f"{path}: the first row {seen}", hint="name each column once in the first row")

    def chunks(self, block: int) -> Iterator[Chunk]:
        with self.path.open("rb") as file:
            begin = self._first_row(file, block, BLOCK_BYTES)
            if begin is None or begin >= (block + 1) * BLOCK_BYTES:
                return
            end = self._first_row(file, block + 1, MOST_ROW_BYTES) or self._bytes
            file.seek(begin)
            data = file.read(end - begin)
        yield Chunk(list(self._rows(data, begin)), len(data))

    def parse(self, row: object) -> Mapping[str, object]:
        if isinstance(row, RowError):
            raise row
        assert isinstance(row, list)
        if len(row) != len(self.columns):
            raise RowError(f"has {len(row)} fields, but the first row names {len(self.columns)} columns", value=row)
        for column, text in zip(self.columns, row, strict=True):
            if not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
                raise RowError(_NOT_UTF8, column=column, value=text, hint="save the file as UTF-8")
        return dict(zip(self.columns, row, strict=True))

    def describe(self, place: int) -> str:
        return JSONLines(self.path).describe(place)

    def _first_row(self, file: BinaryIO, block: int, limit: int) -> int | None:
        """Return the offset of the first row that begins in a block or after it, within `limit` bytes."""
        if block == 0:
            return self._head
        if block >= self.blocks:
            return None
        return self._next_row(file, block * BLOCK_BYTES - 1, quoted=bool(self._quoted[block]), limit=limit)

    def _next_row(self, file: BinaryIO, at: int, *, quoted: bool, limit: int) -> int | None:
        """Return the offset after the first line break at or after `at` that ends a row."""
        file.seek(at)
        last = at + limit
        while at < last and (data := file.read(BLOCK_BYTES)):
            place = 0
            while place >= 0:
                if quoted:
                    place = data.find(b'"', place) + 1 or -1
                    quoted = place < 0
                    continue
                newline = data.find(b"\n", place)
                quote = data.find(b'"', place, newline if newline >= 0 else len(data))
                if quote >= 0:
                    quoted, place = True, quote + 1
                elif newline >= 0:
                    return at + newline + 1
                else:
                    place = -1
            at += len(data)
        return None

    def _rows(self, data: bytes, begin: int) -> Iterator[tuple[int, object]]:
        at = next_at = begin

        def lines() -> Iterator[str]:
            nonlocal next_at
            for line in data.splitlines(keepends=True):
                next_at += len(line)
                yield line.decode(errors="surrogateescape")

        reader = self._reader(lines())
        while True:
            try:
                row: object = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                row = RowError(f"is not CSV: {error}", value=data[at - begin : next_at - begin].strip())
            if row:  # skip blank lines
                yield at, row
            at = next_at

    def _reader(self, lines: Iterator[str] | list[str]) -> Iterator[list[str]]:
        if isinstance(lines, list):
            lines = iter("".join(lines).splitlines(keepends=True))
        return csv.reader(lines, delimiter=self._delimiter, strict=True)
