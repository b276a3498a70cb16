"""Advantages of the nodes of a tree of episodes whose worlds forked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode


def tree_advantages(batch: Batch) -> list[list[npt.NDArray[np.float32]]]:
    """Compare each node of a tree of episodes with the whole group, and with the node before it.

        advantages = tree_advantages(batch)

    The episodes of a group are the leaves of one tree, whose root is the prompt. A node holds the turns between two
    forks, see `Turn.branch`; an episode without forks is a node of its own. With V(n) the mean reward of the leaves
    below node n, and |L(n)| their number, a token of n has the advantage (TreeRL, arXiv 2506.11902, section 3.2)

        (V(n) - V(root)  +  V(n) - V(parent of n)) / sqrt(|L(n)|)

    All |L(n)| episodes through n have this advantage. TreeRL trains each of them as a sequence; `pack` trains n once,
    with the sum. Without forks the advantage is twice the one of `dr_grpo`. Episodes without a score have 0, and are in
    no mean; values of turns and tokens are not used.

    Returns:
        Advantages, [P][G] arrays [T] float32.

    Raises:
        ConfigError: a reward is not finite.
    """
    return [_of_group(group.episodes) for group in batch.groups]


def most_surprising(logprobs: npt.NDArray[np.float32], count: int) -> list[int]:
    """Return the places of up to `count` tokens of a completion at which a fork promises most, in order.

    These are the tokens with the highest -log p, by which TreeRL (section 3.1) estimates where the policy was
    undecided. A fork at the first token would be another tree, so that it is never chosen; nor is a token without a
    logprob, or with probability 1.

        most_surprising(np.array([-3.0, -0.1, -2.0, 0.0]), 2)  # [1, 2]

    Args:
        logprobs: `[T]`, of the sampled tokens.
    """
    places = [place for place in np.argsort(logprobs, kind="stable").tolist() if place and logprobs[place] < 0]
    return sorted(places[:count])


def _of_group(episodes: Sequence[Episode]) -> list[npt.NDArray[np.float32]]:
    """Return the token advantages of each episode of a group."""
    leaf_rewards = defaultdict[tuple[int, ...], list[float]](list)
    paths = [_path(episode, place) for place, episode in enumerate(episodes)]
    for episode, path in zip(episodes, paths, strict=True):
        if not math.isfinite(episode.reward):
            raise ConfigError(f"the reward of {episode.task.id} is {episode.reward}", hint="give finite numbers")
        # The episode is a leaf below each node on its path, the root () included.
        for depth in range(len(path) + 1) if episode.score is not None else ():
            leaf_rewards[path[:depth]].append(episode.reward)
    values = {node: _mean(rewards) for node, rewards in leaf_rewards.items()}
    advantages = []
    for episode, path in zip(episodes, paths, strict=True):
        episode_advantages = np.zeros(episode.response_tokens, np.float32)
        start = 0
        for turn in episode.turns:
            node, end = turn.branch or path, start + len(turn.token_ids)
            if episode.score is not None:
                # TreeRL: against the whole group, and against the node before the fork.
                advantage = (values[node] - values[()]) + (values[node] - values[node[:-1]])
                episode_advantages[start:end] = advantage / math.sqrt(len(leaf_rewards[node]))
            start = end
        advantages.append(episode_advantages)
    return advantages


def _path(episode: Episode, place: int) -> tuple[int, ...]:
    """Return the leaf of an episode."""
    return (episode.turns[-1].branch if episode.turns else ()) or (-1 - place,)


def _mean(rewards: Sequence[float]) -> float:
    """Return the mean, exactly if all are equal, so that equal rewards give exactly 0."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)
