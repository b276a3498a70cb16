"""Value loss: fits a critic's values to their targets, clipped around the values before the batch's first update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.protocol import Loss, LossInputs, Need, Sum
from forge_rl.errors import check_flags

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Loss):
    """Half the squared error of values, by default clipped as in PPO's implementation.

        packed = pack(batch, advantages, critic.layout, columns={"returns": targets, "old_values": values})
        await critic.step(packed, ValueLoss(clip=0.2))

    With V a value, R its target and V_old the value before the batch's first update, the loss of a token is
    max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 (PPO2 of OpenAI baselines; verl's
    `compute_value_loss`). A value that has moved further than `clip` towards its target has no gradient.
    """

    clip: float = 0.5
    """Largest change of a value in a batch that is rewarded, in units of reward; inf does not clip."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        check_flags(self, "--value-", above={"clip": 0})

    @property
    def needs(self) -> Collection[Need]:
        return frozenset[Need](("values",))

    @property
    def columns(self) -> Mapping[str, int]:
        return {"returns": 0, "old_values": 0}

    @property
    def keeps_uniform(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        import torch

        assert inputs.values is not None, "the trainer has a value model"
        # Selected before the arithmetic: elsewhere anything may be NaN, and 0 times its gradient would be, too.
        values, returns, old_values = (
            torch.where(inputs.mask, tensor, 0.0)
            for tensor in (inputs.values, inputs.columns["returns"], inputs.columns["old_values"])
        )
        unclipped = (values - returns).square()
        clipped = (old_values + (values - old_values).clamp(-self.clip, self.clip) - returns).square()
        losses = 0.5 * torch.where(inputs.mask, inputs.weights, 0.0) * torch.maximum(unclipped, clipped)
        return losses.sum(), {"clipped": (clipped > unclipped).sum().to(losses.dtype)}
