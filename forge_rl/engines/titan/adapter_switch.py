"""State that the adapters of a model share: whether they act, the draw of their dropout, and the parts of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.packing.rows import Row
from forge_rl.system.seeds import derive_seed


@dataclass
class AdapterSwitch:
    """State that all adapters of a model share: whether they act, and the draw of their dropout."""

    lora: LoRAConfig
    seed: int
    on: bool = True
    """False while the model acts as the one that training started from."""
    travel: bool = False
    """True if versions hold adapters and the base's weights, not merged weights."""
    row_seed: int = 0
    """Seed of dropout in the current row, see `draw`."""
    parts: Sequence[RowPart] = ()
    """Parts of the current row, which cover its tokens in order; empty if the model's own adapter acts on all of it."""

    def draw(self, row: Row, planned: int) -> None:
        """Set the draw of dropout for a row's forward and backward pass.

        Args:
            planned: number of earlier minibatches of the run.
        """
        # Once per row: hashing a long row's token ids takes milliseconds, and a model has hundreds of modules.
        if self.lora.dropout:
            self.row_seed = derive_seed(self.seed, "dropout", planned, tuple(row.token_ids.tolist()))

    def dropped(self, module_name: str, inputs: torch.Tensor) -> torch.Tensor:
        """Drop out a share of a module's inputs, the same ones if the forward pass is recomputed; none if gradients are
        disabled."""
        share = self.lora.dropout
        if not share or not torch.is_grad_enabled():
            return inputs
        if inputs.is_meta:
            # A plan draws nothing, but must keep the same tensors as the real product.
            return inputs * inputs.bool() / (1 - share)
        # Seeded by row and module, so that recomputation in the backward pass draws the same mask.
        generator = torch.Generator(inputs.device)
        generator.manual_seed(derive_seed(self.row_seed, "dropout", module_name))
        mask = torch.rand(inputs.shape, generator=generator, device=inputs.device) >= share
        return inputs * mask.to(inputs.dtype) / (1 - share)


def rounded_factor(factor: torch.Tensor, lora: LoRAConfig) -> torch.Tensor:
    """Round a float32 A or B to the settings' dtype, but keep it in float32 and pass its gradient through unrounded;
    return factors of other dtypes unchanged."""
    if lora.dtype == "float32" or factor.dtype != torch.float32:
        return factor
    # Exact: the difference has no more bits than the factor. Gradients pass a sum without being rounded themselves.
    values = factor.detach()
    return factor + (values.bfloat16().float() - values)


@dataclass(frozen=True, eq=False)
class RowPart:
    """Tokens of one adapter in a row of several."""

    tokens: slice
    switch: AdapterSwitch
    """The adapter's own scale and draw of dropout."""
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Its A and B of each adapted module, by `adapter_name`."""
