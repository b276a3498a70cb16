"""Advantages for pass@k, against all subsets written out, the papers' formulas, and hand-worked numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from forge_rl.algorithms.pass_at_k import pass_at_k_advantages
from forge_rl.errors import ConfigError

REWARDS = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0], [0.3, -0.2, 0.9, 0.9, 0.1], [2.0, 1.0, 0.0, -1.0, -2.0]])


def by_subsets(rewards: list[float], k: int, baseline: str) -> list[float]:
    """Both formulas over a list of all subsets."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = np.array([max(rewards[i] for i in subset) for subset in subsets])
    advantages = []
    for i in range(len(rewards)):
        subset_values = [(subset, value) for subset, value in zip(subsets, best, strict=True) if i in subset]
        if baseline == "mean":
            advantages.append((np.mean([value for _, value in subset_values]) - best.mean()) / (best.std() + 1e-6))
        else:
            advantages.append(
                np.mean([value - max(rewards[j] for j in subset if j != i) for subset, value in subset_values])
            )
    return advantages


@pytest.mark.parametrize(
    ("baseline", "k"), [*(("mean", k) for k in (1, 2, 3, 4, 5)), *(("leave_one_out", k) for k in (2, 3, 4, 5))]
)
def test_advantages_are_those_of_all_subsets_written_out(baseline: str, k: int):
    advantages = pass_at_k_advantages(REWARDS, k, baseline=baseline)
    expected = [by_subsets(row, k, baseline) for row in REWARDS.double().tolist()]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize("right", [1, 3, 7])
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_rewards_of_0_and_1_give_the_analytical_advantage_of_the_paper(right: int, k: int):
    size, wrong = 8, 8 - right
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    std = math.sqrt(mean * (1 - mean)) + 1e-6
    failed = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / std
    expected = [(1 - mean) / std] * right + [failed] * wrong
    advantages = pass_at_k_advantages(torch.tensor([[1.0] * right + [0.0] * wrong]), k)[0]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_the_whole_group_rewards_only_the_best_by_its_lead_over_the_second():
    advantages = pass_at_k_advantages(
        torch.tensor([[0.2, 0.9, 0.5, 0.1], [1.0, 1.0, 0.0, 0.0]]), 4, baseline="leave_one_out"
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.4, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert pass_at_k_advantages(torch.tensor([[0.2, 0.9, 0.5]]), 3).abs().max() < 1e-6


def test_k_of_1_is_grpo_with_the_std_of_the_population():
    rewards = torch.tensor([[0.0, 1.0, 2.0]])
    torch.testing.assert_close(pass_at_k_advantages(rewards, 1), (rewards - 1) / (math.sqrt(2 / 3) + 1e-6))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_large_groups_neither_overflow_nor_vanish(baseline: str):
    rewards = torch.zeros(1, 4096)
    rewards[0, 7] = 1.0
    advantages = pass_at_k_advantages(rewards, 2048, baseline=baseline)[0]  # half of all subsets have the one success
    assert advantages[7] == pytest.approx(1.0, abs=1e-5)
    expected = -1 / 4095 if baseline == "mean" else 0.0  # of subsets with another episode, 2047 in 4095 have it
    np.testing.assert_allclose(np.delete(advantages.numpy(), 7), expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_episodes_without_a_score_are_in_no_subset(baseline: str):
    rewards = torch.tensor([[math.nan, 1.0, 0.0, 0.4], [1.0, 5.0, 5.0, 0.0]])
    scored = torch.tensor([[False, True, True, True], [True, False, False, False]])
    advantages = pass_at_k_advantages(rewards, 2, baseline=baseline, scored=scored)
    expected = pass_at_k_advantages(rewards[:1, 1:], 2, baseline=baseline)
    torch.testing.assert_close(advantages, torch.cat([torch.nn.functional.pad(expected, (1, 0)), torch.zeros(1, 4)]))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("size", [3, 7, 16])
def test_equal_rewards_give_exactly_zero(baseline: str, size: int):
    assert not pass_at_k_advantages(torch.full((2, size), 0.1), 2, baseline=baseline).any()
    assert pass_at_k_advantages(torch.zeros(0, size), 2, baseline=baseline).shape == (0, size)


@pytest.mark.parametrize(
    ("rewards", "k", "baseline", "message"),
    [
        (torch.zeros(1, 4), 5, "mean", "k is 5 for groups of 4"),
        (torch.zeros(1, 4), 0, "mean", "k is 0"),
        (torch.zeros(1, 4), 1, "leave_one_out", "k is 1"),
        (torch.zeros(4), 1, "mean", "shape"),
        (torch.tensor([[0.0, math.nan]]), 1, "mean", "finite"),
        (torch.zeros(1, 4), 2, "max", "unknown baseline"),
    ],
)
def test_what_does_not_fit_is_refused(rewards: torch.Tensor, k: int, baseline: str, message: str):
    with pytest.raises(ConfigError, match=message):
        pass_at_k_advantages(rewards, k, baseline=baseline)
