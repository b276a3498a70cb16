"""Reads Parquet files by row group and Arrow files by record batch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.data.sources.tables import CHUNK_BYTES, Chunk
from forge_rl.errors import TaskError

if TYPE_CHECKING:
    import pyarrow as pa


class Parquet:
    """Rows of a Parquet file; a block is a row group, and a large one is read in chunks."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._metadata = pq.read_metadata(path)
            _check_names(path, self._metadata.schema.to_arrow_schema())
        except pa.ArrowException as error:
            raise _broken(path, error) from error
        self.blocks = self._metadata.num_row_groups
        groups = [self._metadata.row_group(index).num_rows for index in range(self.blocks)]
        self._starts = [0, *itertools.accumulate(groups)]

    def chunks(self, block: int) -> Iterator[Chunk]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        group = self._metadata.row_group(block)
        rows = max(1, CHUNK_BYTES * group.num_rows // max(1, group.total_byte_size))
        place = self._starts[block] + 1
        try:
            with pq.ParquetFile(self.path, metadata=self._metadata) as file:
                for batch in file.iter_batches(min(rows, 1 << 16), row_groups=[block], use_threads=False):
                    yield _chunk(batch, place)
                    place += len(batch)
        except (OSError, pa.ArrowException) as error:
            raise _broken(self.path, error) from error

    def parse(self, row: object) -> Mapping[str, object]:
        assert isinstance(row, dict)
        return row

    def describe(self, place: int) -> str:
        return f"row {place}"


class Arrow:
    """Rows of an Arrow file or stream, such as `datasets` writes; a block is a record batch."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        try:
            self._file: pa.RecordBatchFileReader | None = None
            self._batches: list[pa.RecordBatch] = []
            mapped = pa.memory_map(str(path))
            with path.open("rb") as file:
                is_file = file.read(6) == b"ARROW1"
            if is_file:
                self._file = pa.ipc.open_file(mapped)
                _check_names(path, self._file.schema)
                lengths = [len(self._file.get_batch(index)) for index in range(self._file.num_record_batches)]
            else:
                stream = pa.ipc.open_stream(mapped)
                _check_names(path, stream.schema)
                self._batches = list(stream)  # views of the mapped file, not read yet
                lengths = [len(batch) for batch in self._batches]
        except pa.ArrowException as error:
            raise _broken(path, error) from error
        self.blocks = len(lengths)
        self._starts = [0, *itertools.accumulate(lengths)]

    def chunks(self, block: int) -> Iterator[Chunk]:
        import pyarrow as pa

        try:
            batch = self._file.get_batch(block) if self._file is not None else self._batches[block]
            rows = max(1, CHUNK_BYTES * len(batch) // max(1, batch.nbytes))
            for start in range(0, len(batch), rows):
                yield _chunk(batch.slice(start, rows), self._starts[block] + start + 1)
        except (OSError, pa.ArrowException) as error:
            raise _broken(self.path, error) from error

    def parse(self, row: object) -> Mapping[str, object]:
        assert isinstance(row, dict)
        return row

    def describe(self, place: int) -> str:
        return f"row {place}"


def _chunk(batch: pa.RecordBatch, place: int) -> Chunk:
    return Chunk(list(enumerate(batch.to_pylist(), place)), batch.nbytes)


def _check_names(path: Path, schema: pa.Schema) -> None:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise TaskError(f"{path} has two columns named {twice[0]!r}", hint="rename one")


def _broken(path: Path, error: Exception) -> TaskError:
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return TaskError(f"{path} cannot be read: {cause}", hint="write or download the file again")
