"""Advantages for pass@k: the contribution of an episode to the best reward of k."""

from __future__ import annotations

import functools
from math import comb
from typing import TYPE_CHECKING, Literal

import numpy as np

from forge_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from forge_rl.algorithms.returns import Float64

EPSILON = 1e-6
"""Added to standard deviations, as the authors of Pass@k Training do."""


def pass_at_k_advantages(
    rewards: torch.Tensor,
    k: int,
    *,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    scored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compare episodes by the best reward of k, averaged over all subsets of k episodes of the group.

        advantages = pass_at_k_advantages(batch.rewards, 4)

    With S a subset of k of the group's G episodes, max S its highest reward, and means over all such subsets:

        mean            (mean of max S for S with the episode - mean of max S) / (std of max S + 1e-6)
        leave_one_out   mean of (max S - max of S without the episode) for S with the episode

    For rewards of 0 and 1, `mean` is the analytical advantage of Pass@k Training (arXiv 2508.10751, section 2.4): with
    n failures and R = 1 - C(n, k) / C(G, k), (1 - R) / sqrt(R (1 - R)) for a success, and (1 - R - C(n - 1, k - 1) /
    C(G - 1, k - 1)) / sqrt(R (1 - R)) for a failure. With k = G, all its advantages are 0. `leave_one_out` is the
    advantage of arXiv 2503.19595 for k = G, where only the best episode has one, its lead over the second best; verl
    divides it by the std of rewards, which is not done here. For smaller k it is the mean of that advantage over
    subsets, as the baseline of PKPO (arXiv 2505.15201).

    A subset's weight is a ratio of exact integers, so no group is too large. Groups of equal rewards have exactly 0.

    Args:
        rewards: [P, G].
        k: size of a subset, from 1 to G; at least 2 with leave_one_out.
        scored: [P, G] bool, False for an episode without a score, which gets 0 and is in no subset; by default all are
            scored. A group with fewer than k scores gets 0.

    Returns:
        Advantages, [P, G] float32.

    Raises:
        ConfigError: the rewards are not two-dimensional or not finite, k or `scored` does not fit, or the baseline is
            unknown.
    """
    import torch

    if baseline not in ("mean", "leave_one_out"):
        raise ConfigError(f"unknown baseline of pass@k {baseline!r}", hint="use mean or leave_one_out")
    mask = torch.ones(rewards.shape, dtype=torch.bool) if scored is None else scored
    if mask.shape != rewards.shape or rewards.ndim != 2 or not bool(rewards[mask].isfinite().all()):
        raise ConfigError(
            f"rewards have shape {list(rewards.shape)}, for scores of {list(mask.shape)}, or are not all finite",
            hint="give finite numbers, [P, G]",
        )
    min_k, size = (1 if baseline == "mean" else 2), rewards.shape[1]
    if not min_k <= k <= size:
        raise ConfigError(f"k is {k} for groups of {size}", hint=f"choose k from {min_k} to the group size")
    advantages = np.zeros(rewards.shape, np.float32)
    for row, row_rewards, row_mask in zip(
        advantages, rewards.detach().double().cpu().numpy(), mask.cpu().numpy(), strict=True
    ):
        row[row_mask] = _of_group(row_rewards[row_mask], k, baseline == "mean")
    return torch.from_numpy(advantages)


def _of_group(rewards: Float64, k: int, centered: bool) -> Float64:
    """Return the advantages of one group."""
    if len(rewards) < k or rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    # By rank, the best of a subset is its last: sums over subsets become sums over ranks.
    order = np.argsort(rewards, kind="stable")
    ranked, advantages = rewards[order], np.empty_like(rewards)
    best_weights, above_weights, below_weights = _weights(len(ranked), k)
    if centered:
        higher_sums = np.append(np.cumsum((above_weights * ranked)[::-1])[::-1][1:], 0.0)
        best = best_weights * ranked + higher_sums  # of subsets with the episode of this rank
        share = best_weights * k / len(ranked)  # of all subsets, those whose highest reward has this rank
        mean = float((share * ranked).sum())
        spread = float((share * (ranked - mean) ** 2).sum()) ** 0.5
        advantages[order] = (best - mean) / (spread + EPSILON)
    else:
        # [G], for each rank the second-best rewards of the subsets that it wins, weighted by their shares.
        lower_sums = np.append(0.0, np.cumsum(below_weights * ranked)[:-1])
        advantages[order] = best_weights * ranked - lower_sums
    return advantages


@functools.lru_cache(maxsize=64)
def _weights(size: int, k: int) -> tuple[Float64, Float64, Float64]:
    """Return, for each rank i from the lowest, three shares of the subsets of k that have a certain episode:

    - best: the episode has rank i, and is the highest of its subset,
    - above: another episode, of rank i, is the highest, above this one,
    - below: the best of the other episodes has rank i, below this one.
    """
    # Subsets of k with one certain episode. Exact integers, as floats would overflow for large groups.
    subsets = comb(size - 1, k - 1)
    best = [comb(i, k - 1) / subsets for i in range(size)]
    above = [comb(i - 1, k - 2) / subsets if i and k > 1 else 0.0 for i in range(size)]
    below = [comb(i, k - 2) / subsets if k > 1 else 0.0 for i in range(size)]
    return np.array(best), np.array(above), np.array(below)
