"""Rewards of single tokens, their discounted sums, and whitening over all tokens of a batch.

The tokens of an episode, here, are those that the model generated, turn after turn. These arrays have no entries for
observations between turns, so a discounted sum goes from the first token of a turn straight to the turn before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode

if TYPE_CHECKING:
    import torch

TokenValues: TypeAlias = "Sequence[npt.NDArray[np.floating] | torch.Tensor]"
"""For each episode, a number for each token that the model generated in it, [T]."""
_ROUNDING = 1e-9
"""Largest difference of a total from the sum of its turns that is rounding, as a share of their sizes."""
Float64: TypeAlias = npt.NDArray[np.float64]


def token_rewards(episodes: Iterable[Episode]) -> list[Float64]:
    """Place each episode's rewards on its tokens.

        rewards = token_rewards(batch.episodes)

    The total is on the last token of the episode, a turn's value (`Score.turns`) on the last token of the turn, or of
    the turn before if it has none, and a token's value (`Score.tokens`) on the token; NaN, a missing value, is 0. If
    turns have the rewards of an environment's steps (`Score.turns_in_total`), their sum is not placed once more, only
    what other parts of the reward add to it.

    Returns:
        For each episode, [T] float64. An episode without tokens has no place for rewards.
    """
    rewards = []
    for episode in episodes:
        ends = np.cumsum([len(turn.token_ids) for turn in episode.turns], dtype=np.int64)
        episode_rewards = np.zeros(int(ends[-1]) if len(ends) else 0)
        if (score := episode.score) is not None and len(episode_rewards):
            if len(score.tokens):
                episode_rewards += _known(
                    np.concatenate([np.asarray(turn_values, np.float64) for turn_values in score.tokens])
                )
            turns = _known(np.asarray(score.turns, np.float64))
            if len(turns):
                # `add.at` sums repeated places, which a turn without tokens has in common with the one before.
                np.add.at(episode_rewards, np.maximum(ends - 1, 0), turns)
            rest = score.total - float(turns.sum()) if score.turns_in_total else score.total
            # What the turns' rewards do not account for. A NaN fails this comparison and is placed, to be refused
            # later.
            if not abs(rest) <= _ROUNDING * abs(turns).sum():
                episode_rewards[-1] += rest
        rewards.append(episode_rewards)
    return rewards


def _known(values: Float64) -> Float64:
    return np.where(np.isnan(values), 0.0, values)


def by_group(batch: Batch, values: Sequence[npt.NDArray[np.float32]]) -> list[list[npt.NDArray[np.float32]]]:
    """Arrange arrays that are in the order of `batch.episodes` by group, as `pack` needs them."""
    arrays = iter(values)
    return [[next(arrays) for _ in group.episodes] for group in batch.groups]


def discounted(values: Float64, lengths: npt.NDArray[np.int64], decay: float | Float64) -> Float64:
    """Sum each value with those that follow it in its episode, discounted: y[t] = x[t] + decay * y[t + 1].

        discounted(np.array([0.0, 1.0, 5.0]), np.array([2, 1]), 0.5)  # [0.5, 1.0, 5.0]

    Args:
        values: values of all episodes, one episode after the other.
        lengths: [N], number of values of each episode.
        decay: factor of the next sum, or one for each episode, [N].
    """
    # From the ends backwards, all episodes at a time: one vectorised step for each token of the longest, not a loop
    # over all tokens. Sorted by length, episodes that still have a token come first.
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths)[order] - 1
    decays = np.broadcast_to(np.asarray(decay, np.float64), lengths.shape)[order]
    sums, sorted_lengths = values.astype(np.float64), lengths[order]
    for step in range(1, int(lengths.max(initial=0))):
        count = int(np.searchsorted(-sorted_lengths, -step))  # of episodes that have a token this far from their end
        positions = ends[:count] - step
        sums[positions] += decays[:count] * sums[positions + 1]
    return sums


def whitened(values: Float64) -> Float64:
    """Subtract the mean and divide by sqrt(variance + 1e-8), as verl does, with the unbiased variance; 0 if all values
    are equal."""
    if not len(values) or values.max() == values.min():
        return np.zeros_like(values)
    variance = float(values.var(ddof=1))
    return (values - float(values.mean())) / math.sqrt(variance + 1e-8)


def flat(arrays: TokenValues, lengths: npt.NDArray[np.int64], label: str) -> Float64:
    """Concatenate the arrays of all episodes as float64.

    Raises:
        ConfigError: their number or lengths differ from `lengths`, or a value is not finite; `label` names them there.
    """
    import torch

    numbers = [
        np.asarray(array.detach().double().cpu() if isinstance(array, torch.Tensor) else array, np.float64)
        for array in arrays
    ]
    if [array.shape for array in numbers] != [(length,) for length in lengths]:
        shapes = [array.shape for array in numbers[:8]]
        raise ConfigError(
            f"the {label} have shapes {shapes}, but the episodes have {lengths[:8]} tokens",
            hint="give one array per episode, with one number per token that the model generated",
        )
    bad_index = next((index for index, array in enumerate(numbers) if not np.isfinite(array).all()), None)
    if bad_index is not None:
        raise ConfigError(f"the {label} of episode {bad_index} are not all finite", hint="give finite numbers")
    return np.concatenate([np.zeros(0), *numbers])


def reinforce_pp_advantages(
    batch: Batch, *, gamma: float = 1.0, penalties: TokenValues | None = None
) -> list[list[npt.NDArray[np.float32]]]:
    """Whiten the discounted returns of tokens over the batch: REINFORCE++ with a discount and a KL penalty.

        kl = [kl_coef * (policy - reference) for policy, reference in zip(logprobs, reference_logprobs, strict=True)]
        advantages = reinforce_pp_advantages(batch, gamma=0.99, penalties=kl)

    With r the rewards of `token_rewards` less the penalties, a token's return is the sum of its own and all later
    rewards of the episode, discounted by gamma per token (REINFORCE++, arXiv 2501.03262). Observations cost no discount
    and returns are carried over them, so that the first turn is rewarded for the last. Whitening subtracts the mean
    over the batch's tokens and divides by sqrt(variance + 1e-8), as in verl. Without discount, penalties and values of
    turns and tokens, this is `batch_advantages(batch, estimator="reinforce_pp")`.

    Args:
        penalties: of each episode in the order of `batch.episodes`, [T], subtracted from its tokens' rewards.

    Returns:
        Advantages, [P][G] arrays [T] float32. Episodes without a score have 0, and are in no mean or variance.

    Raises:
        ConfigError: gamma is not between 0 and 1; the penalties do not fit the tokens; or a reward is not finite.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma is {gamma}", hint="give a discount between 0 and 1")
    episodes = batch.episodes
    lengths = np.array([episode.response_tokens for episode in episodes], np.int64)
    rewards = flat(token_rewards(episodes), lengths, "rewards")
    if penalties is not None:
        rewards = rewards - flat(penalties, lengths, "penalties")
    returns = discounted(rewards, lengths, gamma)
    # [N] bool, by token: an episode without a score must not shift the mean of the others.
    is_scored = np.repeat(np.array([episode.score is not None for episode in episodes], np.bool_), lengths)
    advantages = np.zeros(len(returns), np.float32)
    advantages[is_scored] = whitened(returns[is_scored])
    return by_group(batch, split(advantages, lengths))


def split(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.float32]]:
    """Split an array of all episodes, one after the other, into one array for each."""
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
