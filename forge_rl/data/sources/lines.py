"""Text files of rows: JSON lines and CSV by an index of where each row begins, and small JSON arrays whole."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forge_rl.data.sources.derived import derived
from forge_rl.data.sources.open_files import OpenFile
from forge_rl.data.sources.tables import BLANK, RowError
from forge_rl.errors import TaskError

MOST_ROW_BYTES = 1 << 26
"""Maximum size of a row; a longer one is treated as corrupt."""
INDEXED_BYTES = 1 << 26
"""Minimum size of a file whose index is kept in the cache."""
_MOST_ARRAY_BYTES = 1 << 26
_READ_BYTES = 1 << 20
_BLANKS = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


class JSONLines:
    """Lines of a file, each a JSON object.

    Args:
        path: file named in messages.
        cache: folder for the index of a large file, 8 bytes per line.
        text: file that holds the lines, if `path` is compressed.
        quotes: line breaks between quotes do not end a row.

    Raises:
        TaskError: a quote is not closed.
    """

    def __init__(self, path: Path, cache: Path, *, text: Path | None = None, quotes: bool = False) -> None:
        self.path = path
        self._text = text or path
        self._file = OpenFile(self._text, named=path)
        self._starts = _row_starts(self._text, cache, quotes)
        """Offset of each row, then the file's size, [rows + 1] int64."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> object:
        begin, end = self._starts[index : index + 2].tolist()
        # One byte more than allowed is enough to see that a row is too long, without reading all of it.
        data = self._file.read(begin, min(end, begin + MOST_ROW_BYTES + 1)).rstrip(b"\r\n")
        return data if data.strip(_BLANKS) else BLANK

    def rows(self, first: int, end: int) -> Iterator[tuple[int, object]]:
        return ((index, row) for index in range(first, end) if (row := self.row(index)) is not BLANK)

    def parse(self, row: object) -> Mapping[str, object]:
        line = _line(row)
        try:
            return checked_object(json.loads(line.decode()))
        except UnicodeDecodeError as error:
            excerpt = line[max(0, error.start - 10) : error.end + 10]
            raise RowError(f"is not UTF-8 at byte {error.start + 1}", value=excerpt, hint="save it as UTF-8") from None
        except json.JSONDecodeError as error:
            context = error.doc[max(0, error.pos - 20) : error.pos + 20]
            reason = re.sub(r" starting at$", "", error.msg[:1].lower() + error.msg[1:])
            raise RowError(f"is not JSON, at character {error.pos + 1}: {reason}", value=context) from None
        except (ValueError, RecursionError) as error:
            raise RowError(f"cannot be read: {error}", value=line) from None

    def describe(self, row: int) -> str:
        # Counted only for a message: rows may span several lines, and lines may be blank, so a row's number is not its
        # line's.
        lines, bytes_left = 1, int(self._starts[row])
        with self._text.open("rb") as file:
            while bytes_left > 0 and (data := file.read(min(bytes_left, _READ_BYTES))):
                lines += data.count(b"\n")
                bytes_left -= len(data)
        return f"line {lines}"


class DelimitedLines(JSONLines):
    """Rows of strings of a CSV or TSV file (RFC 4180), with the columns named by the first row.

    Args:
        delimiter: between fields; "" is a comma unless the first row has none, and then a semicolon, tab or bar.

    Raises:
        TaskError: the first row cannot be read, or a quote is not closed.
    """

    def __init__(self, path: Path, cache: Path, delimiter: str) -> None:
        super().__init__(path, cache, quotes=True)
        # The module's default is 128 KiB; the setting is global to the process.
        csv.field_size_limit(MOST_ROW_BYTES)
        with path.open("rb") as file:
            head = file.read(min(int(self._starts[1]), MOST_ROW_BYTES + 1))
        # The first row names the columns; it is not counted from here on.
        self._starts = self._starts[1:]
        try:
            first = _line(head).decode()
            self._delimiter = delimiter or _delimiter_of(first)
            self.columns = self._fields(first)
        except (UnicodeDecodeError, RowError) as error:
            raise TaskError(f"{path}: the first row cannot be read: {error}", hint="save it as UTF-8") from error
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice or not any(self.columns):
            problem = f"names the column {twice[0]!r} twice" if twice else "is empty"
            raise TaskError(f"{path}: the first row {problem}", hint="name each column once in the first row")

    def parse(self, row: object) -> Mapping[str, object]:
        # Bytes that are not UTF-8 become surrogates first, so that the error can name their column.
        fields = self._fields(_line(row).decode(errors="surrogateescape"))
        if len(fields) != len(self.columns):
            raise RowError(
                f"has {len(fields)} fields, but the first row names {len(self.columns)} columns", value=fields
            )
        for column, text in zip(self.columns, fields, strict=True):
            if not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
                raise RowError("is not UTF-8", column=column, value=text, hint="save the file as UTF-8")
        return dict(zip(self.columns, fields, strict=True))

    def _fields(self, text: str) -> list[str]:
        try:
            rows = list(csv.reader(io.StringIO(text, newline="\n"), delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise RowError(f"is not CSV: {error}", value=text.strip()) from None
        if len(rows) > 1:
            raise RowError(
                "has a quote in a field that is not quoted",
                value=text.strip(),
                hint='write a quote inside a field as "", and quote the whole field',
            )
        return rows[0] if rows else []


def _delimiter_of(first: str) -> str:
    """Guess a CSV file's delimiter from its first row: spreadsheets write semicolons where the comma is decimal."""
    # A comma between quotes belongs to a name.
    plain = re.sub(r'"[^"]*"', "", first)
    return "," if "," in plain else max(";\t|", key=plain.count) if set(";\t|") & set(plain) else ","


class JSONArray:
    """Rows of a file with one JSON array of objects, small enough to be read whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._rows: Sequence[object] = json.loads(path.read_bytes().removeprefix(_BOM))
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path} is not JSON: {error}", hint="write one object per line, as .jsonl") from error

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> object:
        return self._rows[index]

    def rows(self, first: int, end: int) -> Iterator[tuple[int, object]]:
        return enumerate(self._rows[first:end], first)

    def parse(self, row: object) -> Mapping[str, object]:
        return checked_object(row)

    def describe(self, row: int) -> str:
        return f"element {row + 1}"


def open_json(path: Path, cache: Path) -> JSONLines | JSONArray:
    """Open a .json file, which may hold an array or lines.

    Raises:
        TaskError: the file is an array too large to be read whole.
    """
    with path.open("rb") as file:
        if not file.read(4096).removeprefix(_BOM).lstrip(_BLANKS).startswith(b"["):
            return JSONLines(path, cache)
    if path.stat().st_size > _MOST_ARRAY_BYTES:
        raise TaskError(
            f"{path} is one JSON array of {path.stat().st_size / 1e6:.0f} MB, which cannot be read row by row",
            hint=f"write one object per line: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}",
        )
    return JSONArray(path)


def _line(row: object) -> bytes:
    assert isinstance(row, bytes)
    if len(row) > MOST_ROW_BYTES:
        raise RowError("has no end within 64 MiB", value=row)
    return row.removeprefix(_BOM)


def checked_object(value: object) -> Mapping[str, object]:
    """Return a row that is a JSON object; else raise a RowError."""
    if not isinstance(value, dict):
        raise RowError(
            "is not a JSON object", value=value, hint='write rows such as {"question": "...", "answer": "..."}'
        )
    return value


def _row_starts(path: Path, cache: Path, quotes: bool) -> npt.NDArray[np.int64]:
    """Return the offset of each row, then the file's size, [rows + 1] int64; kept in the cache for a large file."""
    if path.stat().st_size >= INDEXED_BYTES:
        with contextlib.suppress(TaskError, OSError):  # a cache that cannot be written
            index_file = derived(path, cache, ".npy", lambda file: np.save(file, _find_row_starts(path, quotes)))
            return np.asarray(np.load(index_file, mmap_mode="r"))
    return _find_row_starts(path, quotes)


def _find_row_starts(path: Path, quotes: bool) -> npt.NDArray[np.int64]:
    start_parts = [np.zeros(1, np.int64)]
    offset = num_quotes = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            # NumPy finds all breaks of a MiB in one call, instead of one step of Python per line.
            letters = np.frombuffer(data, np.uint8)
            breaks = np.flatnonzero(letters == ord("\n"))
            if quotes:  # a break ends a row if the number of quotes before it is even
                places = np.flatnonzero(letters == ord('"'))
                breaks = breaks[(num_quotes + np.searchsorted(places, breaks)) % 2 == 0]
                num_quotes += len(places)
            start_parts.append(breaks + (offset + 1))
            offset += len(data)
    if num_quotes % 2:
        raise TaskError(
            f"{path} has an unclosed quote: {num_quotes} quotes in total",
            hint='write a quote inside a field as "", and quote the whole field',
        )
    starts = np.concatenate(start_parts)
    # A last line without a line break still ends at the end of the file.
    return starts if starts[-1] == offset else np.append(starts, offset)
