"""Reads the pickled index of a training state without creating or calling any object that the file names."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
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


class TrainingStateReader(FileSystemReader):
    """Reads a training state from an untrusted folder, for `torch.distributed.checkpoint`.

    torch's own reader unpickles the index, and every item that the index calls bytes, so it may run arbitrary code.
    This one rebuilds the index from plain values, accepts only tensors, which torch reads with `weights_only=True`, and
    opens only files in the folder.

        dcp.load(state, storage_reader=TrainingStateReader(folder))
    """

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index, once, as a large model's takes seconds.

        Raises:
            ValueError, pickle.UnpicklingError: it holds anything but tensors in files of the folder.
        """
        if self._index is None:
            folder = Path(self.path)
            _check_files(folder, [".metadata"])
            index = _metadata(_Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load())
            _check_files(folder, {place.relative_path for place in index.storage_data.values()})
            self._index = index
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


class _Record:
    """Inert stand-in for an object of the index, which keeps its pickled state."""

    state: object = None

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        self.state = state


_HOMES = {
    "torch.distributed.checkpoint.metadata": (
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
_RECORDS = {(home, name): type(name, (_Record,), {}) for home, names in _HOMES.items() for name in names}


class _Unpickler(pickle._Unpickler):
    """Unpickler that only knows dtypes, and stand-ins for the classes of an index.

    Based on the Python implementation: a dozen bytes can make the C one allocate 64 GiB for its memo.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which is no part of an index")
        return _RECORDS[module, name]


def _metadata(record: object) -> Metadata:
    """Build an index from its unpickled stand-in."""
    fields = _fields(record, "Metadata")
    tensors: dict[str, STORAGE_TYPES] = {}
    for name, tensor in _dict(fields["state_dict_metadata"]).items():
        tensors[_text(name)] = _tensor(tensor)
    places = {}
    for key, value in _dict(fields["storage_data"]).items():
        index, place = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        if place.keys() != {"relative_path", "offset", "length"}:
            raise ValueError("its index asks to transform what is in a file")
        at = MetadataIndex(_text(index["fqn"]), _size(index["offset"]), index.get("index"))
        path, (offset, length) = _text(place["relative_path"]), _size((place["offset"], place["length"]))
        places[at] = _StorageInfo(path, offset, length)
    return Metadata(state_dict_metadata=tensors, storage_data=places, version=_text(fields["version"]))


def _tensor(record: object) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    properties = getattr(fields["properties"], "state", None)
    if not isinstance(properties, tuple) or not isinstance(properties[0], torch.dtype):
        raise ValueError("its index holds a tensor without a dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=properties[0]),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(c["offsets"]), sizes=_size(c["sizes"])) for c in chunks],
    )


def _fields(record: object, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"its index holds a {type(record).__name__} in place of a {kind}")
    return _dict(record.state)


def _size(value: object) -> torch.Size:
    """Read non-negative integers."""
    numbers = value.parts[0] if isinstance(value, _Record) and value.parts else value
    if not isinstance(numbers, tuple) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("its index holds a size that is none")
    return torch.Size(numbers)


def _dict(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"its index holds a {type(value).__name__} in place of a dict")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its index holds a {type(value).__name__} in place of a text")
    return value


def _check_files(folder: Path, names: Iterable[str]) -> None:
    """Check that each name is of a regular file in the folder, not a link."""
    for name in names:
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise ValueError(f"{name!r} is no file of its own in the folder")
