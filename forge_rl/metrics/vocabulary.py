"""The bytes that each token id stands for, kept with a run's episodes, so that they are readable without the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

NAME = "vocabulary.parquet"
"""Name of the file in the folder of episodes."""
_MOST_BYTES = 1 << 26
_MOST_TOKENS = 1 << 21


def write_vocabulary(folder: Path, pieces: Sequence[bytes]) -> None:
    """Write the pieces, by token id, to a folder of episodes, which is created if needed.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    partial = folder / f".{NAME}.partial"
    pq.write_table(pa.table({"bytes": pa.array(pieces, pa.binary())}), partial, compression="zstd")
    os.replace(partial, folder / NAME)


def read_vocabulary(folder: Path) -> list[bytes]:
    """Return the pieces by token id; [] if the file is missing, damaged or oversized."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / NAME
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return []
        file = pq.ParquetFile(path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        # The footer gives the sizes, so that a huge file is refused before anything is decompressed.
        if file.metadata.num_rows > _MOST_TOKENS or sum(group.total_byte_size for group in groups) > _MOST_BYTES:
            return []
        table = file.read(columns=["bytes"])
        table.validate(full=True)
        return list(table["bytes"].to_pylist()) if table["bytes"].type == pa.binary() else []
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return []


def texts_of(ids: Sequence[int], pieces: Sequence[bytes]) -> list[str]:
    """Return the text of each token in its sequence; a character that several tokens spell belongs to the last of them.

    texts_of([0, 1], [b"\\xc3", b"\\xbc!"])  # ["", "ü!"]
    """
    from codecs import getincrementaldecoder

    decoder, texts = getincrementaldecoder("utf-8")("replace"), list[str]()
    for token in ids:
        # A token without a known piece is shown by its id.
        piece = pieces[token] if 0 <= token < len(pieces) and pieces[token] is not None else f"[{token}]".encode()
        texts.append(decoder.decode(piece))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
