"""Arrow, Feather and Parquet files, as record batches that are mapped into memory."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forge_rl.data.sources.derived import check_room, derived
from forge_rl.data.sources.open_files import changed
from forge_rl.data.sources.tables import FilledRow
from forge_rl.errors import TaskError

if TYPE_CHECKING:
    import pyarrow as pa

_COPIED_BYTES = 1 << 22
"""Size of the record batches of a copy of a Parquet file."""
_ROWS_AT_ONCE = 64


class Arrow:
    """Rows of record batches, which may be views of a mapped file.

    Args:
        path: file named in messages.

    Raises:
        TaskError: two columns have the same name.
    """

    def __init__(self, path: Path, batches: Sequence[pa.RecordBatch]) -> None:
        self.path = path
        self._batches = batches
        self._size = path.stat().st_size
        # Row number of the first row of each batch, and the total: a row's batch is found by bisection.
        self._starts = [0, *itertools.accumulate(map(len, batches))]
        if batches:
            _check_names(path, batches[0].schema)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> object:
        ((_, row),) = self.rows(index, index + 1)
        return row

    def rows(self, first: int, end: int) -> Iterator[tuple[int, object]]:
        # Reading past the end of a mapped file that has shrunk would kill the process with SIGBUS.
        if self.path.stat().st_size != self._size:
            raise changed(self.path)
        while first < end:
            index = bisect.bisect_right(self._starts, first) - 1
            # A few rows at a time become Python objects, as a batch may have thousands of long ones.
            batch = self._batches[index].slice(first - self._starts[index], min(end - first, _ROWS_AT_ONCE))
            yield from enumerate(batch.to_pylist(), first)
            first += len(batch)

    def parse(self, row: object) -> Mapping[str, object]:
        assert isinstance(row, dict)
        return FilledRow(row)

    def describe(self, row: int) -> str:
        return f"row {row + 1}"


def open_arrow(path: Path, cache: Path) -> Arrow:
    """Open a Parquet, Feather or Arrow file.

    An Arrow stream, such as `datasets` writes, is read in place. The rows of other files, which may be compressed, are
    copied to one the first time.

    Raises:
        TaskError: the file is broken, or its copy is too large for the cache.
    """
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            # Arrow and Feather files begin with ARROW1; an Arrow stream does not, and can be mapped as it is.
            in_place = path.suffix.lower() != ".parquet" and file.read(6) != b"ARROW1"
        stream = path if in_place else derived(path, cache, ".arrow", partial(_write_stream, path))
        with pa.memory_map(str(stream)) as memory_map:  # the batches keep the memory, not the file
            return Arrow(path, list(pa.ipc.open_stream(memory_map)))
    except (OSError, pa.ArrowException) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(f"{path} cannot be read: {cause}", hint="write or download the file again") from error


def _write_stream(path: Path, copy: BinaryIO) -> None:
    import pyarrow as pa

    schema, batches = _parquet(path) if path.suffix.lower() == ".parquet" else _feather(path)
    _check_names(path, schema)
    with pa.ipc.new_stream(copy, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
            check_room(copy, path)


def _parquet(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
    # As many rows as make about _COPIED_BYTES, by their mean size; at most 65,536.
    rows = max(1, _COPIED_BYTES * file.metadata.num_rows // max(1, size))
    return file.schema_arrow, file.iter_batches(min(rows, 1 << 16), use_threads=False)


def _feather(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    import pyarrow as pa

    file = pa.ipc.open_file(pa.memory_map(str(path)))
    return file.schema, (file.get_batch(index) for index in range(file.num_record_batches))


def _check_names(path: Path, schema: pa.Schema) -> None:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise TaskError(f"{path} has two columns named {twice[0]!r}", hint="rename one")
