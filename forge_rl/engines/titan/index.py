"""Training states on disk: torch's files of tensors, and an index in JSON, as torch's own is a pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

INDEX = "index.json"


class TensorWriter(FileSystemWriter):
    """Writes tensors to a folder, for `dcp.save`."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, once all tensors are on the disk."""
        places = {result.index: result.storage_data for found in results for result in found}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor"
            pieces = []
            for chunk in tensor.chunks:
                at = places[MetadataIndex(name, chunk.offsets)]
                place = {"file": at.relative_path, "offset": at.offset, "length": at.length}
                pieces.append({"start": list(chunk.offsets), "size": list(chunk.sizes)} | place)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
        path = Path(self.path) / INDEX
        with path.with_suffix(".tmp").open("w") as file:
            json.dump(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").rename(path)


class TensorReader(FileSystemReader):
    """Reads what `TensorWriter` wrote, from an untrusted folder, for `dcp.load`.

    Accepts only tensors, which torch reads with `weights_only=True`, in regular files of the folder.
    """

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index, once, as a large model's takes seconds.

        Raises:
            OSError, ValueError, TypeError, LookupError, RecursionError: it is missing or invalid.
        """
        if self._index is None:
            folder = Path(self.path)
            _check_files(folder, [INDEX])
            index = _parsed(json.loads((folder / INDEX).read_text()))
            _check_files(folder, {place.relative_path for place in index.storage_data.values()})
            self._index = index
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


def _parsed(tensors: dict[str, dict[str, Any]]) -> Metadata:
    """Build torch's index from the values of the JSON file."""
    found: dict[str, STORAGE_TYPES] = {}
    places = {}
    for name, tensor in tensors.items():
        dtype = getattr(torch, tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"its index holds a tensor of dtype {tensor['dtype']!r}")
        chunks = []
        for piece in tensor["pieces"]:
            start, size = _whole(piece["start"]), _whole(piece["size"])
            chunks.append(ChunkStorageMetadata(offsets=start, sizes=size))
            offset, length = _whole([piece["offset"], piece["length"]])
            places[MetadataIndex(name, start)] = _StorageInfo(piece["file"], offset, length)
        found[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=_whole(tensor["shape"]), chunks=chunks
        )
    return Metadata(state_dict_metadata=found, storage_data=places)


def _whole(numbers: list[int]) -> torch.Size:
    """Read non-negative integers."""
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"its index holds {numbers!r:.80} in place of whole numbers")
    return torch.Size(numbers)


def _check_files(folder: Path, names: Iterable[str]) -> None:
    """Check that each name is of a regular file in the folder, not a link."""
    for name in names:
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise ValueError(f"{name!r} is not a regular file of the folder")
