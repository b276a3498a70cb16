"""Generalized advantage estimation, against hand-worked numbers and sums written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forge_rl.algorithms.gae import GaeConfig, gae
from forge_rl.errors import ConfigError

PLAIN = GaeConfig(lambda_policy=0.5, lambda_critic=0.5, whiten=False)


def written_out(values: np.ndarray, rewards: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Equation 16 of the paper as a double sum."""
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(len(values))]
    return np.array([sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(delta))) for t in range(len(delta))])


def random_arrays(lengths: list[int], seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [random.normal(size=n) for n in lengths], [random.normal(size=n) for n in lengths]


def test_hand_worked_episode():
    # delta: 0 + 0.4 - 0.5, 1 - 0.4; the first advantage is -0.1 + 0.5 * 0.6, and targets add the values
    (advantages,), (targets,) = gae([np.array([0.5, 0.4])], [np.array([0.0, 1.0])], PLAIN)
    np.testing.assert_allclose(advantages, [0.2, 0.6], rtol=1e-6)
    np.testing.assert_allclose(targets, [0.7, 1.0], rtol=1e-6)
    assert advantages.dtype == targets.dtype == np.float32


@pytest.mark.parametrize(
    ("gamma", "lam", "critic"), [(1.0, 0.95, 1.0), (0.9, 0.5, 0.8), (1.0, 0.0, 0.0), (0.0, 1.0, 1.0)]
)
def test_episodes_of_all_lengths_match_the_papers_sum(gamma: float, lam: float, critic: float):
    values, rewards = random_arrays([3, 0, 7, 1, 12, 7, 0])
    advantages, targets = gae(
        values, rewards, GaeConfig(gamma=gamma, lambda_policy=lam, lambda_critic=critic, whiten=False)
    )
    for v, r, advantage, target in zip(values, rewards, advantages, targets, strict=True):
        np.testing.assert_allclose(advantage, written_out(v, r, gamma, lam), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(target, v + written_out(v, r, gamma, critic), rtol=1e-5, atol=1e-6)


def test_targets_under_a_lambda_of_one_are_returns_whatever_the_values():
    values, rewards = random_arrays([5, 2])
    _, targets = gae(values, rewards)
    for target, reward in zip(targets, rewards, strict=True):
        np.testing.assert_allclose(target, np.cumsum(reward[::-1])[::-1], rtol=1e-5, atol=1e-6)


def test_length_adaptive_lambda_is_each_episodes_own_and_never_negative():
    values, rewards = random_arrays([40, 100, 10])
    advantages, targets = gae(values, rewards, GaeConfig(length_adaptive_alpha=0.05, whiten=False))
    for v, r, advantage, lam in zip(values, rewards, advantages, [0.5, 0.8, 0.0], strict=True):
        np.testing.assert_allclose(advantage, written_out(v, r, 1.0, lam), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets[0], np.cumsum(rewards[0][::-1])[::-1], rtol=1e-4, atol=1e-5)


def test_advantages_are_whitened_over_all_tokens_but_not_targets():
    values, rewards = random_arrays([3, 9, 1])
    plain, targets = gae(values, rewards, GaeConfig(whiten=False))
    white, returns = gae(values, rewards)
    tokens = np.concatenate(plain).astype(np.float64)
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(white), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.concatenate(returns), np.concatenate(targets))


@pytest.mark.parametrize("episodes", [1, 3, 7])
def test_equal_advantages_whiten_to_exactly_zero(episodes: int):
    advantages, _ = gae([np.zeros(1)] * episodes, [np.full(1, 0.1)] * episodes)
    assert not np.concatenate(advantages).any()


def test_verls_loop_over_a_mask_of_observations_gives_the_same():
    """The recursion as verl describes it: an observation keeps the next value and sum of the token behind it."""
    random = np.random.default_rng(3)
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1], bool)
    values, rewards = random.normal(size=8), np.where(mask, random.normal(size=8), 0)
    following = carried = 0.0
    expected = np.zeros(8)
    for t in reversed(range(8)):
        if mask[t]:
            carried = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.7 * carried
            following = values[t]
        expected[t] = carried
    advantages, _ = gae([values[mask]], [rewards[mask]], GaeConfig(gamma=0.9, lambda_policy=0.7, whiten=False))
    np.testing.assert_allclose(advantages[0], expected[mask], rtol=1e-5)


def test_tensors_serve_as_arrays_and_no_gradient_leaves():
    values = [torch.tensor([0.5, 0.4], dtype=torch.bfloat16, requires_grad=True)]
    (advantages,), _ = gae(values, [torch.tensor([0.0, 1.0])], PLAIN)
    assert type(advantages) is np.ndarray
    np.testing.assert_allclose(advantages, [0.2, 0.6], rtol=1e-2)
    assert gae([], []) == ([], [])


@pytest.mark.parametrize(
    ("values", "rewards", "message"),
    [
        ([np.zeros(2)], [np.zeros(3)], "rewards have shapes"),
        ([np.zeros(2)], [], "rewards have shapes"),
        ([np.zeros((2, 1))], [np.zeros(2)], "values have shapes"),
        ([np.zeros(2), np.array([math.nan])], [np.zeros(2), np.zeros(1)], "values of episode 1 are not all finite"),
        ([np.zeros(1)], [np.array([math.inf])], "rewards of episode 0 are not all finite"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(values: list[np.ndarray], rewards: list[np.ndarray], message: str):
    with pytest.raises(ConfigError, match=message):
        gae(values, rewards)


@pytest.mark.parametrize("field", ["gamma", "lambda_policy", "lambda_critic"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_discounts_outside_zero_to_one_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"--gae.{field.replace('_', '-')} is"):
        GaeConfig(**{field: value})
