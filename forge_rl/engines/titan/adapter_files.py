"""An adapter with its optimizer's state on disk: PEFT's files, and forge_rl's own next to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from forge_rl.engines.adapter_settings import AdapterSettings
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.errors import CheckpointError
from forge_rl.models.adapters import Adapter, write_adapter
from forge_rl.models.hf_folder import open_weights, read_object

TRAINING, COUNTS = "training.safetensors", "training.json"
"""forge_rl's own files: the moments; and the settings with the numbers of updates and passes."""
_HINT = "save the adapter again, or load an earlier checkpoint"


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """State of an adapter's training, without zeros past its rank."""

    scale: float
    """Factor on B A."""
    updates: int
    planned: int
    """Number of passes, from which each draws its dropout."""
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """Factors under "values" and the moments under AdamW's names, each by "WEIGHT/lora_A" and "WEIGHT/lora_B", with
    Hugging Face's name of the adapted weight."""

    def check(self, kind: str, names: set[str]) -> None:
        """Raise CheckpointError unless these factors are all that a kind of tensors has."""
        if wrong := sorted(names ^ self.tensors[kind].keys()):
            raise CheckpointError(
                f"the saved adapter and this one are not on the same modules: {wrong[0].partition('/')[0]!r:.120}",
                hint="load it into an adapter with the same targets",
            )

    def tensor(self, kind: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of a shape; raises CheckpointError if it has another one, or is not finite."""
        tensor = self.tensors[kind][name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name!r:.120} of the saved adapter has shape {tuple(tensor.shape)}, and {shape} is needed",
                hint="load it into an adapter of the same rank",
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{name!r:.120} of the saved adapter is not finite", hint=_HINT)
        return tensor


def write_state(folder: Path, state: AdapterState, settings: AdapterSettings, *, base: Path) -> None:
    """Write an adapter's state into an existing folder.

    Args:
        base: Hugging Face folder of the model that it adapts.

    Raises:
        CheckpointError: a file cannot be written.
    """
    try:
        _write_files(folder, state, settings, base)
    except (OSError, SafetensorError) as error:
        # An error of a library would count as one of the device, for which ranks are restarted.
        cause = (error.strerror if isinstance(error, OSError) else "") or error
        raise CheckpointError(
            f"an adapter cannot be written: {cause}", hint="free space, or choose another --out"
        ) from error


def _write_files(folder: Path, state: AdapterState, settings: AdapterSettings, base: Path) -> None:
    lora, factors = settings.lora, state.tensors["values"]
    a_name, b_name = ADAPTERS
    weights = [name.removesuffix(f"/{a_name}") for name in factors if name.endswith(a_name)]
    write_adapter(
        folder,
        {name: (factors[f"{name}/{a_name}"], factors[f"{name}/{b_name}"]) for name in weights},
        base=base,
        alpha=lora.alpha,
        rslora=lora.rslora,
        dropout=lora.dropout,
    )
    # Cuts of B are strided views, which safetensors refuses.
    moments = {
        f"{kind}/{name}": tensor.contiguous()
        for kind, tensors in state.tensors.items()
        if kind != "values"
        for name, tensor in tensors.items()
    }
    save_file(moments, folder / TRAINING)
    counts = {"updates": state.updates, "planned": state.planned, "seed": settings.seed, "lora": asdict(lora)}
    (folder / COUNTS).write_text(json.dumps(counts, indent=2) + "\n")


def read_state(folder: Path, *, with_optimizer: bool) -> AdapterState:
    """Read what `write_state` wrote, or an adapter of peft's without its optimizer.

    Raises:
        CheckpointError, ModelError: a file is missing or malformed.
    """
    adapter = Adapter.read(folder)
    a_name, b_name = ADAPTERS
    factors = {
        f"{name}/{kind}": factor
        for name, pair in adapter.factors().items()
        for kind, factor in zip((a_name, b_name), pair, strict=True)
    }
    tensors: dict[str, dict[str, torch.Tensor]] = {"values": factors}
    updates = planned = 0
    if with_optimizer:
        if not (folder / COUNTS).is_file():
            raise CheckpointError(f"{folder} holds no optimizer's state", hint="load its weights alone")
        counts = read_object(folder / COUNTS, hint=_HINT)
        updates = _count(counts.get("updates"), "updates", folder)
        # Files of earlier versions lack it. Each update had a pass or more.
        planned = _count(counts.get("planned", updates), "passes", folder)
        with open_weights(folder / TRAINING) as file:
            for key in file.keys():  # noqa: SIM118  safetensors' file is no mapping
                kind, _, name = key.partition("/")
                tensors.setdefault(kind, {})[name] = file.get_tensor(key)
        if updates and tensors.keys() != {"values", "exp_avg", "exp_avg_sq"}:
            raise CheckpointError(f"{folder / TRAINING} lacks a moment of the optimizer", hint=_HINT)
    return AdapterState(scale=adapter.scale, updates=updates, planned=planned, tensors=tensors)


def _count(value: object, noun: str, folder: Path) -> int:
    # In Python, True is an int.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise CheckpointError(f"{folder / COUNTS} has {value!r:.40} {noun}", hint=_HINT)
    return value
