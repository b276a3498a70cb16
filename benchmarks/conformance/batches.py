"""Random batches on which methods are compared, as arrays with a row for each episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Batch = Mapping[str, npt.NDArray[Any]]
"""A batch of N episodes in groups of GROUP_SIZE, padded to T tokens; groups follow each other.

    mask                                      [N, T] bool, True where a token is trained
    logprobs, behaviour, proximal, reference  [N, T] float64: of the policy, the engine, the policy before the update,
                                              and the frozen reference; arbitrary where not mask
    advantages                                [N, T] float64
    rewards                                   [N] float64, without rounding in float32; NaN without a score
    parts                                     [N, 2] float64, parts of a reward, as are the rewards
    groups                                    [N] int64, index of the group
    penalties                                 [N, T] float64, subtracted from the rewards of tokens
    values                                    [N, T] float64, a critic's; arbitrary where not mask
    old_values, returns                       [N, T] float64: the critic's before the update, and targets
    entropy                                   [N, T] float64, of the policy; arbitrary where not mask
    greedy                                    [N] float64, reward of the greedy answer to the episode's task
    student, teacher                          [N, T, VOCABULARY] float64, logits of two policies
    tokens                                    [N, T] int64, tokens of this vocabulary
"""

GROUPS, GROUP_SIZE, TOKENS, VOCABULARY = 4, 6, 24, 8
KINDS = ("plain", "masked", "extreme", "token_advantages", "far", "missing_parts", "on_policy", "unscored")
"""plain: uneven lengths, ratios that a clip reaches, log ratios to the reference below 3, a group with equal rewards.
masked: as plain, with observations in the middle of episodes, and an episode without a trained token in some groups.
extreme: as masked, with log ratios of up to +-18 on some tokens of longer episodes.
token_advantages: as masked, with an advantage of its own for each token.
far: as masked, with log ratios of up to +-40.
missing_parts: as plain, where some rewards lack one of their parts (NaN).
on_policy: as masked, where policy, proximal policy and engine agree.
unscored: as masked, where some episodes have no reward (NaN), and of one group all but one."""


def draw(kind: str, seed: int) -> Batch:
    """Draw a batch.

    Args:
        kind: one of KINDS.
        seed: the same seed draws the same batch.
    """
    random = np.random.default_rng([KINDS.index(kind), seed])
    shape = (count, _) = GROUPS * GROUP_SIZE, TOKENS
    lengths = random.integers(1, TOKENS + 1, count)
    # The longest and the shortest length are in every batch.
    lengths[:2] = TOKENS, 1
    mask = np.arange(TOKENS) < lengths[:, None]
    if kind not in ("plain", "missing_parts"):
        observed = (np.arange(TOKENS) >= TOKENS // 3) & (np.arange(TOKENS) < TOKENS // 2)
        mask &= ~(observed & (random.random((count, 1)) < 0.5))
        # Two episodes without a trained token, one of them the first of its group.
        mask[[GROUP_SIZE, 3 * GROUP_SIZE + 1]] = False
    logprobs = -random.gamma(2.0, 0.5, shape)
    proximal = logprobs + random.normal(0.0, 0.3, shape)
    behaviour = proximal + random.normal(0.0, 0.3, shape)
    if kind in ("extreme", "far"):
        size = 18.0 if kind == "extreme" else 40.0
        # At most two extreme tokens, and only in long episodes: products over a sequence would overflow in float32.
        rare = mask & (random.random(shape) < 0.2) & (mask.sum(axis=1, keepdims=True) >= TOKENS // 2)
        rare &= np.cumsum(rare, axis=1) <= 2
        behaviour = behaviour + np.where(rare, random.choice([-size, size], shape) * random.uniform(0.5, 1, shape), 0.0)
    if kind == "on_policy":
        behaviour = proximal = logprobs
    rewards, parts = _rewards(random, kind)
    advantages = np.repeat(random.normal(0.0, 1.0, (count, 1)), TOKENS, axis=1)
    if kind == "token_advantages":
        advantages = advantages + random.normal(0.0, 1.0, shape)
    # A group without a signal, which losses may leave out.
    advantages[2 * GROUP_SIZE : 3 * GROUP_SIZE] = 0.0
    return {
        "mask": mask,
        "logprobs": logprobs,
        "behaviour": behaviour,
        "proximal": proximal,
        "reference": logprobs + random.uniform(-2.9, 2.9, shape),
        "advantages": advantages,
        "rewards": rewards,
        "parts": parts,
        "groups": np.repeat(np.arange(GROUPS), GROUP_SIZE),
        "penalties": random.normal(0.0, 0.1, shape),
        "values": random.normal(0.5, 0.5, shape),
        "entropy": random.gamma(1.0, 0.5, shape).astype(np.float32).astype(float),
        "greedy": np.repeat(random.random(GROUPS), GROUP_SIZE),
        "old_values": random.normal(0.5, 0.5, shape),
        "returns": random.normal(0.5, 1.0, shape),
        "student": random.normal(0.0, 2.0, (*shape, VOCABULARY)),
        "teacher": random.normal(0.0, 2.0, (*shape, VOCABULARY)),
        "tokens": random.integers(0, VOCABULARY, shape),
    }


def _rewards(random: np.random.Generator, kind: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Draw rewards, [N], and their parts, [N, 2]: some groups all equal, some of 0 and 1, some of any value."""
    count = GROUPS * GROUP_SIZE
    binary = random.integers(0, 2, count).astype(float)
    values = np.where(np.arange(count) < count // 2, binary, random.normal(0.5, 1.0, count))
    values[:GROUP_SIZE] = random.random()
    values[GROUP_SIZE : 2 * GROUP_SIZE] = 0.0, 1.0, 1.0, 1.0, 1.0, 1.0
    parts = np.stack([values, random.random(count)], axis=1)
    if kind == "missing_parts":
        parts[np.arange(count) % GROUP_SIZE == 2, 1] = np.nan
    if kind == "unscored":
        lacking = random.random(count) < 0.2
        lacking[-GROUP_SIZE:] = np.arange(GROUP_SIZE) != 2
        values[lacking] = parts[lacking] = np.nan
    # Rounded to float32 first, as rewards are stored: both sides then start from the same numbers.
    return values.astype(np.float32).astype(float), parts.astype(np.float32).astype(float)
