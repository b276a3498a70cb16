"""Training state as blocks of whole tensors for `torch.distributed.checkpoint`, independent of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType

from forge_rl.engines.titan.host_memory import HostCopies, HostCopy
from forge_rl.engines.titan.shards import named_parameters, slice_of, values_of
from forge_rl.engines.titan.small_adamw import Moment, SmallAdamW
from forge_rl.errors import CheckpointError
from forge_rl.weights.slices import TensorSlice


@dataclass(frozen=True, kw_only=True)
class Block:
    """One rank's slice of a tensor.

    torch's own slices of DTensors are wrong where tensor or expert parallelism and FSDP split the same dim unevenly;
    see `shards.block`.
    """

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor_slice: TensorSlice
    """The slice of the whole tensor that `values` holds."""
    values: torch.Tensor | Moment | HostCopy
    """The slice's values, a moment to read them from, or a copy of them, to be written."""

    @staticmethod
    def whole(values: torch.Tensor) -> Block:
        """Block of a replicated tensor, which one rank writes."""
        shape = tuple(values.shape)
        return Block(shape=shape, tensor_slice=TensorSlice.whole(shape), values=values)

    def size(self) -> torch.Size:
        """Shape of the whole tensor, for torch."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # A rank without elements of a tensor neither writes nor reads it.
        return [_chunk(self.tensor_slice)] if self.tensor_slice.numel else []

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.values.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]


def copied(state: Mapping[str, Block]) -> dict[str, Block]:
    """Copy all blocks to host memory; the bytes are there once the device is synchronised."""
    copies, host_state = HostCopies(), dict[str, Block]()
    for name, block in state.items():
        values = block.values
        assert not isinstance(values, HostCopy), f"{name} is copied already"
        # Saved in float32 whatever the stored dtype, so that another layout can read any slice of it.
        if isinstance(values, Moment):
            values = values.read().view(block.tensor_slice.size)
        host_state[name] = replace(block, values=copies.of(values))
    return host_state


def _chunk(tensor_slice: TensorSlice) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(tensor_slice.start), sizes=torch.Size(tensor_slice.size))


class SavePlanner(DefaultSavePlanner):
    """Writes copied blocks, each assembled just before it is written."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return cast(HostCopy, self.state_dict[index.fqn].values).joined()


class LoadPlanner(DefaultLoadPlanner):
    """Reads into blocks without flattening them, as torch's default planner would."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner comes first"
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return cast(torch.Tensor, self.state_dict[index.fqn].values)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, counts: Mapping[str, int]) -> dict[str, Block]:
    """Return this rank's blocks of all state by name; creates the moments, which AdamW does only at the first step.

    If the model has adapters, the state holds only these: its weights are in the folder that training started from.

    Raises:
        CheckpointError: the optimizer trains other tensors than the model's weights, as after an interrupted step.
    """
    _check_trained(model, optimizer)
    # The state is copied or read next, which takes memory; copies for the passes are made again.
    if (masters := getattr(model, "masters", None)) is not None:
        masters.free()
    state = {name: Block.whole(torch.tensor(count)) for name, count in counts.items()}
    # All trained weights have taken the same number of steps, so the last one's count stands for all.
    steps = torch.tensor(0.0)
    for name, parameter in named_parameters(model):
        tensors: dict[str, torch.Tensor | Moment] = {f"model.{name}": parameter}
        if parameter.requires_grad:
            tensors |= {f"{key}.{name}": moment for key, moment in _moments(optimizer, parameter).items()}
            steps = optimizer.state[parameter]["step"].detach().clone().cpu()
        # Moments are sharded like their weight, so they share its slice.
        shape, local_slice = tuple(parameter.shape), slice_of(parameter)
        for key, tensor in tensors.items():
            values = tensor if isinstance(tensor, Moment) else values_of(tensor)
            state[key] = Block(shape=shape, tensor_slice=local_slice, values=values)
    state["steps"] = Block.whole(steps)
    return state


def _moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, torch.Tensor | Moment]:
    if isinstance(optimizer, SmallAdamW):
        return optimizer.moments(parameter)
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0, device=parameter.device)  # where fused AdamW expects it
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


def _check_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError unless each weight belongs to the optimizer, or is frozen, and has the right dtype."""
    # Between the passes of an interrupted step, gathered weights or low-precision copies stand in for the real ones.
    optimizer_weights = {id(weight): weight for group in optimizer.param_groups for weight in group["params"]}
    dtypes = {weight.dtype for weight in optimizer_weights.values()}
    mismatches = [
        name
        for name, weight in named_parameters(model)
        if isinstance(weight, nn.Parameter)
        and (weight.dtype not in dtypes or (weight.requires_grad and optimizer_weights.pop(id(weight), None) is None))
    ]
    if mismatches or optimizer_weights:
        raise CheckpointError(
            f"{len(mismatches)} weights of the model, such as {next(iter(mismatches), '')!r}, are not those that the "
            f"optimizer trains, and {len(optimizer_weights)} of its own are not in the model",
            hint="resume from the last checkpoint: run the same command again",
        )
