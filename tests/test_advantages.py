"""Group-relative advantages, against hand-worked numbers and TRL's formula."""

import math

import pytest
import torch

from forge_rl.algorithms.advantages import group_advantages
from forge_rl.errors import ConfigError
from forge_rl.rollout.state import GroupState, InflightEpisode
from recipes import grpo
from tests.fakes import TASK


def test_hand_worked_group_is_centered_and_scaled():
    # mean 0.5; unbiased variance (4 * 0.25) / 3, so std 0.57735
    advantages = group_advantages(torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    expected = 0.5 / (0.5773503 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([[-expected, expected, expected, -expected]]))


def test_scale_none_only_centers():
    advantages = group_advantages(torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 9.0]]), scale="none")
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, 1.0], [-2.0, -2.0, 4.0]]))


def test_advantages_match_the_formula_of_trl():
    rewards = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    flat, generations = rewards.flatten(), 8
    mean = flat.view(-1, generations).mean(dim=1).repeat_interleave(generations, dim=0)
    std = flat.view(-1, generations).std(dim=1).repeat_interleave(generations, dim=0)
    expected = (flat - mean) / (std + 1e-4)
    torch.testing.assert_close(group_advantages(rewards).flatten(), expected)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("size", [2, 7, 8, 10, 12, 16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
def test_equal_rewards_give_exactly_zero_although_they_round_off_their_mean(scale, size, reward):
    assert torch.equal(group_advantages(torch.full((1, size), reward), scale=scale), torch.zeros(1, size))


def test_equal_rewards_do_not_silence_the_other_groups():
    advantages = group_advantages(torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.0, 1.0]]))
    assert torch.equal(advantages[0], torch.zeros(3))
    assert advantages[1, 2] > 1


def test_a_group_of_one_gives_zero_and_not_nan():
    assert torch.equal(group_advantages(torch.tensor([[1.0], [0.0]])), torch.zeros(2, 1))


def test_a_tiny_spread_is_damped_by_epsilon():
    # std 7.07e-7 is far below 1e-4, so advantages stay below 0.01 instead of 0.7
    advantages = group_advantages(torch.tensor([[0.0, 1e-6]]))
    assert 0.004 < advantages[0, 1] < 0.006


def test_no_groups_give_no_advantages():
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


def test_integer_rewards_give_float32():
    assert group_advantages(torch.tensor([[0, 1]])).dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(bad):
    with pytest.raises(ConfigError, match="episode 2 of group 1 has reward"):
        group_advantages(torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, bad]]))


def test_rewards_of_one_dim_are_refused():
    with pytest.raises(ConfigError, match=r"\[P, G\]"):
        group_advantages(torch.zeros(4))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ConfigError, match="mad"):
        group_advantages(torch.zeros(1, 2), scale="mad")


def test_scale_batch_compares_episodes_of_all_groups_also_where_each_has_one():
    # mean 1.5, unbiased variance 5 / 3
    found = group_advantages(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), scale="batch")
    expected = torch.tensor([[-1.5], [-0.5], [0.5], [1.5]]) / (math.sqrt(5 / 3) + 1e-4)
    torch.testing.assert_close(found, expected)
    assert torch.equal(group_advantages(torch.tensor([[0.1], [0.1]]), scale="batch"), torch.zeros(2, 1))
    assert torch.equal(group_advantages(torch.tensor([[3.0]]), scale="batch"), torch.zeros(1, 1))


def test_groups_of_one_are_for_advantages_over_the_batch():
    assert grpo.Config(group_size=1, advantage_scale="batch").group_size == 1
    with pytest.raises(ConfigError, match="--group-size is 1") as caught:
        grpo.Config(group_size=1)
    assert 'scale="batch"' in caught.value.hint
    alone = GroupState(TASK, batch=0, place=(0, 0, 0), order=0)
    alone.episodes = [InflightEpisode(alone, 0)]
    assert not alone.is_uniform, "it is not replaced, as it is compared with others"
