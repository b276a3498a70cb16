"""Losses of the Tinker API: sums over tokens, without normalization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.protocol import Loss, LossInputs, Sum
from forge_rl.gateway.errors import ApiError

if TYPE_CHECKING:
    import torch

WEIGHTS = "token_weights"
"""Column with each target's weight, for cross_entropy."""
_SAMPLED = ("logprobs", "advantages")
INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "dro": _SAMPLED,
}
"""Values that each loss needs for a target, besides the target itself."""
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SETTINGS: Mapping[str, Mapping[str, float]] = {"ppo": _CLIPS, "cispo": _CLIPS, "dro": {"beta": 0.05}}
"""Settings of each loss, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class TinkerLoss(Loss):
    """One of the API's losses, with q the sampling logprob, p the policy's, A the advantage and r = exp(p - q).

    cross_entropy: -w p. importance_sampling: -r A. ppo: -min(r A, clip(r) A). cispo: -clip(r) A p, without the gradient
    of r. dro: -(p A - beta/2 (p - q)^2). The thresholds are bounds of the ratio itself.
    """

    kind: str
    low: float = 0.8
    high: float = 1.2
    beta: float = 0.05

    @staticmethod
    def read(kind: str, config: Mapping[str, float]) -> TinkerLoss:
        """Make a request's loss.

        Raises:
            ApiError: the loss or a setting is not supported, or is out of range.
        """
        if kind not in INPUTS:
            raise ApiError(
                400, f"the loss {kind[:40]!r} is not supported here; choose from {', '.join(INPUTS)}", param="loss_fn"
            )
        defaults = SETTINGS.get(kind, {})
        if unknown := sorted(config.keys() - defaults.keys()):
            raise ApiError(
                400,
                f"{kind} has no setting {unknown[0][:40]!r}; it has {', '.join(defaults) or 'none'}",
                param="loss_fn_config",
            )
        values = {**defaults, **config}
        low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", 0.0)
        beta = values.get("beta", 0.0)
        # NaN, which protobuf can carry, fails the comparisons.
        if not (0 <= low <= high < 1e6 and 0 <= beta < 1e6):
            raise ApiError(400, f"a setting of {kind} is out of range: {values}", param="loss_fn_config")
        return TinkerLoss(kind=kind, low=low, high=high, beta=beta)

    def divisor(self, counts: Counts) -> float:
        return 1.0

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        import torch

        p, q, advantages = inputs.logprobs, inputs.behaviour, inputs.advantages
        if self.kind == "cross_entropy":
            # `where` comes before the product, as 0 * -inf is NaN.
            objective = torch.where(inputs.columns[WEIGHTS] != 0, p, 0.0) * inputs.columns[WEIGHTS]
            return -torch.where(inputs.mask, objective, 0.0).sum(), {}
        # A token without advantage adds nothing, and its ratio may overflow: 0 * inf is NaN.
        is_used = inputs.mask & (advantages != 0) if self.kind != "dro" else inputs.mask
        p = torch.where(is_used, p, 0.0)
        ratio = torch.where(is_used, p - q, 0.0).exp()
        clipped = ratio.clamp(self.low, self.high)
        match self.kind:
            case "importance_sampling":
                objective = ratio * advantages
            case "ppo":
                # The minimum removes the gradient of ratios that moved past a threshold in the advantage's direction.
                objective = torch.minimum(ratio * advantages, clipped * advantages)
            case "cispo":
                # The clipped ratio only weighs the gradient of the logprob.
                objective = clipped.detach() * p * advantages
            case _:
                objective = p * advantages - 0.5 * self.beta * (p - q).square()
        return -torch.where(is_used, objective, 0.0).sum(), {}
