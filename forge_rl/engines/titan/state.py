"""Reads and writes a torchtitan model: Hugging Face folders, and training state to continue from."""

from __future__ import annotations

import json
import operator
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from forge_rl.data import mxfp4
from forge_rl.engines.titan.index import TrainingStateReader
from forge_rl.engines.titan.shards import named_weights, names_of, slice_of, values_of
from forge_rl.errors import CheckpointError, ModelError

_AGAIN = "download or export the model again"


def load_weights(model: nn.Module, folder: Path, *, tied: bool) -> None:
    """Read this rank's slice of every weight from a Hugging Face folder, dequantised where it is stored as MXFP4.

    Raises:
        ModelError: a weight is missing or has another shape, or a file cannot be read.
    """
    index = _tensor_files(folder)
    with torch.no_grad(), ExitStack() as stack:
        files: dict[Path, safe_open] = {}

        def stored_at(name: str) -> Any:
            if index[name] not in files:
                files[index[name]] = stack.enter_context(_open(index[name]))
            return files[index[name]].get_slice(name)

        for ours, parameter in named_weights(model):
            block = values_of(parameter)
            for part in names_of(model).parts(ours, parameter.shape, slice_of(parameter)):
                name = part.name
                if name == "lm_head.weight" and tied and name not in index:
                    name = "model.embed_tokens.weight"
                quantized = (f"{name}_blocks", f"{name}_scales")
                if name in index:
                    stored = stored_at(name)
                    shape = tuple(stored.get_shape())
                elif index.keys() >= set(quantized):
                    blocks, scales = map(stored_at, quantized)
                    shape = mxfp4.shape_of(blocks, scales)
                else:
                    raise ModelError(f"{folder} lacks the weight {name!r}", hint=_AGAIN)
                if shape != part.shape:
                    raise ModelError(
                        f"{name!r} in {folder} has shape {shape}, config.json says {part.shape}", hint=_AGAIN
                    )
                start, size = part.tensor_slice.start, part.tensor_slice.size
                if not part.tensor_slice.numel:
                    continue
                if name in index:
                    values = stored[tuple(map(slice, start, map(operator.add, start, size)))]
                else:
                    values = mxfp4.read_slice(blocks, scales, start, size)
                part.of(block).copy_(values)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Map each weight to the safetensors file that holds it."""
    sharded = folder / "model.safetensors.index.json"
    if sharded.exists():
        try:
            return {name: folder / file for name, file in json.loads(sharded.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{sharded} cannot be read: {error}", hint=_AGAIN) from error
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ModelError(f"{folder} holds no safetensors file", hint="give a Hugging Face model folder")
    return found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint=_AGAIN) from error


def save_hf(model: nn.Module, source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model as a Hugging Face folder: every rank takes part, rank 0 writes.

    The config and tokenizer files come from `source`, which the run started from; `folder` exists.
    """
    from huggingface_hub import save_torch_state_dict

    state: dict[str, torch.Tensor] = {}
    for name, parameter in named_weights(model):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.get_rank() == 0:
            for part in names_of(model).parts(name, full.shape):
                state[part.name] = part.of(full.detach()).to("cpu", torch.float32 if part.float32 else dtype, copy=True)
    if dist.get_rank() == 0:
        for path in source.iterdir():
            if (
                path.is_file()
                and path.suffix in (".json", ".jinja", ".model", ".txt")
                and "safetensors" not in path.name
            ):
                shutil.copy(path, folder / path.name)
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        for stale in ("torch_dtype", "quantization_config"):
            config.pop(stale, None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_torch_state_dict(state, folder, metadata={"format": "pt"})
    dist.barrier()


def save_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, counts: Mapping[str, int], folder: Path
) -> None:
    """Write float32 weights, optimizer state and counts, each rank its shards; any number of ranks can read them.

    Frozen weights are written without optimizer state.

    Raises:
        CheckpointError: a rank could not write.
    """
    try:
        dcp.save(_training_state(model, optimizer, counts), checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"the training state in {folder} cannot be written: {_cause(error)}",
            hint="free space, or choose another --out; earlier checkpoints are as they were",
        ) from error


def load_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, counts: Iterable[str], folder: Path
) -> dict[str, int]:
    """Read what save_training_state wrote, into the model and the optimizer.

    Returns:
        The counts of these names.

    Raises:
        CheckpointError: it is incomplete, corrupt, crafted, or of another model.
    """
    state = _training_state(model, optimizer, dict.fromkeys(counts, 0))
    try:
        reader = TrainingStateReader(folder)
        _check_frozen(set(reader.read_metadata().state_dict_metadata), set(state), folder)
        dcp.load(state, storage_reader=reader)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"the training state in {folder} cannot be read: {_cause(error)}",
            hint="delete that step's folder to continue from the one before it",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizer.state[parameter]["step"].copy_(state["steps"])
    return {name: int(state[name]) for name in counts}


def _check_frozen(saved: set[str], wanted: set[str], folder: Path) -> None:
    """Raise CheckpointError if a training state is this model's, but other weights of it were trained."""

    def weights(keys: set[str], kind: str) -> set[str]:
        return {key.removeprefix(kind) for key in keys if key.startswith(kind)}

    trained, train = weights(saved, "exp_avg."), weights(wanted, "exp_avg.")
    if trained != train and weights(saved, "model.") == weights(wanted, "model."):
        raise CheckpointError(
            f"the training state in {folder} is of a run that trained {len(trained)} weights, this one trains "
            f"{len(train)}: {min(trained ^ train)!r} is frozen in one of them",
            hint="give --trainer.frozen what that run had, or choose another --out",
        )


def _cause(error: BaseException) -> str:
    """Return one line; what fails on any rank reaches all as a CheckpointException, which is not an Exception."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, counts: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return flat views of all state by name; AdamW makes its own only at the first step, so it is made here."""
    state: dict[str, torch.Tensor] = {name: torch.tensor(count) for name, count in counts.items()}
    steps = torch.tensor(0.0)
    for name, parameter in named_weights(model):
        state[f"model.{name}"] = parameter.detach()
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.tensor(0.0, device=parameter.device)  # where fused AdamW wants it
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        steps = moments["step"].detach().clone().cpu()
        state[f"exp_avg.{name}"] = moments["exp_avg"]
        state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    state["steps"] = steps
    return state
