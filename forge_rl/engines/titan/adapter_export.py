"""Exports the adapters of a training state on disk to PEFT's format, from any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.titan.blocks import Block, LoadPlanner
from forge_rl.engines.titan.index import TensorReader
from forge_rl.engines.titan.lora import rounded_factor
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.models.adapters import write_adapter
from forge_rl.runtime.far_files import Folder, filled
from forge_rl.weights.names import Names, SameNames


@dataclass(frozen=True, kw_only=True)
class AdapterExport:
    """Writes a model's adapters; holds their settings and the names of the model's weights.

    AdapterExport(lora=lora, names=names).write(folder / "training", source, folder / "model")
    """

    lora: LoRAConfig
    names: Names | SameNames

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
            if key.startswith("model.") and key.endswith(ADAPTERS) and isinstance(metadata, TensorStorageMetadata):
                blocks[key] = Block.whole(torch.empty(metadata.size, dtype=metadata.properties.dtype))
        planner.set_up_planner(dict(blocks), index, is_coordinator=True)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for key, block in blocks.items():
            module, _, kind = key.removeprefix("model.").rpartition(".")
            assert isinstance(block.values, torch.Tensor)
            values = rounded_factor(block.values, self.lora).float()
            factors.setdefault(self.names.to_hf(f"{module}.weight"), {})[kind] = values
        a_name, b_name = ADAPTERS
        with filled(folder) as place:
            write_adapter(
                place,
                {name: (pair[a_name], pair[b_name]) for name, pair in factors.items()},
                base=source,
                alpha=self.lora.alpha,
                rslora=self.lora.rslora,
                dropout=self.lora.dropout,
            )
