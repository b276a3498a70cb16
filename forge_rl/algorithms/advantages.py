"""Advantages of episodes and their tokens, relative to the other episodes of their group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.errors import ConfigError
from forge_rl.types import Advantages, Batch, Episode, Score

_NONE = np.zeros(0, np.float32)
EPSILON = 1e-4
"""Added to the standard deviation of a group, as TRL does."""
Scale = Literal["std", "none", "batch"]


def group_advantages(rewards: torch.Tensor, *, scale: Scale = "std") -> torch.Tensor:
    """Center rewards within their group and, unless scale is "none", divide by the group's standard deviation.

        group_advantages(torch.tensor([[0.0, 1.0]]), scale="none")  # [[-0.5, 0.5]]

    "std" is GRPO: (r - mean) / (std + 1e-4), DeepSeekMath (arXiv 2402.03300) section 4.1.2. The paper does not specify
    the standard deviation; this is the unbiased one (divisor G - 1), as in TRL. "none" is r - mean, Dr. GRPO (arXiv
    2503.20783) section 3.2, which does not favour groups with little spread. "batch" is "std" with all rewards as one
    group, so that a group may have one episode: REINFORCE with a batch baseline, as in REINFORCE++ (arXiv 2501.03262)
    equation 9.

    A group with equal rewards gets exactly 0. It is recognised by its max and min: the standard deviation of equal
    floats need not be 0 (8e-9 for 0.1 repeated), and dividing by it would train on rounding noise.

    Rewards are [P, G] of any float or integer dtype, advantages [P, G] float32 without gradient.

    Raises:
        ConfigError: rewards are not two-dimensional, one is not finite, or the scale is unknown.
    """
    if scale not in get_args(Scale):
        raise ConfigError(f"unknown scale of advantages {scale!r}", hint='use "std", "none" or "batch"')
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
    if scale == "batch":
        return group_advantages(rewards.reshape(1, -1)).reshape(rewards.shape)
    uniform = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "std" and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(dim=1, keepdim=True, correction=1) + EPSILON)
    return torch.where(uniform, 0.0, advantages)


def check_group_size(size: int, scale: Scale = "std") -> None:
    """Refuse groups of one episode if advantages are relative to the group, and would be 0.

    Raises:
        ConfigError: the group size is below 2, and the scale is not "batch".
    """
    if size < 2 and scale != "batch":
        raise ConfigError(
            f"--group-size is {size}, but advantages are relative to the other episodes of a group",
            hint='set --group-size to 2 or more, or use batch_advantages(batch, scale="batch")',
        )


def batch_advantages(batch: Batch, *, scale: Scale = "std") -> Advantages:
    """Return a batch's advantages: `group_advantages`, plus the advantages of turns and tokens, if any.

        advantages = batch_advantages(batch)
        packed = pack(batch, advantages, run.trainer.layout)

    If rewards assign values to turns or tokens (`Score.turns`, `Score.tokens`), these are centered, and with scale
    "std" divided by their standard deviation, over the values of all turns, or all tokens, of the group, like the steps
    of process supervision in DeepSeekMath (arXiv 2402.03300) section 4.1.3; with "batch", over the values of all
    groups. A turn's value is added to the advantage of its own tokens, as in MT-GRPO (arXiv 2505.11821) equation 5; a
    token's value to its own. Values that are all equal add nothing.

    Raises:
        ConfigError: as group_advantages, or a value is infinite.
    """
    advantages = group_advantages(batch.rewards, scale=scale)
    if not any(each.score and (each.score.turns or each.score.tokens) for each in batch.episodes):
        return advantages
    if scale != "batch":
        return [_with_values(group.episodes, advantages[p].tolist(), scale) for p, group in enumerate(batch.groups)]
    found = iter(_with_values(batch.episodes, advantages.flatten().tolist(), "std"))
    return [[next(found) for _ in group.episodes] for group in batch.groups]


def _with_values(episodes: Sequence[Episode], advantages: Sequence[float], scale: str) -> list[npt.NDArray[np.float32]]:
    """Return token advantages of each episode, relative to the other episodes given."""
    scores = [episode.score or Score(total=0.0) for episode in episodes]
    of_turns = _normalised([np.asarray(score.turns, np.float32) for score in scores], episodes, scale)
    of_tokens = _normalised([np.concatenate([_NONE, *score.tokens]) for score in scores], episodes, scale)
    found = []
    for episode, advantage, turns, tokens in zip(episodes, advantages, of_turns, of_tokens, strict=True):
        own = np.full(episode.response_tokens, advantage, np.float32)
        if len(turns):
            own += np.repeat(turns, [len(turn.token_ids) for turn in episode.turns])
        if len(tokens):
            own += tokens
        found.append(own)
    return found


def _normalised(
    values: Sequence[npt.NDArray[np.float32]], episodes: Sequence[Episode], scale: str
) -> list[npt.NDArray[np.float32]]:
    """Center and scale values over all episodes; NaN, a missing value, becomes 0."""
    infinite = next((each.task.id for each, own in zip(episodes, values, strict=True) if np.isinf(own).any()), None)
    if infinite is not None:
        raise ConfigError(f"the reward of {infinite} has infinite values", hint="give turns and tokens finite numbers")
    given = np.concatenate(values)
    given = given[~np.isnan(given)]
    if not len(given) or given.max() == given.min():
        return [np.zeros_like(each) for each in values]
    mean = float(given.mean(dtype=np.float64))
    divisor = float(given.std(ddof=1, dtype=np.float64)) + EPSILON if scale == "std" else 1.0
    return [np.nan_to_num((each - mean) / divisor).astype(np.float32) for each in values]
