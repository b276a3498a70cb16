"""Advantage estimators, against hand-worked numbers, the papers' formulas in NumPy, and TRL's."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from forge_rl.algorithms.advantages import Estimator, batch_advantages, gdpo_advantages, group_advantages
from forge_rl.errors import ConfigError
from forge_rl.rollout.state import GroupState, InflightEpisode
from forge_rl.types import Batch, Episode, Group, Score, Turn
from recipes import grpo
from tests.fakes import TASK


def test_hand_worked_group_is_centered_and_scaled():
    # mean 0.5; unbiased variance (4 * 0.25) / 3, so std 0.57735
    advantages = group_advantages(torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    expected = 0.5 / (0.5773503 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([[-expected, expected, expected, -expected]]))


def test_dr_grpo_only_centers():
    advantages = group_advantages(torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 9.0]]), estimator="dr_grpo")
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, 1.0], [-2.0, -2.0, 4.0]]))


def test_advantages_match_the_formula_of_trl():
    rewards = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    flat, generations = rewards.flatten(), 8
    mean = flat.view(-1, generations).mean(dim=1).repeat_interleave(generations, dim=0)
    std = flat.view(-1, generations).std(dim=1).repeat_interleave(generations, dim=0)
    expected = (flat - mean) / (std + 1e-4)
    torch.testing.assert_close(group_advantages(rewards).flatten(), expected)


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("size", [2, 7, 8, 10, 12, 16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
def test_equal_rewards_give_exactly_zero_despite_rounding(estimator, size, reward):
    assert torch.equal(
        group_advantages(torch.full((1, size), reward), estimator=estimator, lengths=torch.ones(1, size)),
        torch.zeros(1, size),
    )


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


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(reward):
    with pytest.raises(ConfigError, match="episode 2 of group 1 has reward"):
        group_advantages(torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, reward]]))


def test_rewards_of_one_dim_are_refused():
    with pytest.raises(ConfigError, match=r"\[P, G\]"):
        group_advantages(torch.zeros(4))


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="mad"):
        group_advantages(torch.zeros(1, 2), estimator="mad")


def test_reinforce_compares_episodes_of_all_groups_also_where_each_has_one():
    # mean 1.5, unbiased variance 5 / 3
    advantages = group_advantages(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), estimator="reinforce")
    expected = torch.tensor([[-1.5], [-0.5], [0.5], [1.5]]) / (math.sqrt(5 / 3) + 1e-4)
    torch.testing.assert_close(advantages, expected)
    assert torch.equal(group_advantages(torch.tensor([[0.1], [0.1]]), estimator="reinforce"), torch.zeros(2, 1))
    assert torch.equal(group_advantages(torch.tensor([[3.0]]), estimator="reinforce"), torch.zeros(1, 1))


def test_groups_of_one_are_for_advantages_over_the_batch():
    assert grpo.Config(group_size=1, advantages="reinforce").group_size == 1
    with pytest.raises(ConfigError, match="--group-size is 1") as caught:
        grpo.Config(group_size=1)
    assert 'estimator="reinforce"' in caught.value.hint
    alone = GroupState(TASK, batch=0, place=(0, 0, 0), order=0)
    alone.episodes = [InflightEpisode(alone, 0)]
    assert not alone.is_uniform, "it is not replaced, as it is compared with others"


REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.2, 0.0, 0.9, 0.4]])
LENGTHS = torch.tensor([[3, 1, 7, 2], [5, 5, 1, 1], [4, 0, 2, 9]])


def by_token(r: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Whiten values over a list that has each of them once for each of its tokens."""
    listed = np.concatenate([np.repeat(value, count) for value, count in zip(r.flat, lengths.flat, strict=True)])
    return (r - listed.mean()) / np.sqrt(listed.var(ddof=1) + 1e-8)


def formula(estimator: str, r: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The estimators as their papers write them, for one group after the other."""
    mean = r.mean(1, keepdims=True)
    size = r.shape[1]
    sibling_means = np.stack([np.delete(r, i, axis=1).mean(1) for i in range(size)], axis=1)
    return {
        "grpo": lambda: (r - mean) / (r.std(1, ddof=1, keepdims=True) + 1e-4),
        "dr_grpo": lambda: r - mean,
        "rloo": lambda: r - sibling_means,
        "opo": lambda: r - (lengths * r).sum(1, keepdims=True) / lengths.sum(1, keepdims=True),
        # one over the successes for each success, less one over all: times G, as for the other estimators
        "max_rl": lambda: size * (r / r.sum(1, keepdims=True) - 1 / size),
        "batch_std": lambda: (r - mean) / (r.std(ddof=1) + 1e-4),
        "reinforce": lambda: (r - r.mean()) / (r.std(ddof=1) + 1e-4),
        "reinforce_pp": lambda: by_token(r, lengths),
        "reinforce_pp_baseline": lambda: by_token(r - mean, lengths),
    }[estimator]()


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_each_estimator_is_its_papers_formula(estimator: Estimator):
    advantages = group_advantages(REWARDS, estimator=estimator, lengths=LENGTHS)
    expected = formula(estimator, REWARDS.double().numpy(), LENGTHS.numpy())
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-6, atol=1e-7)


def without(estimator: str, groups: list[np.ndarray], lengths: list[np.ndarray]) -> np.ndarray:
    """The papers' formulas for groups of several sizes, one after the other."""
    together, tokens = np.concatenate(groups), np.concatenate(lengths)
    centered = np.concatenate([group - group.mean() for group in groups])
    match estimator:
        case "batch_std":
            return centered / (together.std(ddof=1) + 1e-4)
        case "reinforce" | "reinforce_pp":
            return formula(estimator, together[None], tokens[None])[0]
        case "reinforce_pp_baseline":
            return by_token(centered, tokens)
    return np.concatenate(
        [
            formula(estimator, group[None], group_lengths[None])[0]
            for group, group_lengths in zip(groups, lengths, strict=True)
        ]
    )


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_episodes_without_a_score_are_in_no_mean_std_or_count(estimator: Estimator):
    rewards = torch.tensor([[0.0, math.nan, 1.0, 0.0], [1.0, 0.2, 1.0, -9.0], [0.2, 0.0, 0.9, 0.4]])
    scored = torch.tensor([[True, False, True, True], [True, True, True, False], [True] * 4])
    advantages = group_advantages(rewards, estimator=estimator, lengths=LENGTHS, scored=scored)
    groups = [row[is_scored].double().numpy() for row, is_scored in zip(rewards, scored, strict=True)]
    lengths = [row[is_scored].numpy() for row, is_scored in zip(LENGTHS, scored, strict=True)]
    np.testing.assert_allclose(advantages[scored].numpy(), without(estimator, groups, lengths), rtol=1e-5, atol=1e-6)
    assert not advantages[~scored].any()


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("size", [3, 7, 10])
def test_equal_rewards_beside_an_episode_without_a_score_give_exactly_zero(estimator: Estimator, size: int):
    scored = torch.arange(size + 1)[None] > 0
    rewards = torch.full((1, size + 1), 0.1).where(scored, 5.0)
    advantages = group_advantages(rewards, estimator=estimator, lengths=torch.ones(1, size + 1), scored=scored)
    assert torch.equal(advantages, torch.zeros(1, size + 1))


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_no_score_and_one_score_give_zero(estimator: Estimator):
    rewards, scored = torch.tensor([[5.0, 7.0, 9.0]]), torch.tensor([[False, True, False]])
    for mask in (scored, scored & False):
        advantages = group_advantages(rewards, estimator=estimator, lengths=torch.ones(1, 3), scored=mask)
        assert torch.equal(advantages, torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="`scored` has shape"):
        group_advantages(rewards, estimator=estimator, scored=scored[0])


def test_max_rl_ignores_failed_groups_and_bounds_negative_rewards():
    rewards = torch.tensor([[0.0, 0.0, 0.0], [-1.0, 0.5, 0.0], [-1.0, 1.0, 0.003]])  # means 0, below 0, 0.001
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-2.0, 2.0, 2.0]])
    torch.testing.assert_close(group_advantages(rewards, estimator="max_rl"), expected)


@pytest.mark.parametrize("lengths", [None, torch.ones(1, 3), torch.tensor([[1, -1]])])
def test_lengths_that_do_not_fit_are_refused(lengths: torch.Tensor | None):
    with pytest.raises(ConfigError, match="lengths are"):
        group_advantages(torch.tensor([[0.0, 1.0]]), estimator="opo", lengths=lengths)


def scored(*groups: list[dict[str, float]]) -> Batch:
    """A batch whose scores have these parts, and their sum as total; an episode of index i has i + 2 tokens."""

    def episode(index: int, parts: dict[str, float]) -> Episode:
        size = index + 2
        turn = Turn(prompt_ids=(1,), token_ids=(10,) * size, logprobs=(-1.0,) * size, versions=(0,) * size, text="")
        return Episode(task=TASK, turns=(turn,), score=Score(total=sum(parts.values()), parts=parts))

    episode_groups = [
        Group(task=TASK, episodes=tuple(episode(i, parts) for i, parts in enumerate(group_parts)))
        for group_parts in groups
    ]
    return Batch(groups=tuple(episode_groups), version=0)


def test_a_batch_hands_its_lengths_on():
    batch = scored([{"a": 0.0}, {"a": 1.0}, {"a": 1.0}])  # of 2, 3 and 4 tokens
    np.testing.assert_allclose(batch_advantages(batch, estimator="opo"), [[-7 / 9, 2 / 9, 2 / 9]], rtol=1e-6)


def test_gdpo_normalises_parts_as_trl_does():
    nan = math.nan
    parts = np.array([[[1, 0.0], [0, 1], [1, 1], [0, nan]], [[1, 0.5], [1, 0.2], [0, 0.1], [1, nan]]])
    batch = scored(
        *[[{n: v for n, v in zip("ab", values, strict=True) if v == v} for values in group] for group in parts]
    )
    mean, std = np.nanmean(parts, 1, keepdims=True), np.nanstd(parts, 1, ddof=1, keepdims=True)
    summed = np.nansum((parts - mean) / (std + 1e-4) * np.array([1.0, 0.5]), axis=2)
    expected = (summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)
    advantages = gdpo_advantages(batch, {"a": 1.0, "b": 0.5})
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_gdpo_distinguishes_rewards_that_a_sum_cannot():
    batch = scored([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}])
    assert not batch_advantages(batch).any()  # type: ignore[union-attr]
    assert gdpo_advantages(batch, {"a": 1.0, "b": 1.0}).abs().min() < 1e-3
    assert gdpo_advantages(batch, {"a": 2.0, "b": 1.0})[0, 0] > 0.5
    assert not gdpo_advantages(scored([{"a": 0.1}] * 3), {"a": 1.0}).any()


def test_gdpo_names_a_part_that_no_episode_has():
    with pytest.raises(ConfigError, match="part 'c' is in no episode") as caught:
        gdpo_advantages(scored([{"a": 1.0}, {"b": 0.0}]), {"c": 1.0})
    assert caught.value.hint == "parts of these episodes: a, b"
    endless = gdpo_advantages(scored([{"a": 1.0}, {"a": 0.0}, {"a": math.inf}]), {"a": 1.0})
    assert torch.equal(endless[0].sign(), torch.tensor([1.0, -1.0, 0.0]))


def valued(
    total: float, turns: tuple[float, ...], tokens: tuple[tuple[float, ...], ...], *, scored: bool = True
) -> Episode:
    """An episode of turns of these tokens, whose score has these values."""
    made_turns = [
        Turn(prompt_ids=(1,) * (place + 1), token_ids=(9,) * len(values), logprobs=(-1.0,) * len(values),
             versions=(0,) * len(values), text="")
        for place, values in enumerate(tokens)
    ]  # fmt: skip
    score = Score(total=total, turns=turns, tokens=tokens) if scored else None
    return Episode(task=TASK, turns=tuple(made_turns), score=score)


VALUED = [
    valued(1.0, (0.5, -1.0), ((0.1, math.nan), (0.4, 0.0, 0.2))),
    valued(0.0, (0.0, 2.0), ((0.3,), (math.nan, -0.6))),
    valued(0.0, (0.25,), ((1.0, 0.0),)),
]


@pytest.mark.parametrize(("estimator", "scaled"), [("grpo", True), ("dr_grpo", False)])
def test_episodes_turns_and_tokens_add_up(estimator: Estimator, scaled: bool):
    def normalised(values: np.ndarray) -> np.ndarray:
        centered = values - np.nanmean(values)
        return np.nan_to_num(centered / (np.nanstd(values, ddof=1) + 1e-4) if scaled else centered)

    of_episodes = normalised(np.array([1.0, 0.0, 0.0]))
    of_turns = normalised(np.array([0.5, -1.0, 0.0, 2.0, 0.25]))
    of_tokens = normalised(np.array([0.1, np.nan, 0.4, 0.0, 0.2, 0.3, np.nan, -0.6, 1.0, 0.0]))
    expected = np.repeat(of_episodes, [5, 3, 2]) + np.repeat(of_turns, [2, 3, 1, 2, 2]) + of_tokens
    batch = Batch(groups=(Group(task=TASK, episodes=tuple(VALUED)),), version=0)
    (advantages,) = batch_advantages(batch, estimator=estimator)
    assert [len(values) for values in advantages] == [5, 3, 2]
    np.testing.assert_allclose(np.concatenate(advantages), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_a_batch_leaves_episodes_without_a_score_out(estimator: Estimator):
    failed = valued(0.0, (7.0,), ((8.0,) * 6,), scored=False)
    batch = Batch(groups=(Group(task=TASK, episodes=tuple(VALUED)),), version=0)
    with_failed = Batch(groups=(Group(task=TASK, episodes=(VALUED[0], failed, *VALUED[1:])),), version=0)
    (expected,), (advantages,) = (
        batch_advantages(candidate, estimator=estimator) for candidate in (batch, with_failed)
    )
    assert not advantages[1].any()
    assert len(advantages[1]) == 6
    for values, expected_values in zip([advantages[0], *advantages[2:]], expected, strict=True):
        np.testing.assert_allclose(values, expected_values, rtol=1e-6)


def test_gdpo_leaves_episodes_without_a_score_out():
    batch = scored([{"a": 1.0, "b": 0.2}, {"a": 0.0, "b": 0.1}, {"a": 1.0, "b": 0.9}])
    failed = replace(batch.groups[0].episodes[0], score=None)
    mixed = Batch(groups=(replace(batch.groups[0], episodes=(failed, *batch.groups[0].episodes)),), version=0)
    expected = gdpo_advantages(batch, {"a": 1.0, "b": 0.5})
    torch.testing.assert_close(gdpo_advantages(mixed, {"a": 1.0, "b": 0.5}), torch.nn.functional.pad(expected, (1, 0)))
