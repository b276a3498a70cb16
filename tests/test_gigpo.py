"""GiGPO, against the paper's equations in NumPy and hand-worked numbers."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from forge_rl.algorithms.advantages import batch_advantages
from forge_rl.algorithms.gigpo import gigpo_advantages
from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode, Group, Score, Turn
from tests.fakes import TASK

START = (1, 2, 3)


def play(*steps: tuple[tuple[int, ...], float], scored: bool = True, action: int = 50) -> Episode:
    """An episode of steps, each the tokens of a state and the reward of what was done there."""
    prompt_ids, turns = list[int](), []
    for place, (state, _) in enumerate(steps):
        prompt_ids += state
        token_ids = (action,) * (place + 1)
        turns.append(
            Turn(
                prompt_ids=tuple(prompt_ids), token_ids=token_ids, logprobs=(-1.0,) * len(token_ids),
                versions=(0,) * len(token_ids), text="",
            )
        )  # fmt: skip
        prompt_ids += token_ids
    rewards = tuple(reward for _, reward in steps)
    score = Score(total=sum(rewards), turns=rewards, turns_in_total=True) if scored else None
    return Episode(task=TASK, turns=tuple(turns), score=score)


def batch_of(*groups: list[Episode]) -> Batch:
    return Batch(groups=tuple(Group(task=TASK, episodes=tuple(episodes)) for episodes in groups), version=0)


A, B, C = (10, 11), (20,), (30, 31, 32)
GROUP = [
    play((START, 0.0), (A, 0.0), (B, 1.0), action=50),
    play((START, 0.5), (B, 0.0), (A, 0.0), action=51),
    play((START, 0.0), (A, 0.0), (A, 0.2), (C, 0.0), action=52),
]
STATES = [(START, A, B), (START, B, A), (START, A, A, C)]
REWARDS = [(0.0, 0.0, 1.0), (0.5, 0.0, 0.0), (0.0, 0.0, 0.2, 0.0)]


def equations(gamma: float, weight: float, scaled: bool) -> list[list[float]]:
    """Equations 3 to 8 of the paper for GROUP, one advantage for each turn."""

    def normalise(values: list[float]) -> list[float]:
        if len(values) < 2:
            return [0.0]
        return list((np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-4 if scaled else 1.0))

    episodes = normalise([sum(rewards) for rewards in REWARDS])
    returns = [[sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in REWARDS]
    anchors = defaultdict(list)
    for i, states in enumerate(STATES):
        for t, state in enumerate(states):
            anchors[state].append((i, t))
    steps = [[0.0] * len(states) for states in STATES]
    for members in anchors.values():
        for (i, t), value in zip(members, normalise([returns[i][t] for i, t in members]), strict=True):
            steps[i][t] = value
    return [[episodes[i] + weight * value for value in values] for i, values in enumerate(steps)]


@pytest.mark.parametrize(("gamma", "weight"), [(0.95, 1.0), (1.0, 0.5), (0.0, 2.0), (0.9, 0.0)])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_turns_get_the_papers_sum_of_both_advantages(gamma: float, weight: float, scale: str):
    (advantages,) = gigpo_advantages(batch_of(GROUP), gamma=gamma, step_weight=weight, scale=scale)
    for values, expected in zip(advantages, equations(gamma, weight, scale == "std"), strict=True):
        sizes = range(1, len(expected) + 1)
        np.testing.assert_allclose(values, np.repeat(expected, sizes), rtol=1e-5, atol=1e-6)
        assert values.dtype == np.float32


def test_hand_worked_group():
    # R: 1 and 0. START: returns 0.5 and 0. A: the first episode's 1, alone. B: the second's 0, alone.
    group = [play((START, 0.0), (A, 1.0)), play((START, 0.0), (B, 0.0), action=51)]
    ((first, second),) = gigpo_advantages(batch_of(group), gamma=0.5, scale="none")
    np.testing.assert_allclose(first, [0.75, 0.5, 0.5])
    np.testing.assert_allclose(second, [-0.75, -0.5, -0.5])


def test_a_state_is_the_same_in_no_other_group():
    alone = batch_of([play((START, 0.0), (A, 1.0)), play((START, 0.0), (B, 0.0), action=51)])
    together = batch_of(alone.groups[0].episodes, [play((START, 0.0), (A, 5.0)), play((START, 0.0), (A, 0.0))])
    for values, expected in zip(gigpo_advantages(together)[0], gigpo_advantages(alone)[0], strict=True):
        np.testing.assert_array_equal(values, expected)


def test_anchors_may_be_whole_prompts_or_any_key():
    by_prompt = gigpo_advantages(batch_of(GROUP), anchor="prompt", scale="none", gamma=1.0)[0]
    rewards = [sum(rewards_of_turns) for rewards_of_turns in REWARDS]
    centered = np.array(rewards) - np.mean(rewards)
    for values, advantage, actions in zip(by_prompt, centered, (3, 3, 4), strict=True):
        # all began alike, and no history after the first turn is shared, so that later turns have 0 of their own
        np.testing.assert_allclose(
            values, [2 * advantage] + [advantage] * (actions * (actions + 1) // 2 - 1), rtol=1e-5
        )
    advantages = gigpo_advantages(batch_of(GROUP), anchor=lambda episode, turn: "all", scale="none", gamma=1.0)[0]
    returns = np.array([1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.2, 0.2, 0.2, 0.0])
    np.testing.assert_allclose(advantages[1][0], centered[1] + 0.5 - returns.mean(), rtol=1e-5)


def test_a_total_is_paid_last_and_a_rewrite_is_a_new_state():
    turns = [
        Turn(prompt_ids=(1, 2), token_ids=(9,), logprobs=(-1.0,), versions=(0,), text=""),
        Turn(prompt_ids=(7, 7), token_ids=(9,), logprobs=(-1.0,), versions=(0,), text=""),
    ]
    episodes = [Episode(task=TASK, turns=tuple(turns), score=Score(total=total)) for total in (1.0, 0.0)]
    assert episodes[0].observation(1).tolist() == [7, 7]
    ((right, wrong),) = gigpo_advantages(batch_of(episodes), gamma=0.5, scale="none")
    np.testing.assert_allclose(right, [0.5 + 0.25, 0.5 + 0.5])
    np.testing.assert_allclose(wrong, [-0.75, -1.0])


def test_observations_are_what_a_turn_adds_to_the_one_it_continues():
    assert [tuple(GROUP[2].observation(turn)) for turn in range(4)] == [START, A, A, C]
    prompts = ((1, 2), (7, 7), (1, 2, 9, 3, 4), (7, 7, 9, 5))  # of two histories side by side
    turns = [Turn(prompt_ids=ids, token_ids=(9,), logprobs=(-1.0,), versions=(0,), text="") for ids in prompts]
    episode = Episode(task=TASK, turns=tuple(turns))
    assert [episode.observation(turn).tolist() for turn in range(4)] == [[1, 2], [7, 7], [3, 4], [5]]


@pytest.mark.parametrize("size", [3, 7])
def test_equal_rewards_give_exactly_zero(size: int):
    equal = [play((START, 0.0), (A, 0.1)) for _ in range(size)]
    assert not any(values.any() for values in gigpo_advantages(batch_of(equal))[0])


def test_episodes_without_score_or_turns_are_in_no_mean():
    failed, empty = play((START, 0.0), (A, 0.0), scored=False), Episode(task=TASK, turns=(), score=Score(total=9.0))
    advantages = gigpo_advantages(batch_of([failed, *GROUP, empty]))[0]
    assert not advantages[0].any()
    assert len(advantages[0]) == 3
    assert len(advantages[4]) == 0
    for values, expected in zip(advantages[1:4], gigpo_advantages(batch_of(GROUP))[0], strict=True):
        np.testing.assert_array_equal(values, expected)
    assert not gigpo_advantages(batch_of([failed, failed]))[0][0].any()


def test_without_weight_of_steps_it_is_grpo():
    episodes = [Episode(task=TASK, turns=episode.turns, score=Score(total=episode.reward)) for episode in GROUP]
    expected = batch_advantages(batch_of(episodes))
    advantages = gigpo_advantages(batch_of(episodes), step_weight=0.0)
    torch.testing.assert_close(torch.tensor([[float(values[0]) for values in advantages[0]]]), expected)


def test_what_does_not_fit_is_refused():
    for settings, message in (
        ({"gamma": 1.1}, "gamma is"),
        ({"scale": "mad"}, "unknown scale"),
        ({"anchor": "text"}, "unknown anchor"),
    ):
        with pytest.raises(ConfigError, match=message):
            gigpo_advantages(batch_of(GROUP), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reward of 1 is not finite"):
        gigpo_advantages(batch_of([play((START, math.inf)), play((START, 0.0))]))
