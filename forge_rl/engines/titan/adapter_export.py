"""Exports the adapters of a training state on disk to PEFT's format, from any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.titan.adapter_switch import rounded_factor
from forge_rl.engines.titan.blocks import Block, LoadPlanner
from forge_rl.engines.titan.factor_pairs import factor_pairs
from forge_rl.engines.titan.index import TensorReader
from forge_rl.engines.titan.quantized_base import QuantizedWeight
from forge_rl.engines.titan.shards import ADAPTERS, named_weights, names_of
from forge_rl.models.adapters import write_adapter
from forge_rl.models.base_formats import BaseQuantization
from forge_rl.runtime.far_files import Folder, filled


@dataclass(frozen=True, kw_only=True)
class AdapterExport:
    """Writes a model's adapters; holds their settings and names.

    AdapterExport.of(model).write(folder / "training", source, folder / "model")
    """

    lora: LoRAConfig
    names: Mapping[str, tuple[str, str]]
    """For each factor's key in the training state: the name of its adapter, see `FactorPair`, and the factor's own."""
    quantization: BaseQuantization | None
    """Weights of the base that the model holds quantised; None if it holds all in full."""

    @staticmethod
    def of(model: Any) -> AdapterExport:
        """Return the export of a model's adapters."""
        names = {
            f"model.{pair.path}.{parameter}": (pair.name, kind)
            for pair in factor_pairs(model)
            for parameter, kind in zip(pair.parameter_names, ADAPTERS, strict=True)
        }
        return AdapterExport(lora=model.adapters.lora, names=names, quantization=quantization_of(model))

    def write(self, training: Folder, source: Path, folder: Folder) -> None:
        """Write the adapters of a training state into an existing folder, in float32, rounded as in passes.

        Args:
            training: folder of the training state.
            source: Hugging Face folder of the model that was adapted.

        Raises:
            OSError, ValueError, TypeError, LookupError: the folder does not hold a training state of adapters.
        """
        reader, planner = TensorReader(training), LoadPlanner()
        index = reader.read_metadata()
        reader.set_up_storage_reader(index, is_coordinator=True)
        blocks: dict[str, Block] = {}
        for key, metadata in index.state_dict_metadata.items():
            if key in self.names and isinstance(metadata, TensorStorageMetadata):
                # Adapters are small, so one rank reads whole factors, whatever layout wrote them.
                blocks[key] = Block.whole(torch.empty(metadata.size, dtype=metadata.properties.dtype))
        planner.set_up_planner(dict(blocks), index, is_coordinator=True)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for key, block in blocks.items():
            name, kind = self.names[key]
            assert isinstance(block.values, torch.Tensor)
            factors.setdefault(name, {})[kind] = rounded_factor(block.values, self.lora).float()
        a_name, b_name = ADAPTERS
        with filled(folder) as place:
            write_adapter(
                place,
                {name: (pair[a_name], pair[b_name]) for name, pair in factors.items()},
                base=source,
                alpha=self.lora.alpha,
                rslora=self.lora.rslora,
                dropout=self.lora.dropout,
                quantization=self.quantization,
            )


def quantization_of(model: nn.Module) -> BaseQuantization | None:
    """Return the weights that a model holds quantised, by their names in its files; None if there are none."""
    weights = {name: weight for name, weight in named_weights(model) if isinstance(weight, QuantizedWeight)}
    if not weights:
        return None
    names = (part.name for name, weight in weights.items() for part in names_of(model).parts(name, weight.shape))
    return BaseQuantization(base_format=next(iter(weights.values())).base_format, weights=tuple(names))
