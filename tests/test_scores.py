"""Scores: forms of rewards, their sums, values of turns and tokens, and their way to the trained tokens."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from forge_rl.algorithms.advantages import batch_advantages, group_advantages
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.protocol import form_of
from forge_rl.rewards.scorer import with_score
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "2+2"},))


def of_text(task: Task, text: str) -> float:
    return float(len(text))


def of_episode(task: Task, episode: object) -> float:
    return 1.0


def of_annotated(task: Task, given: Episode) -> float:
    return 1.0


def of_group(task: Task, given: Sequence[Episode]) -> list[float]:
    return [1.0]


class Judge:
    async def __call__(self, task: Task, episodes: Sequence[object]) -> list[float]:
        return [1.0]


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (of_text, "text"),
        (lambda task, completion: 1.0, "text"),
        (len, None),
        (lambda task: 1.0, None),
        (None, None),
        (of_episode, "episode"),
        (of_annotated, "episode"),
        (of_group, "group"),
        (Judge(), "group"),
        (WeightedSum({"a": (of_text, 1.0)}), "text"),
        (WeightedSum({"a": (of_text, 1.0), "b": (of_episode, 1.0)}), "episode"),
        (WeightedSum({"a": (of_group, 1.0), "b": (of_episode, 1.0)}), "group"),
    ],
)
def test_a_functions_second_parameter_says_what_it_is_given(function: object, form: str | None):
    if form is None:
        with pytest.raises(ConfigError, match="cannot be called with a task and its episode"):
            form_of(function)
    else:
        assert form_of(function) == form


def turn(prompt: list[int], answer: list[int]) -> Turn:
    zeros = [0] * len(answer)
    return Turn(prompt_ids=prompt, token_ids=answer, logprobs=[-0.5] * len(answer), versions=zeros, text="")


def episode_of(*answers: list[int]) -> Episode:
    """Turns of these answers, each shown all before and one token more."""
    turns: list[Turn] = []
    prompt = [1]
    for answer in answers:
        turns.append(turn(prompt, answer))
        prompt = [*prompt, *answer, 7]
    return Episode(task=TASK, turns=tuple(turns))


def test_an_episode_takes_all_of_its_score():
    nan = math.nan
    scored = with_score(
        episode_of([10, 11], [20]), Score(total=1, turns=(0.5, 2), tokens=([nan, 1], [nan]), answer="4")
    )
    assert (scored.reward, scored.score.answer, scored.score.turns) == (1.0, "4", (0.5, 2.0))
    np.testing.assert_equal([list(values) for values in scored.score.tokens], [[nan, 1.0], [nan]])
    plain = with_score(episode_of([10]), Score(total=1, parts={"a": 1}))
    assert (plain.score.parts, plain.score.turns, plain.score.tokens) == ({"a": 1.0}, (), ())


def test_the_texts_of_a_score_can_be_encoded():
    lone = Score(total=1, parts={"a\ud800": 1}, answer="\udfff", feedback="it printed \udc80")
    score = with_score(episode_of([10]), lone).score
    assert (score.parts, score.answer, score.feedback) == ({"a?": 1.0}, "?", "it printed ?")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Score(total=math.nan), "the reward of 1 is nan"),
        (Score(total=0, parts={"a": math.inf}), r"of parts \{'a': inf\}"),
        (Score(total=0, turns=(1.0,)), "1 entries in `turns`, for 2 turns"),
        (Score(total=0, turns=(1.0, math.nan)), r"turns \[1.0, nan\]"),
        (Score(total=0, tokens=([1.0], [1.0], [1.0])), "3 entries in `tokens`, for 2 turns"),
        (Score(total=0, tokens=([1.0], [1.0])), "1 values for turn 0, of 2 tokens"),
    ],
)
def test_a_score_that_does_not_fit_its_episode_is_named(score: Score, message: str):
    with pytest.raises(ForgeError, match=message):
        with_score(episode_of([10, 11], [20]), score)


def test_a_sum_weighs_totals_turns_and_tokens_and_keeps_the_parts():
    nan = math.nan
    reward = WeightedSum({"right": (of_text, 1.0), "brief": (of_episode, 0.5)})
    score = reward.combine(
        {
            "right": Score(total=1, parts={"exact": 1.0}, turns=(1, 0), tokens=([nan, 1], [nan])),
            "brief": Score(total=-1, turns=(2, 2), tokens=([nan, 2], [4]), answer="5"),
        }
    )
    assert score.total == 0.5
    assert score.parts == {"right": 1, "right/exact": 1.0, "brief": -1}
    assert score.turns == (2.0, 1.0)
    np.testing.assert_equal([list(values) for values in score.tokens[:1]], [[nan, 2.0]])
    assert list(score.tokens[1]) == [2.0]
    assert score.answer == "5"
    with pytest.raises(ConfigError, match="no parts"):
        WeightedSum({})


def batch_of(*scores: Score) -> Batch:
    """One group of episodes of two turns, of two tokens and of one."""
    episodes = (with_score(episode_of([10 + i, 11], [20 + i]), score) for i, score in enumerate(scores))
    return Batch(groups=(Group(task=TASK, episodes=tuple(episodes)),), version=0)


def test_advantages_without_values_are_those_of_the_episodes():
    batch = batch_of(Score(total=0), Score(total=1))
    assert torch.equal(batch_advantages(batch), group_advantages(batch.rewards))  # type: ignore[arg-type]


def test_turn_values_are_centered_over_the_group():
    # totals 0 and 1: -0.5 and 0.5. Values 0, 1, 1, 2: mean 1, so -1 and 0; 0 and 1.
    batch = batch_of(Score(total=0, turns=(0, 1)), Score(total=1, turns=(1, 2)))
    advantages = batch_advantages(batch, estimator="dr_grpo")
    assert [values.tolist() for values in advantages[0]] == [[-1.5, -1.5, -0.5], [0.5, 0.5, 1.5]]
    std = batch_advantages(batch)  # deviations: 0.70711 of the totals, sqrt(2 / 3) of the values
    outcome, process = 0.5 / (0.7071068 + 1e-4), 1 / (0.8164966 + 1e-4)
    np.testing.assert_allclose(std[0][1], [outcome, outcome, outcome + process], rtol=1e-6)


def test_values_of_turns_are_centered_over_the_batch_where_totals_are():
    batch = batch_of(Score(total=0, turns=(0, 1)), Score(total=1, turns=(1, 2)))
    apart = replace(batch, groups=tuple(replace(batch.groups[0], episodes=(episode,)) for episode in batch.episodes))
    together = [values.tolist() for values in batch_advantages(batch)[0]]
    assert [values.tolist() for (values,) in batch_advantages(apart, estimator="reinforce")] == together


def test_values_of_tokens_reach_these_alone():
    nan = math.nan
    batch = batch_of(Score(total=0, tokens=([nan, 1], [nan])), Score(total=0, tokens=([nan, 3], [nan])))
    advantages = batch_advantages(batch, estimator="dr_grpo")
    assert [values.tolist() for values in advantages[0]] == [[0, -1, 0], [0, 1, 0]]
    equal_batch = batch_of(Score(total=0, turns=(0.1, 0.1)), Score(total=0, turns=(0.1, 0.1)))
    assert [values.tolist() for values in batch_advantages(equal_batch)[0]] == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_packed_rows_hold_each_tokens_own_advantage(share_prefixes: bool):
    batch = batch_of(Score(total=0, tokens=([0, 1], [2])), Score(total=0, tokens=([3, 4], [5])))
    packed = pack(batch, batch_advantages(batch, estimator="dr_grpo"), Layout(share_prefixes=share_prefixes))
    triples = [
        (int(row.episodes[position]), int(row.targets[position]), float(row.advantages[position]))
        for row in packed.rows
        for position in row.mask.nonzero().flatten().tolist()
    ]
    # values 0 to 5, whose mean is 2.5
    assert sorted(triples) == [(0, 10, -2.5), (0, 11, -1.5), (0, 20, -0.5), (1, 11, 0.5), (1, 11, 1.5), (1, 21, 2.5)]


def test_advantages_of_other_lengths_than_their_episodes_are_refused():
    batch = batch_of(Score(total=0), Score(total=1))
    with pytest.raises(ConfigError, match="an episode of 3 tokens has 2 advantages"):
        pack(batch, [[np.zeros(3, np.float32), np.zeros(2, np.float32)]], Layout())
    with pytest.raises(ConfigError, match=r"advantages have shape \[1, 1\]"):
        pack(batch, [[np.zeros(3, np.float32)]], Layout())


def test_an_episode_of_many_turns_is_sent_in_the_size_of_its_last_context():
    answers = [[turn] * 100 for turn in range(2, 42)]
    scored_episode = with_score(episode_of(*answers), Score(total=1.0, turns=[1.0] * 40, tokens=[[0.5] * 100] * 40))
    pickle_bytes = pickle.dumps(scored_episode)
    unpickled_episode = pickle.loads(pickle_bytes)
    assert unpickled_episode == scored_episode
    assert [turn.prompt_ids.tolist() for turn in unpickled_episode.turns] == [
        turn.prompt_ids.tolist() for turn in scored_episode.turns
    ]
    assert all(
        np.array_equal(a, b, equal_nan=True)
        for a, b in zip(unpickled_episode.score.tokens, scored_episode.score.tokens, strict=True)
    )
    assert (
        len(pickle_bytes) < 40 * 100 * 4 * 5
    )  # ids, logprobs, versions and values; the prompts together have 20 times as many


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (Score(total=1.0, turns=(1.0,)), Score(total=1.0, turns=(1.0, 2.0)), r"`turns`: a \[1\], b \[2\]"),
        (
            Score(total=1.0, tokens=(np.zeros(2),)),
            Score(total=1.0, tokens=(np.zeros(3),)),
            r"`tokens`: a \[2\], b \[3\]",
        ),
    ],
)
def test_parts_whose_values_do_not_fit_together_are_named(one: Score, other: Score, message: str):
    reward = WeightedSum({"a": (of_episode, 1.0), "b": (of_episode, 1.0)})
    with pytest.raises(ForgeError, match=message):
        reward.combine({"a": one, "b": other})
    assert reward.combine({"a": one, "b": Score(total=2.0)}).total == 3.0


def test_turns_included_in_a_total_are_counted_once():
    reward = WeightedSum({"a": (of_episode, 1.0), "b": (of_episode, 1.0)})
    steps = Score(total=3.0, turns=(1.0, 2.0), turns_in_total=True)
    assert reward.combine({"a": steps, "b": Score(total=0.5)}).turns_in_total
    assert not reward.combine({"a": Score(total=0.5), "b": Score(total=1.0)}).turns_in_total
    with pytest.raises(ForgeError, match="include `turns` in their total and others do not"):
        reward.combine({"a": steps, "b": Score(total=1.0, turns=(1.0, 0.0))})
