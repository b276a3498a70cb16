"""Advantages of episodes and their tokens, relative to the other episodes of their group or batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ConfigError
from forge_rl.types import Advantages, Batch, Episode, Score

if TYPE_CHECKING:
    import torch

_NONE = np.zeros(0, np.float32)
EPSILON = 1e-4
"""Added to standard deviations, as TRL does."""
Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "max_rl",
    "batch_std",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
_UNGROUPED = ("reinforce", "reinforce_pp")
"""Estimators with the whole batch as baseline, so that a group may have one episode."""
_UNSCALED = ("dr_grpo", "rloo", "opo", "max_rl")
"""Estimators that divide by no standard deviation."""


def group_advantages(
    rewards: torch.Tensor,
    *,
    estimator: Estimator = "grpo",
    lengths: torch.Tensor | None = None,
    scored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one advantage per episode from the rewards of its group, or of the batch.

        group_advantages(torch.tensor([[0.0, 1.0]]), estimator="dr_grpo")  # [[-0.5, 0.5]]

    With r a reward, mean and std over its group of G, and l the number of tokens that an episode generated:

        grpo                   (r - mean) / (std + 1e-4)         DeepSeekMath (arXiv 2402.03300) section 4.1.2
        dr_grpo                r - mean                          Dr. GRPO (arXiv 2503.20783) section 3.2
        rloo                   r - mean of the other rewards     RLOO (arXiv 2402.14740) section 3.2
        opo                    r - sum(l * r) / sum(l)           OPO (arXiv 2505.23585)
        max_rl                 (r - mean) / mean                 MaxRL (arXiv 2602.02710)
        batch_std              (r - mean) / (batch std + 1e-4)   Lite PPO (arXiv 2508.08221)
        reinforce              grpo, with the batch as one group
        reinforce_pp           r, whitened over the batch's tokens          REINFORCE++ (arXiv 2501.03262)
        reinforce_pp_baseline  r - mean, whitened over the batch's tokens   the same paper's form for groups

    Standard deviations are unbiased (divisor G - 1), as in TRL; DeepSeekMath does not say which it uses. Whitening
    subtracts the mean and divides by sqrt(variance + 1e-8), where an episode counts once for each of its tokens, as in
    verl. REINFORCE++ here has neither a discount nor a KL penalty in its return. MaxRL is meant for rewards of at least
    0, where its advantages lie between -1 and G - 1; with others, a group whose mean is not above 0 gets 0, and
    advantages are clamped to +-(G - 1).

    Equal rewards, of a group or, without groups, of the batch, give exactly 0 before whitening. They are recognised by
    max and min: the standard deviation of equal floats need not be 0 (8e-9 for 0.1 repeated), and dividing by it would
    train on rounding noise.

    Args:
        rewards: [P, G], of any float or integer dtype.
        lengths: [P, G], generated tokens of each episode; only opo and the two forms of REINFORCE++ need them.
        scored: [P, G] bool, False for an episode without a score, which gets 0 and is in no mean, standard deviation or
            count; by default all are scored. Its reward is not read.

    Returns:
        Advantages, [P, G] float32, without gradient.

    Raises:
        ConfigError: rewards are not two-dimensional, or one is not finite; lengths are missing, of another shape or
            below 0; `scored` is of another shape; the estimator is unknown.
    """
    import torch  # over 60 lines in all, for the formulas above

    mask = torch.ones(rewards.shape, dtype=torch.bool) if scored is None else scored
    if mask.shape != rewards.shape:
        raise ConfigError(f"`scored` has shape {list(mask.shape)}", hint="give one value to each reward")
    rewards = rewards.detach().to(torch.float32).double().where(mask, 0.0)
    _check(rewards, estimator)
    if not bool(mask.any()):
        return torch.zeros(rewards.shape)
    tokens = _lengths(rewards, lengths) if estimator in ("opo", "reinforce_pp", "reinforce_pp_baseline") else rewards
    tokens = tokens.where(mask, 0.0)
    match estimator:
        case "reinforce":
            # The whole batch as one group.
            advantages = _in_groups(rewards.reshape(1, -1), "grpo", tokens, mask.reshape(1, -1)).reshape(rewards.shape)
        case "reinforce_pp":
            advantages = _whitened(rewards, tokens)
        case _:
            advantages = _in_groups(rewards, estimator, tokens, mask)
    return advantages.where(mask, 0.0).float()


def _in_groups(rewards: torch.Tensor, estimator: Estimator, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compare each reward with the others of its group; float64, as are the rewards.

    Rewards outside the mask are 0; their advantages have no meaning.
    """
    count = mask.sum(dim=1, keepdim=True)
    mean = rewards.sum(dim=1, keepdim=True) / count.clamp(min=1)
    # Equal rewards are found by min and max: the standard deviation of equal floats need not be 0.
    low, high = (rewards.where(mask, sign * math.inf) for sign in (1, -1))
    has_spread = low.amin(dim=1, keepdim=True) < high.amax(dim=1, keepdim=True)
    centered = (rewards - mean).where(has_spread & mask, 0.0)
    match estimator:
        case "grpo":
            # Unbiased, over the episodes that have a score.
            variance = centered.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
            centered = centered / (variance.sqrt() + EPSILON)
        case "rloo":
            # r - mean of the other G - 1 = (r - mean of all G) * G / (G - 1).
            centered = centered * (count / (count - 1).clamp(min=1))
        case "opo":
            total = tokens.sum(dim=1, keepdim=True)
            baseline = (tokens * rewards).sum(dim=1, keepdim=True) / total.clamp(min=1)
            # A group that generated nothing has no weights for its mean.
            centered = (rewards - baseline.where(total > 0, mean)).where(has_spread, 0.0)
        case "max_rl":
            bound = (count - 1).clamp(min=0).double()
            centered = (centered / mean).clamp(-bound, bound).where(has_spread & (mean > 0), 0.0)
        # The standard deviation of one reward is NaN; its advantage is 0 anyway.
        case "batch_std" if int(mask.sum()) > 1:
            centered = centered / (rewards[mask].std() + EPSILON)
        case "reinforce_pp_baseline":
            centered = _whitened(centered, tokens)
    return centered


def _check(rewards: torch.Tensor, estimator: Estimator) -> None:
    """Refuse arguments that `group_advantages` cannot work with."""
    if estimator not in get_args(Estimator):
        estimators = ", ".join(get_args(Estimator))
        raise ConfigError(f"unknown estimator of advantages {estimator!r}", hint=f"use one of {estimators}")
    if rewards.ndim != 2:
        raise ConfigError(f"rewards have shape {list(rewards.shape)}, not [P, G]", hint="give one row to each group")
    if not bool(rewards.isfinite().all()):
        group, episode = (~rewards.isfinite()).nonzero()[0].tolist()
        raise ConfigError(
            f"episode {episode} of group {group} has reward {rewards[group, episode].item()}",
            hint="make the reward function return a finite number; score a bad answer 0.0",
        )


def _lengths(rewards: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the lengths as float64, or refuse them."""
    if lengths is None or lengths.shape != rewards.shape or bool((lengths < 0).any()):
        problem = "missing" if lengths is None else f"of shape {list(lengths.shape)}, or below 0"
        raise ConfigError(
            f"the episodes' lengths are {problem}",
            hint="give the generated tokens of each episode, or batch_advantages",
        )
    return lengths.detach().double()


def _whitened(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whiten values over the tokens that carry them; 0 if these are fewer than two, or all equal."""
    # An episode counts once for each of its tokens, so one without tokens does not count.
    used_values, count = values[tokens > 0], tokens.sum()
    if count < 2 or used_values.max() == used_values.min():
        return values * 0
    mean = (tokens * values).sum() / count
    variance = (tokens * (values - mean) ** 2).sum() / (count - 1)
    return (values - mean) * (variance + 1e-8).rsqrt()


def check_group_size(size: int, estimator: Estimator = "grpo") -> None:
    """Refuse groups of one episode if advantages are relative to the group, and would be 0.

    Raises:
        ConfigError: the group size is below 2, and the estimator compares the episodes of a group.
    """
    if size < 2 and estimator not in _UNGROUPED:
        raise ConfigError(
            f"--group-size is {size}, but advantages are relative to the other episodes of a group",
            hint='set --group-size to 2 or more, or use batch_advantages(batch, estimator="reinforce")',
        )


def batch_advantages(batch: Batch, *, estimator: Estimator = "grpo") -> Advantages:
    """Return a batch's advantages: `group_advantages`, plus the advantages of turns and tokens, if any.

        advantages = batch_advantages(batch)
        packed = pack(batch, advantages, run.trainer.layout)

    If rewards assign values to turns or tokens (`Score.turns`, `Score.tokens`), these are centered over the values of
    all turns, or all tokens, of the group, or of the batch if the estimator has no groups. They are divided by their
    standard deviation if the estimator divides by one, like the steps of process supervision in DeepSeekMath (arXiv
    2402.03300) section 4.1.3. A turn's value is added to the advantage of its own tokens, as in MT-GRPO (arXiv
    2505.11821) equation 5; a token's value to its own. Values that are all equal add nothing. Episodes without a score
    have 0, and are in no mean or standard deviation.

    Raises:
        ConfigError: as group_advantages, or a value is infinite.
    """
    import torch

    lengths = torch.tensor([[episode.response_tokens for episode in group.episodes] for group in batch.groups])
    advantages = group_advantages(batch.rewards, estimator=estimator, lengths=lengths, scored=_scored(batch))
    # One number for each episode, unless a reward gave turns or tokens values of their own.
    if not any(episode.score and (episode.score.turns or episode.score.tokens) for episode in batch.episodes):
        return advantages
    scaled = estimator not in _UNSCALED
    if estimator not in _UNGROUPED:
        return [_with_values(group.episodes, advantages[p].tolist(), scaled) for p, group in enumerate(batch.groups)]
    # Estimators without groups compare values over the batch, too.
    token_advantages = iter(_with_values(batch.episodes, advantages.flatten().tolist(), scaled))
    return [[next(token_advantages) for _ in group.episodes] for group in batch.groups]


def gdpo_advantages(batch: Batch, weights: Mapping[str, float]) -> torch.Tensor:
    """Normalise each part of a reward within its group, and their weighted sum over the batch.

        advantages = gdpo_advantages(batch, {"correct": 1.0, "length": 0.5})

    GDPO (arXiv 2601.05242): rewards that differ in their parts, but not in their sum, keep different advantages. A part
    is an entry of `Score.parts`; an episode without it, or with an infinite one, is left out of that part's mean and
    standard deviation, and gets 0 for it. Values of turns and tokens are not used.

    Args:
        weights: a weight for each part that counts.

    Returns:
        Advantages, [P, G] float32.

    Raises:
        ConfigError: no episode has a part of this name.
    """
    import torch

    total = torch.zeros(batch.rewards.shape, dtype=torch.float64)
    for name, weight in weights.items():
        rows = [
            [episode.score.parts.get(name, math.nan) if episode.score else math.nan for episode in group.episodes]
            for group in batch.groups
        ]
        # NaN marks an episode without this part.
        values = torch.tensor(rows, dtype=torch.float32).double().reshape(total.shape)
        mask = values.isfinite()
        if not bool(mask.any()):
            part_names = sorted({part for episode in batch.episodes if episode.score for part in episode.score.parts})
            raise ConfigError(
                f"the reward's part {name!r} is in no episode",
                hint=f"parts of these episodes: {', '.join(part_names) or 'none'}",
            )
        count = mask.sum(dim=1, keepdim=True)
        centered = (values - values.where(mask, math.nan).nanmean(dim=1, keepdim=True)).where(mask, 0.0)
        std = (centered.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        low, high = (values.where(mask, sign * math.inf) for sign in (1, -1))
        has_spread = low.amin(dim=1, keepdim=True) < high.amax(dim=1, keepdim=True)
        total += weight * (centered / (std + EPSILON)).where(has_spread, 0.0)
    # GDPO's second normalisation, over the batch: grpo with the batch as one group.
    return group_advantages(total, estimator="reinforce", scored=_scored(batch))


def _scored(batch: Batch) -> torch.Tensor:
    """Return which episodes have a score, [P, G] bool.

    In batches of a run, all have one: an episode that fails through no fault of the policy is retried, or its group is
    replaced.
    """
    import torch

    rows = [[episode.score is not None for episode in group.episodes] for group in batch.groups]
    return torch.tensor(rows, dtype=torch.bool).reshape(batch.rewards.shape)


def _with_values(
    episodes: Sequence[Episode], advantages: Sequence[float], scaled: bool
) -> list[npt.NDArray[np.float32]]:
    """Return the token advantages of each episode, relative to the other `episodes`."""
    scores = [episode.score or Score(total=0.0) for episode in episodes]
    turn_values = _normalised([np.asarray(score.turns, np.float32) for score in scores], episodes, scaled)
    token_values = _normalised([np.concatenate([_NONE, *score.tokens]) for score in scores], episodes, scaled)
    token_advantages = []
    for episode, advantage, turns, tokens in zip(episodes, advantages, turn_values, token_values, strict=True):
        episode_advantages = np.full(episode.response_tokens, advantage, np.float32)
        if len(turns):
            episode_advantages += np.repeat(turns, [len(turn.token_ids) for turn in episode.turns])
        if len(tokens):
            episode_advantages += tokens
        token_advantages.append(episode_advantages)
    return token_advantages


def _normalised(
    values: Sequence[npt.NDArray[np.float32]], episodes: Sequence[Episode], scaled: bool
) -> list[npt.NDArray[np.float32]]:
    """Center and scale values over all episodes; NaN, a missing value, becomes 0."""
    task_id = next(
        (episode.task.id for episode, array in zip(episodes, values, strict=True) if np.isinf(array).any()), None
    )
    if task_id is not None:
        raise ConfigError(f"the reward of {task_id} has infinite values", hint="give turns and tokens finite numbers")
    # NaN stands for a value that the reward left open.
    flat_values = np.concatenate(values)
    flat_values = flat_values[~np.isnan(flat_values)]
    if not len(flat_values) or flat_values.max() == flat_values.min():
        return [np.zeros_like(array) for array in values]
    mean = float(flat_values.mean(dtype=np.float64))
    divisor = float(flat_values.std(ddof=1, dtype=np.float64)) + EPSILON if scaled else 1.0
    return [np.nan_to_num((array - mean) / divisor).astype(np.float32) for array in values]
