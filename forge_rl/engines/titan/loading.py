"""Loads a Hugging Face folder, or a training state to resume from, into a torchtitan model."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from forge_rl.engines.titan.blocks import LoadPlanner, training_state
from forge_rl.engines.titan.index import THREADS, TensorReader
from forge_rl.engines.titan.quantized_base import QuantizedWeight
from forge_rl.engines.titan.shards import ADAPTERS, named_weights, names_of, slice_of, values_of
from forge_rl.engines.titan.small_adamw import ROOT, Moment
from forge_rl.errors import CheckpointError, ModelError
from forge_rl.models.hf_folder import EMBEDDING, HEAD, open_weights, tensor_files
from forge_rl.runtime.far_files import Folder
from forge_rl.weights.names import VALUE_HEAD
from forge_rl.weights.slices import TensorSlice

_AGAIN = "download or export the model again"


def load_weights(model: nn.Module, folder: Path, *, tied: bool) -> None:
    """Check all weights of a Hugging Face folder, then read this rank's slice of each, several at the same time.

    A value head that the folder lacks starts at 0 in any layout: all values are 0 at first, and the first update trains
    the head alone.

    Raises:
        ModelError: a weight is missing or has another shape, or a file cannot be read.
    """
    index = tensor_files(folder)
    with torch.no_grad(), ExitStack() as stack:
        files: dict[Path, safe_open] = {}
        # All names and shapes are checked before anything is read, so a wrong folder fails at once.
        jobs = list[Callable[[], None]]()
        for titan_name, parameter in named_weights(model):
            block = parameter if isinstance(parameter, QuantizedWeight) else values_of(parameter)
            for part in names_of(model).parts(titan_name, parameter.shape, slice_of(parameter)):
                name = part.name
                # Files of a tied model usually hold the embedding alone.
                if name == HEAD and tied and name not in index:
                    name = EMBEDDING
                if name == VALUE_HEAD and name not in index:
                    cast(torch.Tensor, block).zero_()
                    continue
                if name not in index:
                    raise ModelError(f"{folder} lacks the weight {name!r}", hint=_AGAIN)
                if index[name] not in files:
                    files[index[name]] = stack.enter_context(open_weights(index[name]))
                try:
                    file_slice = files[index[name]].get_slice(name)
                except SafetensorError as error:  # the folder's index is wrong
                    raise ModelError(f"{index[name]} cannot be read: {error}", hint=_AGAIN) from error
                shape = tuple(file_slice.get_shape())
                if shape != part.shape:
                    raise ModelError(
                        f"{name!r} in {folder} has shape {shape}, config.json says {part.shape}", hint=_AGAIN
                    )
                if part.tensor_slice.numel:
                    source = file_slice, part.tensor_slice, f"{name!r} in {index[name]}"
                    if isinstance(block, QuantizedWeight):
                        jobs.append(functools.partial(_quantize, block, *source))
                    else:
                        jobs.append(functools.partial(_copy, part.of(block), *source))
        # Reading pages and casting keep several cores busy, and each job writes memory of its own.
        with ThreadPoolExecutor(THREADS, "load") as threads:
            for _ in threads.map(operator.call, jobs):  # an error cancels the jobs that wait
                pass


@torch.no_grad()
def _quantize(weight: QuantizedWeight, file_slice: Any, tensor_slice: TensorSlice, place: str) -> None:
    """Read rows of a memory-mapped tensor, and store them quantised."""
    values = torch.empty(tensor_slice.size, device=weight.device)
    _copy(values, file_slice, tensor_slice, place)
    if not weight.fill(values):
        raise ModelError(
            f"{place} has values that are not finite, and --lora.base-format {weight.base_format} needs finite ones",
            hint=_AGAIN,
        )


@torch.no_grad()
def _copy(target: torch.Tensor, file_slice: Any, tensor_slice: TensorSlice, place: str) -> None:
    """Copy a slice of a memory-mapped tensor, which reads its pages; `place` names the tensor in errors."""
    start, size = tensor_slice.start, tensor_slice.size
    try:
        values = file_slice[tuple(map(slice, start, map(operator.add, start, size)))]
    except (RuntimeError, SafetensorError) as error:  # a dtype that torch lacks
        raise ModelError(f"{place} cannot be read: {error}", hint=_AGAIN) from error
    target.copy_(values)


def load_training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    counts: Sequence[str],
    folder: Folder,
) -> dict[str, int]:
    """Load a training state that a CheckpointWriter wrote, in any layout, into the model and the optimizer.

    Args:
        counts: names of the counts saved with the state.

    Returns:
        The counts by name.

    Raises:
        CheckpointError: the state is incomplete, corrupt, crafted, or of another model.
    """
    state = training_state(model, optimizer, dict.fromkeys(counts, 0))
    moments = {key: block.values for key, block in state.items() if isinstance(block.values, Moment)}
    for key in moments:  # pieces of a block may come one by one
        # Read into float32 buffers: codes of a block need all of its values at once.
        buffer = torch.empty(state[key].tensor_slice.size)
        state[key] = replace(state[key], values=buffer)
    try:
        reader = TensorReader(folder)
        saved_keys = set(reader.read_metadata().state_dict_metadata)
        # These name the flag that differs; dcp would only name a key that is missing.
        _check_adapters(saved_keys, set(state), folder)
        _check_moments(saved_keys, set(state), folder)
        _check_frozen(saved_keys, set(state), folder)
        dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"the training state in {folder} cannot be read: {cause_of(error)}",
            hint="delete that step's folder to resume from the one before it",
        ) from error
    for key, moment in moments.items():
        moment.write_all(cast(torch.Tensor, state[key].values).view(-1))
    for parameter in model.parameters():
        # The state holds one step count for all weights, as every update steps all of them.
        if parameter.requires_grad:
            optimizer.state[parameter]["step"].copy_(state["steps"].values)
    return {name: int(cast(torch.Tensor, state[name].values)) for name in counts}


def _check_adapters(saved_keys: set[str], stage_keys: set[str], folder: Folder) -> None:
    """Raise CheckpointError unless a training state and this run have adapters on the same modules, or none."""
    saved_adapters, adapters = (
        {key for key in keys if key.startswith("model.") and key.endswith(ADAPTERS)}
        for keys in (saved_keys, stage_keys)
    )
    if saved_adapters == adapters:
        return
    if saved_adapters and adapters:
        problem = (
            f"has adapters on other modules than --lora.targets: {min(saved_adapters ^ adapters).split('.', 1)[1]!r}"
        )
    else:
        problem = f"is of a run that trained {'adapters' if saved_adapters else 'weights'}, and this one does not"
    raise CheckpointError(
        f"the training state in {folder} {problem}",
        hint="set --lora.rank and --lora.targets as in that run, or choose another --out",
    )


def _check_moments(saved_keys: set[str], stage_keys: set[str], folder: Folder) -> None:
    """Raise CheckpointError if only one of a training state and this run has the roots of small second moments."""
    small = [any(key.startswith(f"{ROOT}.") for key in keys) for keys in (saved_keys, stage_keys)]
    if small[0] != small[1]:
        raise CheckpointError(
            f"the training state in {folder} has moments of {'bfloat16 or int8' if small[0] else 'float32'}",
            hint="set --trainer.optimizer-state as in that run, or choose another --out",
        )


def _check_frozen(saved_keys: set[str], stage_keys: set[str], folder: Folder) -> None:
    """Raise CheckpointError if a training state is of this model but with different frozen weights.

    Args:
        stage_keys: keys of this rank's pipeline stage.
    """

    def weights(keys: set[str], kind: str) -> set[str]:
        return {key.removeprefix(kind) for key in keys if key.startswith(kind)}

    stage_weights, trained_weights = weights(stage_keys, "model."), weights(stage_keys, "exp_avg.")
    saved_weights = weights(saved_keys, "exp_avg.") & stage_weights
    if saved_weights != trained_weights and stage_weights <= weights(saved_keys, "model."):
        raise CheckpointError(
            f"the training state in {folder} is of a run that trained {len(saved_weights)} weights, this one trains "
            f"{len(trained_weights)}: {min(saved_weights ^ trained_weights)!r} is frozen in one of them",
            hint="set --trainer.frozen as in that run, or choose another --out",
        )


def cause_of(error: BaseException) -> str:
    """Return an error's cause on one line; a failure on any rank may come as a CheckpointException, a BaseException."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch's errors hide that a disk is full
        cause = cause.__context__
    error = cause or error
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
