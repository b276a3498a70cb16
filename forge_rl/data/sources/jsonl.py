"""Reads JSON lines from any position, compressed JSON lines from the beginning, and small JSON arrays whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from forge_rl.data.sources.tables import CHUNK_BYTES, Chunk, RowError
from forge_rl.errors import TaskError

BLOCK_BYTES = 1 << 16
"""Size of a block: small, so that many from all over the file can be shuffled together."""
MOST_ROW_BYTES = 1 << 26
"""Maximum size of a row; a longer one is treated as corrupt."""
_MOST_ARRAY_BYTES = 1 << 26
_PLAIN_BLANKS = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


class JSONLines:
    """Lines of a file, each a JSON object. A block has the lines that begin in it; a row's place is its byte offset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = path.stat().st_size
        self.blocks = -(-self._bytes // BLOCK_BYTES)

    def chunks(self, block: int) -> Iterator[Chunk]:
        with self.path.open("rb") as file:
            begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._bytes)
            file.seek(max(0, begin - 1))
            data = file.read(end - file.tell())
            if begin:  # `data` starts one byte early, to tell whether a line begins at the block's start
                at = data.find(b"\n", 0, len(data) - 1)
                if at < 0:
                    return
                begin, data = begin + at, data[at + 1 :]
            if not data.endswith(b"\n"):
                data += file.readline(MOST_ROW_BYTES)
        rows: list[tuple[int, object]] = []
        for line in data.split(b"\n"):
            if line.strip(_PLAIN_BLANKS):
                rows.append((begin, line))
            begin += len(line) + 1
        yield Chunk(rows, len(data))

    def parse(self, row: object) -> Mapping[str, object]:
        assert isinstance(row, bytes)
        return parse_object(row)

    def describe(self, place: int) -> str:
        lines, left = 1, place
        with self.path.open("rb") as file:
            while left > 0 and (data := file.read(min(left, CHUNK_BYTES))):
                lines += data.count(b"\n")
                left -= len(data)
        return f"line {lines}"


class Compressed:
    """Lines of a compressed file, which is one block; a row's place is its line number, from 1."""

    blocks = 1

    def __init__(self, path: Path, compression: str) -> None:
        self.path = path
        self._compression = compression

    def chunks(self, block: int) -> Iterator[Chunk]:
        import pyarrow as pa

        number, left = 1, b""
        try:
            with pa.input_stream(str(self.path), compression=self._compression) as stream:
                while data := stream.read(CHUNK_BYTES // 4):
                    *lines, left = (left + data).split(b"\n")
                    if len(left) > MOST_ROW_BYTES:
                        raise TaskError(f"{self.path}, line {number + len(lines)}: no end within 64 MiB")
                    yield Chunk([row for row in enumerate(lines, number) if row[1].strip(_PLAIN_BLANKS)], len(data))
                    number += len(lines)
        except (OSError, pa.ArrowException) as error:
            raise TaskError(f"{self.path} cannot be decompressed: {error}", hint="compress the file again") from error
        if left.strip(_PLAIN_BLANKS):
            yield Chunk([(number, left)], len(left))

    def parse(self, row: object) -> Mapping[str, object]:
        assert isinstance(row, bytes)
        return parse_object(row)

    def describe(self, place: int) -> str:
        return f"line {place}"


class JSONArray:
    """Rows of a file with one JSON array of objects, small enough to be read whole."""

    blocks = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = json.loads(path.read_bytes().removeprefix(_BOM))
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path} is not JSON: {error}", hint="write one object per line, as .jsonl") from error
        self._rows: list[tuple[int, object]] = list(enumerate(found, 1))

    def chunks(self, block: int) -> Iterator[Chunk]:
        yield Chunk(self._rows, self.path.stat().st_size)

    def parse(self, row: object) -> Mapping[str, object]:
        return checked_object(row)

    def describe(self, place: int) -> str:
        return f"element {place}"


def open_json(path: Path) -> JSONLines | JSONArray:
    """Open a .json file, which may hold an array or lines.

    Raises:
        TaskError: the file is an array too large to be read whole.
    """
    with path.open("rb") as file:
        if not file.read(4096).removeprefix(_BOM).lstrip(_PLAIN_BLANKS).startswith(b"["):
            return JSONLines(path)
    if path.stat().st_size > _MOST_ARRAY_BYTES:
        raise TaskError(
            f"{path} is one JSON array of {path.stat().st_size / 1e6:.0f} MB, which cannot be read in blocks",
            hint=f"write one object per line: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}",
        )
    return JSONArray(path)


def parse_object(line: bytes) -> Mapping[str, object]:
    """Parse one line.

    Raises:
        RowError: the line is not a JSON object.
    """
    try:
        return checked_object(json.loads(line.removeprefix(_BOM).decode()))
    except UnicodeDecodeError as error:
        seen = line[max(0, error.start - 10) : error.end + 10]
        raise RowError(f"is not UTF-8 at byte {error.start + 1}", value=seen, hint="save it as UTF-8") from None
    except json.JSONDecodeError as error:
        if len(line) >= MOST_ROW_BYTES:
            raise RowError("has no end within 64 MiB", value=line) from None
        around = error.doc[max(0, error.pos - 20) : error.pos + 20]
        what = re.sub(r" starting at$", "", error.msg[:1].lower() + error.msg[1:])
        raise RowError(f"is not JSON, at character {error.pos + 1}: {what}", value=around) from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"cannot be read: {error}", value=line) from None


def checked_object(value: object) -> Mapping[str, object]:
    """Return a row that is a JSON object; else raise a RowError."""
    if not isinstance(value, dict):
        raise RowError(
            "is not a JSON object", value=value, hint='write rows such as {"question": "...", "answer": "..."}'
        )
    return value
