"""Exports a training state on disk to Hugging Face format, from any layout, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge_rl.engines.titan.blocks import Block, LoadPlanner
from forge_rl.engines.titan.host_memory import HostCopy
from forge_rl.engines.titan.index import TensorReader
from forge_rl.models.hf_folder import HEAD, complete_folder, open_weights, tensor_files
from forge_rl.runtime.far_files import Folder, filled
from forge_rl.tokens.stops import name_added_stop
from forge_rl.weights.names import VALUE_HEAD, Part
from forge_rl.weights.slices import TensorSlice

_FILE_BYTES = 2 << 30
_REDUNDANT = {HEAD, VALUE_HEAD}
"""Not exported unless trained: a tied head, and a value head that a policy lacks."""
_BUFFER = ".rotary_emb.inv_freq"
"""Suffix of buffers that older files hold, computed from config.json."""
Parts = Callable[..., Iterator[Part]]


@dataclass(frozen=True, kw_only=True)
class _Region:
    """Rows of one torchtitan weight that are exported together: all rows, or some of a stack of experts."""

    name: str
    shape: tuple[int, ...]
    tensor_slice: TensorSlice


@dataclass(frozen=True, kw_only=True)
class _CarriedTensor:
    """A tensor of the source that the trainer does not have, exported byte by byte."""

    name: str
    path: Path
    bytes: int


class Export:
    """Plan of an export, assigning weights to files; the same in each process that takes part.

        Export(folder / "training", source, torch.bfloat16, parts).write(folder / "model")

    A process holds at most one file's tensors, and one weight in float32 with the shards of the training state that
    contain it; of a stack of experts only as many as fill a file.

    Tensors of the source that the trainer does not have, such as multi-token-prediction layers, are exported unchanged,
    in their own dtypes.

    Args:
        training: folder of the training state.
        source: Hugging Face folder that config, tokenizer and untrained tensors are copied from.
        dtype: dtype of the exported weights.
        parts: lists the published tensors that a block of a torchtitan weight holds; see `weights.names.Names.parts`.
        file_bytes: maximum size of a file; a larger weight gets its own.
        valued: the weights are a value model's.
        copies: weights of the training state that are still in host memory, by their names there; these are not
            read again.

    Raises:
        OSError, ValueError, TypeError, LookupError: the folder does not hold a training state.
        ModelError: the source holds no weights, or they cannot be read.
    """

    def __init__(
        self,
        training: Folder,
        source: Path,
        dtype: torch.dtype,
        parts: Parts,
        *,
        file_bytes: int = _FILE_BYTES,
        valued: bool = False,
        copies: Mapping[str, HostCopy] = MappingProxyType({}),
    ) -> None:
        self._reader, self._planner = TensorReader(training), LoadPlanner()
        self._index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)
        self._source = source
        self._dtype = dtype
        self._parts = parts
        self._valued = valued
        self._copies = copies
        self._files: list[list[_Region | _CarriedTensor]] = []
        free_bytes = 0
        regions = list(self._regions(file_bytes))
        for item in (*regions, *(() if valued else self._carried(regions))):
            size = self._bytes(item)
            # Items fill files in a fixed order, so every process arrives at the same plan.
            if size > free_bytes:
                self._files.append([])
                free_bytes = file_bytes
            self._files[-1].append(item)
            free_bytes -= size

    def write(self, folder: Folder, *, rank: int = 0, ranks: int = 1) -> None:
        """Write this process's share of the files into an existing folder; rank 0 also writes config and tokenizer."""
        # Files are dealt out in turn; no rank needs to know what the others write.
        for index in range(rank, len(self._files), ranks):
            tensors: dict[str, torch.Tensor] = {}
            for item in self._files[index]:
                tensors |= self._read(item)
            with filled(folder) as place:
                save_file(tensors, place / self._name(index), metadata={"format": "pt"})
        if rank == 0:
            with filled(folder) as place:
                self._complete(place)

    def _regions(self, file_bytes: int) -> Iterator[_Region]:
        for key, metadata in self._index.state_dict_metadata.items():
            if not key.startswith("model.") or not isinstance(metadata, TensorStorageMetadata):
                continue
            name, shape = key.removeprefix("model."), tuple(metadata.size)
            rows = 0
            if next(self._parts(name, shape)).index is not None:  # a stack, which may be split between experts
                row_bytes = torch.Size(shape[1:]).numel() * self._dtype.itemsize
                rows = max(1, file_bytes // row_bytes)
            # A stack that exceeds a file is exported in runs of experts.
            for first in range(0, shape[0], rows) if rows else [0]:
                start = (first, *(0 for _ in shape[1:])) if shape else ()
                size = (min(rows, shape[0] - first), *shape[1:]) if rows else shape
                yield _Region(name=name, shape=shape, tensor_slice=TensorSlice(start=start, size=size))

    def _carried(self, regions: Sequence[_Region]) -> Iterator[_CarriedTensor]:
        """List the source's tensors that are not trained, except buffers and the copy of a tied head."""
        files = tensor_files(self._source)
        trained = {part.name for region in regions for part in self._parts_of(region)}
        # Sorted, as every process must assign them to the same files.
        untrained_names = [name for name in sorted(files.keys() - trained - _REDUNDANT) if not name.endswith(_BUFFER)]
        for path in sorted({files[name] for name in untrained_names}):
            with open_weights(path) as file:
                for name in untrained_names:
                    if files[name] == path:
                        yield _CarriedTensor(
                            name=name, path=path, bytes=file.get_tensor(name).nbytes
                        )  # maps, reads nothing

    def _parts_of(self, region: _Region) -> Iterator[Part]:
        return self._parts(region.name, region.shape, region.tensor_slice)

    def _bytes(self, item: _Region | _CarriedTensor) -> int:
        if isinstance(item, _CarriedTensor):
            return item.bytes
        # All parts of a region have the same dtype.
        float32 = next(self._parts_of(item)).float32
        return item.tensor_slice.numel * (4 if float32 else self._dtype.itemsize)

    def _read(self, item: _Region | _CarriedTensor) -> dict[str, torch.Tensor]:
        """Return the tensors of an item by Hugging Face name, each with its own storage."""
        if isinstance(item, _CarriedTensor):
            with open_weights(item.path) as file:
                return {item.name: file.get_tensor(item.name)}
        region = item
        values = self._values(region)
        # Copied: safetensors refuses tensors that share memory, as views of a stack do.
        return {
            part.name: part.of(values).to(
                torch.float32 if part.float32 else self._dtype, copy=True, memory_format=torch.contiguous_format
            )
            for part in self._parts_of(region)
        }

    def _values(self, region: _Region) -> torch.Tensor:
        """Return a region's values in float32."""
        key, size = f"model.{region.name}", region.tensor_slice.size
        if (copy := self._copies.get(key)) is not None:
            # Only stacks are split, so a region's rows follow one another in the copy.
            values = copy.rows(region.tensor_slice.start[0], size[0]) if size else copy.joined()
            return values.float()
        values = torch.empty(size, dtype=torch.float32)
        block = Block(shape=region.shape, tensor_slice=region.tensor_slice, values=values)
        self._planner.set_up_planner({key: block}, self._index, is_coordinator=True)
        self._reader.read_data(self._planner.finish_plan(self._planner.create_local_plan()), self._planner).wait()
        return values

    def _name(self, index: int) -> str:
        count = len(self._files)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def _complete(self, folder: Path) -> None:
        """Write everything but weights."""
        placed, total = dict[str, str](), 0
        for index, file in enumerate(self._files):
            for item in file:
                total += self._bytes(item)
                names = (
                    [item.name] if isinstance(item, _CarriedTensor) else [part.name for part in self._parts_of(item)]
                )
                placed |= dict.fromkeys(names, self._name(index))
        dtype = str(self._dtype).removeprefix("torch.")
        complete_folder(
            self._source,
            folder,
            dtype=dtype,
            weight_map=placed,
            total_bytes=total,
            valued=self._valued,
            # A trained head in the files means that the model does not tie it to the embedding.
            untied=HEAD in placed,
        )
        name_added_stop(self._source, folder)
