"""GiGPO: advantages of episodes in their group, plus advantages of turns among turns that began in the same state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from forge_rl.algorithms.advantages import EPSILON
from forge_rl.algorithms.returns import discounted, token_rewards
from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode

Anchor = Literal["observation", "prompt"] | Callable[[Episode, int], Hashable]


def gigpo_advantages(
    batch: Batch,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    scale: Literal["std", "none"] = "std",
    anchor: Anchor = "observation",
) -> list[list[npt.NDArray[np.float32]]]:
    """Compare episodes of a group, and turns of a group that began in the same state.

        advantages = gigpo_advantages(batch, gamma=0.95)

    With r[k] the reward of turn k, R the sum of an episode's rewards, and R[t] the sum over k >= t of gamma^(k - t)
    r[k], a token of turn t has the advantage (GiGPO, arXiv 2505.10978, equations 3 to 8)

        (R - mean of R) / F  +  step_weight * (R[t] - mean of R[t]) / F

    The first mean is over the group's episodes. The second is over an anchor: all turns of the group with the same key,
    also of one episode that returned to a state. F is the standard deviation (unbiased, plus 1e-4) of the same values,
    or 1, which is leave-one-out up to a factor. An anchor with one turn, or with equal returns, adds 0, as do equal R.
    verl-agent's means of R count an episode once for each of its turns; here, as in the paper, it counts once.

    Rewards come from `token_rewards`, added up by turn: a total belongs to the last turn, unless it is the sum of
    the turns' rewards. Episodes without a score have 0, and are in no mean.

    Args:
        gamma: discount of a reward per turn of delay.
        step_weight: weight of the comparison of turns.
        scale: "std", or "none" for F = 1.
        anchor: the state in which a turn began. "observation": the tokens that the environment showed since the turn
            before, for environments that describe their whole state in each. "prompt": all tokens that the model saw,
            so that only turns with the same history share a state. Or a function of the episode and the turn's index
            that returns a key.

    Returns:
        Advantages, [P][G] arrays [T] float32.

    Raises:
        ConfigError: gamma is not between 0 and 1, the scale or the anchor is unknown, or a reward is not finite.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma is {gamma}", hint="give a discount between 0 and 1")
    if scale not in ("std", "none"):
        raise ConfigError(f"unknown scale of GiGPO {scale!r}", hint="use std or none")
    if anchor not in ("observation", "prompt") and not callable(anchor):
        raise ConfigError(f"unknown anchor of GiGPO {anchor!r}", hint="use observation, prompt, or a function")
    return [_of_group(group.episodes, gamma, step_weight, scale == "std", anchor) for group in batch.groups]


def _of_group(
    episodes: Sequence[Episode], gamma: float, step_weight: float, scaled: bool, anchor: Anchor
) -> list[npt.NDArray[np.float32]]:
    """Return the token advantages of each episode of a group."""
    scored_indices = [place for place, episode in enumerate(episodes) if episode.score is not None and episode.turns]
    rewards = [_turn_rewards(episodes[place]) for place in scored_indices]
    lengths = np.array([len(turn_rewards) for turn_rewards in rewards], np.int64)
    # By turn, all scored episodes one after the other.
    flat_rewards = np.concatenate([np.zeros(0), *rewards])
    episode_advantages = _normalised(np.array([turn_rewards.sum() for turn_rewards in rewards]), scaled)
    returns = discounted(flat_rewards, lengths, gamma)
    anchors = defaultdict[Hashable, list[int]](list)
    starts = [(episodes[place], turn) for place in scored_indices for turn in range(len(episodes[place].turns))]
    for index, (episode, turn) in enumerate(starts):
        anchors[_key(episode, turn, anchor)].append(index)
    turn_advantages = np.zeros(len(flat_rewards))
    # Turns of the group that began in the same state, whichever episode they are from.
    for members in anchors.values():
        turn_advantages[members] = _normalised(returns[members], scaled)
    sums = np.repeat(episode_advantages, lengths) + step_weight * turn_advantages
    advantages = [np.zeros(episode.response_tokens, np.float32) for episode in episodes]
    # Without scored episodes, `np.split` still returns one empty array.
    for place, values in zip(scored_indices, np.split(sums, np.cumsum(lengths)[:-1]), strict=False):
        advantages[place] = np.repeat(
            values.astype(np.float32), [len(turn.token_ids) for turn in episodes[place].turns]
        )
    return advantages


def _turn_rewards(episode: Episode) -> npt.NDArray[np.float64]:
    """Return the reward of each turn."""
    (rewards,) = token_rewards([episode])
    if not np.isfinite(rewards).all():
        raise ConfigError(f"a reward of {episode.task.id} is not finite", hint="give episodes and turns finite numbers")
    ends = np.cumsum([len(turn.token_ids) for turn in episode.turns])
    return np.array([part.sum() for part in np.split(rewards, ends[:-1])])


def _key(episode: Episode, turn: int, anchor: Anchor) -> Hashable:
    """Return the key of the state in which a turn began."""
    if callable(anchor):
        return anchor(episode, turn)
    return (episode.observation(turn) if anchor == "observation" else episode.turns[turn].prompt_ids).tobytes()


def _normalised(values: npt.NDArray[np.float64], scaled: bool) -> npt.NDArray[np.float64]:
    """Center values, and divide them by their standard deviation if they are to be scaled; 0 if all are equal."""
    if not len(values) or values.max() == values.min():
        return np.zeros_like(values)
    centered = values - float(values.mean())
    return centered / (float(values.std(ddof=1)) + EPSILON) if scaled else centered
