"""Training states on disk: torch's files of tensors, with an index in JSON, as torch's own index is a pickle."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import queue
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo, _write_files_from_queue
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from forge_rl.runtime.far_files import FarFolder, Folder

INDEX = "index.json"


class _FarFiles(FileSystem):
    """torch's interface to the files of a folder on the controller's machine."""

    def __init__(self, folder: FarFolder) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with self._folder.open(os.fspath(path), mode) as stream:
            yield cast(io.IOBase, stream)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._folder.rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The folder exists."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        try:
            return self._folder.size(os.fspath(path)) >= 0
        except OSError:
            return False


THREADS = 4
"""Files that are written, and tensors that are read, at the same time: serialising a tensor keeps a core busy, and so
does copying it to the disk's cache or from it."""
_THREAD_BYTES = 64 << 20
"""Bytes of a state for which another thread, and another file, is worth it."""


class TensorWriter(FileSystemWriter):
    """Writes tensors to a folder, for `dcp.save`; a large state to several files at the same time."""

    def __init__(self, folder: Folder) -> None:
        if isinstance(folder, Path):
            super().__init__(folder)
        else:  # the controller flushes all files of a checkpoint to disk
            super().__init__(Path(), sync_files=False)
            self.fs = _FarFiles(folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors."""
        metadata = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        size = sum(item.size.numel() * item.properties.dtype.itemsize for item in metadata)
        if isinstance(self.fs, _FarFiles):  # one connection
            return super().write_data(plan, planner)
        self.thread_count = max(1, min(THREADS, size // _THREAD_BYTES))
        return super().write_data(plan, planner)

    def _write_data(self, planner: SavePlanner, file_queue: queue.Queue[Any]) -> Future[list[WriteResult]]:
        """Write files as torch does, but raise what a thread raised, which torch would lose."""
        # As in torch's own method, except that `result()` below raises a thread's error.
        results = queue.Queue[list[WriteResult]]()
        with ThreadPoolExecutor(self.thread_count, "save") as threads:
            writers = [
                threads.submit(
                    _write_files_from_queue,
                    create_stream=self.fs.create_stream,
                    file_queue=file_queue,
                    result_queue=results,
                    planner=planner,
                    transforms=self.transforms,
                    inflight_threshhold=self.per_thread_copy_ahead,
                    use_fsync=self.sync_files,
                    thread_count=self.thread_count,
                    serialization_format=self.serialization_format,
                )
                for _ in range(self.thread_count)
            ]
        for writer in writers:
            writer.result()
        future = Future[list[WriteResult]]()
        future.set_result([result for file_results in results.queue for result in file_results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, once all tensors are on the disk."""
        storage_infos = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor"
            pieces = []
            for chunk in tensor.chunks:
                info = storage_infos[MetadataIndex(name, chunk.offsets)]
                location = {"file": info.relative_path, "offset": info.offset, "length": info.length}
                pieces.append({"start": list(chunk.offsets), "size": list(chunk.sizes)} | location)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
        path = Path(self.path) / INDEX
        # Written under another name and renamed, so that a crash leaves no index or a whole one.
        with self.fs.create_stream(path.with_suffix(".tmp"), "wb") as file:
            file.write(json.dumps(tensors).encode())
            if self.sync_files:
                file.flush()
                os.fsync(file.fileno())
        self.fs.rename(path.with_suffix(".tmp"), path)


class TensorReader(FileSystemReader):
    """Reads what `TensorWriter` wrote, from an untrusted folder, for `dcp.load`.

    Accepts only tensors, which torch reads with `weights_only=True`, in regular files of the folder.
    """

    _index: Metadata | None = None

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder if isinstance(folder, Path) else Path())
        if not isinstance(folder, Path):
            self.fs = _FarFiles(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index, once, as a large model's takes seconds.

        Raises:
            OSError, ValueError, TypeError, LookupError, RecursionError: it is missing or invalid.
        """
        if self._index is None:
            _check_files(self._folder, [INDEX])
            with self.fs.create_stream(Path(self.path) / INDEX, "rb") as file:
                index = _parsed(json.loads(file.read()))
            # Also untrusted: paths must not leave the folder, nor links lead out of it.
            _check_files(self._folder, {info.relative_path for info in index.storage_data.values()})
            self._index = index
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's tensors, a large state's in several threads, each a run of neighbours."""
        infos = self.storage_data
        # Neighbours in a file are read together, each thread getting about the same number of bytes.
        items = sorted(
            plan.items, key=lambda item: (infos[item.storage_index].relative_path, infos[item.storage_index].offset)
        )
        ends = [*itertools.accumulate(infos[item.storage_index].length for item in items)]
        count = 1 if isinstance(self.fs, _FarFiles) or not ends else max(1, min(THREADS, ends[-1] // _THREAD_BYTES))
        runs: list[list[Any]] = [[] for _ in range(count)]
        for item, end in zip(items, ends, strict=True):
            runs[min(count - 1, (end - 1) * count // max(1, ends[-1]))].append(item)
        read = super().read_data
        with ThreadPoolExecutor(count, "load") as threads:
            for reading in [threads.submit(read, replace(plan, items=run), planner) for run in runs]:
                reading.result()
        future = Future[None]()
        future.set_result(None)
        return future


def _parsed(tensors: dict[str, dict[str, Any]]) -> Metadata:
    """Build torch's index from the values of the JSON file."""
    tensor_metadata: dict[str, STORAGE_TYPES] = {}
    storage_infos = {}
    for name, tensor in tensors.items():
        # The index is untrusted: the name may be of anything in torch.
        dtype = getattr(torch, tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"its index holds a tensor of dtype {tensor['dtype']!r}")
        chunks = []
        for piece in tensor["pieces"]:
            start, size = _whole(piece["start"]), _whole(piece["size"])
            chunks.append(ChunkStorageMetadata(offsets=start, sizes=size))
            offset, length = _whole([piece["offset"], piece["length"]])
            storage_infos[MetadataIndex(name, start)] = _StorageInfo(piece["file"], offset, length)
        tensor_metadata[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=_whole(tensor["shape"]), chunks=chunks
        )
    return Metadata(state_dict_metadata=tensor_metadata, storage_data=storage_infos)


def _whole(numbers: list[int]) -> torch.Size:
    """Read non-negative integers."""
    # isinstance would accept True, which is valid JSON too.
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"its index holds {numbers!r:.80} in place of whole numbers")
    return torch.Size(numbers)


def _check_files(folder: Folder, names: Iterable[str]) -> None:
    """Check that each name is of a regular file in the folder, not a link."""
    for name in names:
        # A name with a path in it could point outside of the folder.
        if Path(name).name != name or not _is_regular(folder, name):
            raise ValueError(f"{name!r} is missing, or not a regular file of the folder")


def _is_regular(folder: Folder, name: str) -> bool:
    if isinstance(folder, Path):
        return (folder / name).is_file() and not (folder / name).is_symlink()
    try:
        return folder.size(name) >= 0
    except OSError:
        return False
