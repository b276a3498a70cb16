"""Arrow files, mapped into memory; Parquet and Feather files, as Arrow copies in the cache."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.data.sources.derived import Room, derived
from forge_rl.errors import TaskError

if TYPE_CHECKING:
    import pyarrow as pa

_COPIED_BYTES = 1 << 22
"""Size of the record batches of a copy."""
_ROWS_AT_ONCE = 64


class Arrow:
    """Rows of record batches: those of an Arrow file or stream, such as `datasets` writes, or given ones.

    Args:
        path: file named in messages.
        data: the Arrow file, if `path` is of another kind.
        batches: record batches to read instead of the file's.

    Raises:
        TaskError: the file is broken, or two columns have the same name.
    """

    def __init__(
        self, path: Path, *, data: Path | None = None, batches: Sequence[pa.RecordBatch] | None = None
    ) -> None:
        import pyarrow as pa

        self.path = path
        self._batch: Callable[[int], pa.RecordBatch]
        try:
            if batches is None and _is_file(data or path):
                # Batches are not kept, as they may be compressed.
                file = pa.ipc.open_file(pa.memory_map(str(data or path)))
                self._batch, count = file.get_batch, file.num_record_batches
                schema = file.schema
            else:
                if batches is None:
                    batches = list(pa.ipc.open_stream(pa.memory_map(str(data or path))))  # views of the mapped file
                self._batch, count = batches.__getitem__, len(batches)
                schema = batches[0].schema if batches else pa.schema([])
            _check_names(path, schema)
            self._starts = [0, *itertools.accumulate(len(self._batch(index)) for index in range(count))]
        except pa.ArrowException as error:
            raise _broken(path, error) from error

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, first: int, end: int) -> Iterator[tuple[int, object]]:
        import pyarrow as pa

        try:
            while first < end:
                index = bisect.bisect_right(self._starts, first) - 1
                begin = first - self._starts[index]
                some = self._batch(index).slice(begin, min(end - first, _ROWS_AT_ONCE)).to_pylist()
                yield from enumerate(some, first)
                first += len(some)
        except (OSError, pa.ArrowException) as error:
            raise _broken(self.path, error) from error

    def parse(self, row: object) -> Mapping[str, object]:
        assert isinstance(row, dict)
        return row

    def describe(self, row: int) -> str:
        return f"row {row + 1}"


def open_copied(path: Path, cache: Path) -> Arrow:
    """Open a Parquet or Feather file; the first time, its rows are copied to an Arrow file that is not compressed.

    Raises:
        TaskError: the file is broken, or its copy is too large for the cache.
    """
    import pyarrow as pa

    def write(made: Path) -> None:
        schema, batches = _parquet(path) if path.suffix.lower() == ".parquet" else _feather(path)
        _check_names(path, schema)
        with made.open("wb") as copy, pa.ipc.new_stream(copy, schema) as stream:
            room = Room(path, copy)
            for batch in batches:
                stream.write_batch(batch)
                room.check()

    try:
        return Arrow(path, data=derived(path, cache, ".arrow", write))
    except pa.ArrowException as error:
        raise _broken(path, error) from error


def _parquet(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
    rows = max(1, _COPIED_BYTES * file.metadata.num_rows // max(1, size))
    return file.schema_arrow, file.iter_batches(min(rows, 1 << 16), use_threads=False)


def _feather(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    import pyarrow as pa

    file = pa.ipc.open_file(pa.memory_map(str(path)))
    return file.schema, (file.get_batch(index) for index in range(file.num_record_batches))


def _is_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(6) == b"ARROW1"


def _check_names(path: Path, schema: pa.Schema) -> None:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise TaskError(f"{path} has two columns named {twice[0]!r}", hint="rename one")


def _broken(path: Path, error: Exception) -> TaskError:
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return TaskError(f"{path} cannot be read: {cause}", hint="write or download the file again")
