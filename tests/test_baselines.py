"""ReMax and role-conditioned baselines, against hand-worked numbers and the papers' formulas."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from forge_rl.algorithms.baselines import RoleBaselines, remax_advantages
from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode, Group, Score
from tests.fakes import TASK


def test_remax_subtracts_each_groups_greedy_reward():
    advantages = remax_advantages(torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 1.0]]), torch.tensor([0.25, 1.0]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.25, 0.75, 0.25], [0.0, 0.0, 0.0]]))
    scored = torch.tensor([[True, False]])
    assert remax_advantages(torch.ones(2, 1), torch.tensor([math.nan, 0.5])).tolist() == [[0.0], [0.5]]
    advantages = remax_advantages(torch.tensor([[1.0, math.nan]]), torch.tensor([0.5]), scored=scored)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.0]]))


@pytest.mark.parametrize(
    ("rewards", "baselines", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3), r"rewards have shape \[2, 3\] and baselines \[3\]"),
        (torch.zeros(2), torch.zeros(2), "shape"),
        (torch.zeros(1, 2), torch.tensor([math.inf]), "not finite"),
        (torch.tensor([[0.0, math.nan]]), torch.zeros(1), "not finite"),
        (torch.tensor([[0.0, math.inf]]), torch.zeros(1), "not finite"),
    ],
)
def test_remax_refuses_what_does_not_fit(rewards: torch.Tensor, baselines: torch.Tensor, message: str):
    with pytest.raises(ConfigError, match=message):
        remax_advantages(rewards, baselines)


def games(*groups: tuple[str, list[tuple[str, float | None]]]) -> Batch:
    """Groups of (source, episodes), an episode being (role, reward)."""
    played_groups = []
    for source, episodes in groups:
        task = replace(TASK, source=source)
        played = [
            Episode(task=task, turns=(), output=role, score=None if reward is None else Score(total=reward))
            for role, reward in episodes
        ]
        played_groups.append(Group(task=task, episodes=tuple(played)))
    return Batch(groups=tuple(played_groups), version=0)


def role(episode: Episode) -> str:
    return episode.text


BATCH = games(
    ("poker", [("first", 1.0), ("second", -1.0), ("first", 1.0)]),
    ("chess", [("first", -1.0), ("second", 1.0), ("second", 0.5)]),
)


def test_baselines_follow_the_papers_algorithm_for_each_game_and_role():
    baselines, means = RoleBaselines(decay=0.9, role=role), dict[tuple[str, str], float]()
    for _ in range(3):
        expected = []
        for group in BATCH.groups:
            for episode in group.episodes:
                key = episode.task.source, episode.text
                means[key] = 0.9 * means.get(key, 0.0) + (1 - 0.9) * episode.reward
                expected.append(episode.reward - means[key])
        advantages = baselines.advantages(BATCH)
        np.testing.assert_allclose(advantages.flatten().numpy(), expected, rtol=1e-6)
        assert advantages.shape == (2, 3)
    for key, mean in means.items():
        assert baselines[key] == pytest.approx(mean)
    assert baselines["go", "first"] == 0.0


def test_hand_worked_baselines_without_roles():
    # b: 0.5, then 0.5 * 0.5 + 0.5 * -1 = -0.25
    advantages = RoleBaselines(decay=0.5).advantages(games(("poker", [("first", 1.0), ("second", -1.0)])))
    torch.testing.assert_close(advantages, torch.tensor([[0.5, -0.75]]))
    advantages = RoleBaselines(decay=0.5, initial=1.0).advantages(games(("poker", [("first", 1.0)])))
    torch.testing.assert_close(advantages, torch.zeros(1, 1))


def test_a_saved_state_goes_on_where_it_was():
    baselines, resumed = RoleBaselines(role=role), RoleBaselines(role=role)
    baselines.advantages(BATCH)
    resumed.load_state_dict(json.loads(json.dumps(baselines.state_dict())))
    assert torch.equal(resumed.advantages(BATCH), baselines.advantages(BATCH))
    assert {*baselines.state_dict()} == {"poker", "chess"}
    assert "poker/first" in repr(baselines)
    resumed.load_state_dict({})
    assert resumed["poker", "first"] == 0.0


def test_episodes_without_a_score_change_no_baseline():
    baselines = RoleBaselines(decay=0.5)
    advantages = baselines.advantages(games(("poker", [("first", None), ("first", 1.0), ("first", None)])))
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.5, 0.0]]))
    assert baselines["poker", ""] == 0.5


def test_a_batch_that_is_refused_changes_no_baseline():
    baselines = RoleBaselines(decay=0.5)
    with pytest.raises(ConfigError, match="reward of 1 is nan"):
        baselines.advantages(games(("poker", [("first", 1.0), ("first", math.nan)])))
    assert baselines["poker", ""] == 0.0


def test_settings_and_states_that_make_no_sense_are_refused():
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match="decay is"):
            RoleBaselines(decay=decay)
    for state in ({"poker": 1.0}, {"poker": {"first": "x"}}, {"poker": {"first": None}}, [], {"a": {"b": math.inf}}):
        with pytest.raises(ConfigError, match="state of role baselines"):
            RoleBaselines().load_state_dict(state)  # type: ignore[arg-type]
