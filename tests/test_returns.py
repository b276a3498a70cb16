"""Rewards of tokens, discounted sums and REINFORCE++, against hand-worked numbers and recursions written in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forge_rl.algorithms.advantages import batch_advantages
from forge_rl.algorithms.returns import by_group, discounted, reinforce_pp_advantages, token_rewards
from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode, Group, Score, Turn
from tests.fakes import TASK, random_batch


def test_sums_stop_at_the_end_of_their_episode():
    returns = discounted(
        np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), np.array([1, 3, 0, 2]), np.array([9.0, 0.5, 7.0, 0.1])
    )
    np.testing.assert_allclose(returns, [1.0, 2 + 0.5 * 3 + 0.25 * 4, 3 + 0.5 * 4, 4.0, 5.6, 6.0])


def turn(size: int) -> Turn:
    return Turn(prompt_ids=(1,), token_ids=(10,) * size, logprobs=(-1.0,) * size, versions=(0,) * size, text="")


def test_rewards_lie_on_the_tokens_that_end_what_they_are_for():
    turns = (turn(2), turn(0), turn(3))
    score = Score(total=1.0, turns=(0.5, 9.0, 0.25), tokens=((0.1, math.nan), (), (0.0, 0.2, 0.0)))
    scored = Episode(task=TASK, turns=turns, score=score)
    bare = [Episode(task=TASK, turns=turns), Episode(task=TASK, turns=(), score=score)]
    placed, none, empty = token_rewards([scored, *bare])
    np.testing.assert_allclose(placed, [0.1, 9.5, 0.0, 0.2, 1.25])
    assert not none.any()
    (first,) = token_rewards([Episode(task=TASK, turns=(turn(0), turn(2)), score=Score(total=0.0, turns=(0.5, 0.0)))])
    assert first.tolist() == [0.5, 0.0]
    assert len(none) == 5
    assert len(empty) == 0


def test_rewards_of_an_environments_steps_count_once():
    score = Score(total=0.75, turns=(0.5, 0.25), turns_in_total=True)
    (placed,) = token_rewards([Episode(task=TASK, turns=(turn(2), turn(1)), score=score)])
    np.testing.assert_allclose(placed, [0.0, 0.5, 0.25])


def test_a_part_that_is_added_to_the_rewards_of_steps_is_placed_on_the_last_token():
    turns = (0.1, 0.2, -0.7)
    for total, rest in ((sum(turns), 0.0), (sum(turns) + 0.5, 0.5), (sum(turns) - 2.0, -2.0)):
        score = Score(total=total, turns=turns, turns_in_total=True)
        (placed,) = token_rewards([Episode(task=TASK, turns=(turn(1), turn(1), turn(2)), score=score)])
        np.testing.assert_allclose(placed, [0.1, 0.2, 0.0, -0.7 + rest], atol=1e-12)
        assert rest or placed[-1] == -0.7, "the sum's rounding is no reward"
    score = Score(total=0.0, turns=(0.0,), turns_in_total=True)
    (placed,) = token_rewards([Episode(task=TASK, turns=(turn(2),), score=score)])
    assert not placed.any()


def test_flat_arrays_return_to_their_groups():
    batch = random_batch(0, vocab=43)
    values = [np.full(episode.response_tokens, i, np.float32) for i, episode in enumerate(batch.episodes)]
    grouped = by_group(batch, values)
    assert [[values[0] for values in group] for group in grouped] == [[0, 1, 2], [3, 4, 5]]


def scored(*groups: list[tuple[Score | None, tuple[int, ...]]]) -> Batch:
    """A batch of episodes with these scores, whose turns have these numbers of tokens."""
    scored_groups = [
        Group(
            task=TASK,
            episodes=tuple(Episode(task=TASK, turns=tuple(map(turn, sizes)), score=score) for score, sizes in group),
        )
        for group in groups
    ]
    return Batch(groups=tuple(scored_groups), version=0)


def whitened(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def test_returns_are_carried_over_observations_with_discount_and_penalties():
    """The recursion of verl's REINFORCE++, which goes on where there are observations instead of starting anew."""
    random = np.random.default_rng(0)
    batch = scored([(Score(total=1.0, turns=(0.5, 0.0)), (3, 2)), (Score(total=-0.5), (4,))])
    penalties = [random.normal(size=5), random.normal(size=4)]
    mask = np.array([1, 1, 1, 0, 0, 1, 1], bool)  # the first episode, with two tokens of an observation
    rewards = np.zeros((2, 7))
    rewards[0, 2], rewards[0, 6], rewards[1, 3] = 0.5, 1.0, -0.5
    rewards[0, mask] -= penalties[0]
    rewards[1, :4] -= penalties[1]
    returns = np.zeros((2, 7))
    for row, generated in ((0, mask), (1, np.arange(7) < 4)):
        running = 0.0
        for t in reversed(range(7)):
            if generated[t]:
                running = rewards[row, t] + 0.9 * running
                returns[row, t] = running
    expected = whitened(np.concatenate([returns[0, mask], returns[1, :4]]))
    advantages = reinforce_pp_advantages(batch, gamma=0.9, penalties=penalties)
    np.testing.assert_allclose(np.concatenate(advantages[0]), expected, rtol=1e-5)
    assert [len(values) for values in advantages[0]] == [5, 4]


def test_without_discount_and_penalties_it_is_the_estimator_of_that_name():
    sizes = [(2, 1), (5,), (1,), (4, 4)]
    totals = [0.0, 1.0, 0.3, -2.0]
    batch = scored(*[[(Score(total=total), size)] for total, size in zip(totals, sizes, strict=True)])
    expected = batch_advantages(batch, estimator="reinforce_pp")
    for (values,), expected_values in zip(reinforce_pp_advantages(batch), expected, strict=True):
        np.testing.assert_allclose(values, float(expected_values[0]), rtol=1e-5)


def test_hand_worked_returns_of_a_discount():
    # returns 0.25, 0.5, 1 and 0; mean 0.4375, unbiased variance 0.182292
    ((first, second),) = reinforce_pp_advantages(
        scored([(Score(total=1.0), (1, 2)), (Score(total=0.0), (1,))]), gamma=0.5
    )
    np.testing.assert_allclose(first, np.array([-0.1875, 0.0625, 0.5625]) / 0.4269563, rtol=1e-5)
    np.testing.assert_allclose(second, [-0.4375 / 0.4269563], rtol=1e-5)


def test_episodes_without_a_score_have_no_advantage_and_are_in_no_mean():
    scores = [(Score(total=1.0), (2,)), (Score(total=0.0), (3,))]
    (advantages,) = reinforce_pp_advantages(scored(scores))
    (with_failed,) = reinforce_pp_advantages(scored([scores[0], (None, (50,)), scores[1]]))
    assert not with_failed[1].any()
    np.testing.assert_array_equal(np.concatenate([with_failed[0], with_failed[2]]), np.concatenate(advantages))


def test_what_does_not_fit_is_refused():
    batch = scored([(Score(total=1.0), (2,)), (Score(total=0.0), (3,))])
    with pytest.raises(ConfigError, match=r"gamma is 1\.5"):
        reinforce_pp_advantages(batch, gamma=1.5)
    with pytest.raises(ConfigError, match="penalties have shapes"):
        reinforce_pp_advantages(batch, penalties=[np.zeros(2)])
    with pytest.raises(ConfigError, match="rewards of episode 1 are not all finite"):
        reinforce_pp_advantages(scored([(Score(total=1.0), (2,)), (Score(total=math.nan), (3,))]))
    assert reinforce_pp_advantages(Batch(groups=(), version=0)) == []
