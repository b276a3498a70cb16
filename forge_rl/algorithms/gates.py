"""Gates: leave episodes with small advantages out of training."""

from __future__ import annotations

from typing import Literal

import numpy as np

from forge_rl.errors import ConfigError
from forge_rl.types import Advantages


def gate_advantages(advantages: Advantages, *, least: float, by: Literal["episode", "group"] = "episode") -> Advantages:
    """Set advantages to 0 where they are small.

        advantages = gate_advantages(batch_advantages(batch), least=0.1)

    The loss of such an episode is 0, but it still counts in the loss's mean. `pack` leaves out groups whose advantages
    are all 0. An episode whose tokens have their own advantages is small if all of them are.

    Args:
        advantages: [P, G] float32, or [P][G] arrays with one per token; not changed.
        least: an advantage of this magnitude or more is kept, in the units of the estimator.
        by: "episode" gates each episode by its own advantage; "group" gates groups in which all are small.

    Raises:
        ConfigError: least is not a finite number of at least 0, or `by` is unknown.
    """
    if not 0 <= least < np.inf or by not in ("episode", "group"):
        raise ConfigError(
            f"advantages are gated by {by!r} with least={least}",
            hint='set least to a finite number from 0 on, and by to "episode" or "group"',
        )
    import torch

    if isinstance(advantages, torch.Tensor):
        # [P, G] bool.
        large = advantages.abs() >= least
        return advantages.where(large.any(dim=1, keepdim=True) if by == "group" else large, 0.0)
    rows = []
    for group in advantages:
        is_large = [bool((np.abs(array) >= least).any()) for array in group]
        # By group, one large advantage keeps all episodes of the group.
        is_large = [any(is_large)] * len(is_large) if by == "group" else is_large
        rows.append([array if keep else np.zeros_like(array) for array, keep in zip(group, is_large, strict=True)])
    return rows
