"""Advantages of episodes over the other episodes of their group."""

from __future__ import annotations

from typing import Literal

import torch

from forge_rl.errors import ConfigError

EPSILON = 1e-4
"""Added to the standard deviation of a group, as TRL does."""


def group_advantages(rewards: torch.Tensor, *, scale: Literal["std", "none"] = "std") -> torch.Tensor:
    """Center rewards within their group and, unless scale is "none", divide by the group's standard deviation.

        group_advantages(torch.tensor([[0.0, 1.0]]), scale="none")  # [[-0.5, 0.5]]

    "std" is GRPO: (r - mean) / (std + 1e-4), DeepSeekMath (arXiv 2402.03300) section 4.1.2. The paper leaves the kind
    of standard deviation open; this is the unbiased one (divisor G - 1), as in TRL. "none" is r - mean, Dr. GRPO
    (arXiv 2503.20783) section 3.2, which does not favour groups of little spread.

    A group whose rewards are all equal gets exactly 0. It is recognised by its max and min: the standard deviation of
    equal floats need not be 0 (0.1 repeated gives 8e-9), and dividing by it would train on rounding noise.

    Rewards are [P, G] of any float or integer dtype, advantages [P, G] float32 without gradient.

    Raises:
        ConfigError: rewards have another number of dims, one is not finite, or the scale is unknown.
    """
    if scale not in ("std", "none"):
        raise ConfigError(f"advantages have no scale {scale!r}", hint='use "std" or "none"')
    if rewards.ndim != 2:
        raise ConfigError(f"rewards have shape {list(rewards.shape)}, not [P, G]", hint="give one row to each group")
    rewards = rewards.detach().to(torch.float32)
    if not bool(torch.isfinite(rewards).all()):
        group, episode = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ConfigError(
            f"episode {episode} of group {group} has reward {rewards[group, episode].item()}",
            hint="make the reward function return a finite number; score a bad answer 0.0",
        )
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    uniform = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "std" and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(dim=1, keepdim=True, correction=1) + EPSILON)
    return torch.where(uniform, 0.0, advantages)
