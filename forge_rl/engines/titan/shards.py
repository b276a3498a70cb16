"""Shards of a torchtitan model: the slices of weights that a rank holds and publishes, and freezing."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from forge_rl.engines.titan.quantized_base import CODES, SCALES, QuantizedWeight
from forge_rl.errors import ConfigError
from forge_rl.weights.manifest import TensorSpec
from forge_rl.weights.names import ROUTER_BIASES, Names, SameNames
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard

_BIASES = (".expert_bias_E", *ROUTER_BIASES)
"""Suffixes of the names of biases that choose experts, torchtitan's and transformers'."""
ADAPTERS = "lora_A", "lora_B"
"""Names of a linear layer's factors, see `lora.py`: A, [rank, inputs], and B, [outputs, rank]. Experts' factors have
names that end with these."""
Weight = torch.Tensor | QuantizedWeight
"""A weight of a model; only frozen ones are quantised."""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by name: all weights or, if the model has adapters, these alone."""
    if getattr(model, "adapters", None) is None:
        yield from cast("Iterator[tuple[str, torch.Tensor]]", named_weights(model))
        return
    for name, parameter in model.named_parameters():
        if name.endswith(ADAPTERS):
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield every weight by name, the same with and without activation checkpointing; a tied weight once, as the input
    embedding, also on a pipeline stage that has only the head.

    Includes DeepSeek-V3's biases for the choice of experts, which are buffers and have no gradient, and no adapters.
    """
    # Buffers, as only `steer` moves them, but part of the policy.
    steering = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(_BIASES))
    for name, weight in itertools.chain(model.named_parameters(), steering):
        if name.endswith((*ADAPTERS, SCALES)):
            continue
        if name.endswith(CODES):
            stem = name.rpartition(".")[0]
            # The codes stand for the whole layer's weight; its scales are skipped above.
            yield f"{stem.replace('_checkpoint_wrapped_module.', '')}.weight", model.get_submodule(stem).weight  # type: ignore[misc]
            continue
        copied = name == "lm_head.weight" and _copies_embedding(model)
        yield "tok_embeddings.weight" if copied else name.replace("_checkpoint_wrapped_module.", ""), weight


def names_of(model: nn.Module) -> Names | SameNames:
    """Return the weight names of a model made by `build_model` or `build_general`."""
    return cast("Names | SameNames", model.names)


def specs(model: Any, changed: Collection[str] = ()) -> tuple[TensorSpec, ...]:
    """Return the specs of all weights.

    Args:
        changed: published names of frozen weights that change, as adapters are added to them.
    """
    return tuple(
        TensorSpec(
            name=part.name,
            shape=part.shape,
            changed=parameter.requires_grad or part.name in changed or (name.endswith(_BIASES) and bool(model.steers)),
            dtype="float32" if part.float32 else "",
        )
        for name, parameter in named_weights(model)
        for part in names_of(model).parts(name, parameter.shape)
    )


def local_shards(
    model: nn.Module,
    ranks: range,
    merge: Callable[[str, TensorSlice, torch.Tensor], torch.Tensor] = lambda _, _slice, values: values,
) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes. Of ranks with the same slice, the first on each
    replicated axis publishes it.

    Args:
        ranks: ranks that hold the model, or its pipeline stage.
        merge: returns the published values of a slice of a weight.
    """
    for name, parameter in named_weights(model):
        # The first stage publishes the original.
        if name == "tok_embeddings.weight" and _copies_embedding(model):
            continue
        tensor_slice = slice_of(parameter)
        if tensor_slice.numel and publishes(parameter, ranks):
            values = merge(name, tensor_slice, values_of(parameter))
            for part in names_of(model).parts(name, parameter.shape, tensor_slice):
                yield LocalShard(name=part.name, tensor_slice=part.tensor_slice, values=part.of(values))


def _copies_embedding(model: nn.Module) -> bool:
    return getattr(model, "copies_embedding", False)  # torchtitan's own models have no such attribute


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude weights from training by `fnmatch` patterns of Hugging Face names.

    Raises:
        ConfigError: a pattern matches nothing or only some experts of a layer, or no weight would be trained.
    """
    unused = set(patterns)
    for name, parameter in named_weights(model):
        names = [part.name for part in names_of(model).parts(name, parameter.shape)]
        matched = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
        unused -= {pattern for pattern, matches in matched.items() if matches}
        frozen = {match for matches in matched.values() for match in matches}
        # A stack is a single parameter, which cannot be frozen in part.
        if frozen and len(frozen) < len(names):
            raise ConfigError(
                f"{name!r} is trained as one, and {len(frozen)} of its {len(names)} experts would be frozen",
                hint="let the patterns of --trainer.frozen match all experts of a layer, or none",
            )
        if frozen and isinstance(parameter, nn.Parameter):
            parameter.requires_grad_(False)
    if unused:
        raise ConfigError(
            f"no weight of the model matches {', '.join(map(repr, sorted(unused)))}",
            hint='give --trainer.frozen patterns of Hugging Face names, such as "model.embed_tokens.*"',
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("every weight of the model is frozen", hint="give --trainer.frozen fewer patterns")


def local(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, and other tensors as they are."""
    return values.to_local() if isinstance(values, DTensor) else values


def values_of(parameter: Weight) -> torch.Tensor:
    """Return a view of this rank's slice of a weight or of its optimizer state; of a quantised weight, a copy."""
    if isinstance(parameter, QuantizedWeight):
        return parameter.values()
    return local(parameter).detach()


def slice_of(parameter: Weight) -> TensorSlice:
    """Return the slice of a weight that this rank holds."""
    if isinstance(parameter, QuantizedWeight):
        rows = slice_of(parameter.codes)
        return TensorSlice(start=(rows.start[0], 0), size=(rows.size[0], parameter.shape[1]))
    if not isinstance(parameter, DTensor):
        return TensorSlice.whole(parameter.shape)
    tensor_slice = block(parameter.shape, parameter.device_mesh.shape, _coordinate(parameter), parameter.placements)
    assert tensor_slice.size == tuple(values_of(parameter).shape), (
        f"{parameter.placements} do not put {tensor_slice} here"
    )
    return tensor_slice


def block(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> TensorSlice:
    """Compute the slice of a weight at one place of a mesh.

    A _StridedShard axis (FSDP over a weight already split by tensor or expert parallelism) splits the slices of the
    axes to its right. torch's own compute_local_shape_and_global_offset splits from left to right, which is wrong for
    uneven splits, such as 7 rows over FSDP 3 and TP 2.

    Args:
        shape: shape of the whole weight.
        mesh: number of ranks on each axis.
        coordinate: the rank's index on each axis.
        placements: the weight's placement on each axis.
    """
    start, size, cuts = [0] * len(shape), list(shape), [1] * len(shape)
    axes = list(zip(mesh, coordinate, placements, strict=True))
    # Plain shards cut first, left to right; strided ones cut their results, right to left.
    strided = [axis for axis in axes if isinstance(axis[2], _StridedShard)]
    for ranks, index, placement in [axis for axis in axes if axis not in strided] + strided[::-1]:
        if isinstance(placement, _StridedShard):
            assert placement.split_factor == cuts[placement.dim], f"{placements} do not make one slice"
        elif not isinstance(placement, Shard):
            assert placement.is_replicate(), f"a weight is no sum, but {placement}"
            continue
        dim, length = placement.dim, size[placement.dim]
        # Like torch.chunk: equal parts, of which the last ones may be shorter or empty.
        chunk_size = -(-length // ranks)
        offset = min(length, chunk_size * index)
        start[dim] += offset
        size[dim] = min(chunk_size, length - offset)
        cuts[dim] *= ranks
    return TensorSlice(start=tuple(start), size=tuple(size))


def publishes(parameter: Weight, ranks: range) -> bool:
    """Return True if this rank publishes its slice.

    If the weight's mesh is part of a larger one (FSDP's, for a weight that tensor parallelism does not split), the
    other parts hold the same shards; the part with the first rank publishes.
    """
    if isinstance(parameter, QuantizedWeight):
        parameter = parameter.codes
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == ranks.start
    mesh = parameter.device_mesh
    by_axis = zip(_coordinate(parameter), parameter.placements, strict=True)
    # Ranks along a replicated axis hold the same slice; the first one publishes it.
    first = all(place == 0 for place, placement in by_axis if placement.is_replicate())
    return first and (mesh.size() == len(ranks) or bool((mesh.mesh == ranks.start).any()))


def _coordinate(parameter: DTensor) -> Sequence[int]:
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds the weight"
    return coordinate
