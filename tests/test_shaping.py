"""Rewards that depend on other parts: hand-worked numbers, and formulas written out in NumPy."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from forge_rl.errors import ConfigError
from forge_rl.rewards.answers import Exact
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.lengths import Length
from forge_rl.rewards.protocol import Shaping, form_of
from forge_rl.rewards.shaping import AdaptiveLength, CosineLength, StopProperly, repeated_share
from forge_rl.services.reward import RewardService
from forge_rl.types import Episode, Outcome, Score, Task, Turn

TASK = Task(id="t", source="s", messages=(), truth={"answer": "5"})


def episode(*tokens: int, cut: bool = False, outcome: Outcome = Outcome.COMPLETED) -> Episode:
    zeros = [0] * len(tokens)
    turn = Turn(prompt_ids=[1], token_ids=tokens, logprobs=zeros, versions=zeros, text="5", truncated=cut)
    return Episode(task=TASK, turns=(turn,), outcome=outcome)


def shaped(function: Shaping, episodes: list[Episode], sibling_rewards: list[float]) -> list[float]:
    """Measure and shape, as the service does."""
    many = form_of(function) == "group"
    scores = function(TASK, episodes) if many else [function(TASK, sample) for sample in episodes]  # type: ignore[operator]
    return list(function.shape([x if isinstance(x, Score) else Score(total=x) for x in scores], sibling_rewards))


def test_a_cut_answer_keeps_a_share_of_its_reward_but_never_gains():
    cut = [episode(1, cut=True), episode(1, outcome=Outcome.TRUNCATED), episode(1), episode(1, cut=True)]
    assert shaped(StopProperly(factor=0.1), cut, [1.0, 2.0, 1.0, -1.0]) == pytest.approx([-0.9, -1.8, 0.0, 0.0])
    assert shaped(StopProperly(), [Episode(task=TASK, turns=())], [1.0]) == [0.0]


def test_the_cosine_is_the_papers_formula():
    lengths, max_tokens = np.arange(0, 24), 20
    function = CosineLength(
        max_tokens=max_tokens, right_short=2, right_long=1, wrong_short=-10, wrong_long=-1, exceeded=-12, right=0.5
    )
    for other, short, long in ((0.5, 2.0, 1.0), (0.49, -10.0, -1.0)):
        # Equation of section 4: CosFn(t, T, low, high) = low + (high - low)(1 + cos(t pi / T)) / 2; r_e from T on.
        expected = np.where(
            lengths < max_tokens, long + 0.5 * (short - long) * (1 + np.cos(lengths * np.pi / max_tokens)), -12.0
        )
        rewards = shaped(function, [episode(*range(n)) for n in lengths], [other] * len(lengths))
        np.testing.assert_allclose(rewards, expected, rtol=1e-12)


def test_only_a_wrong_answer_pays_for_repetition():
    function = CosineLength(max_tokens=100, repetition=4.0, ngram=2)
    plain = CosineLength(max_tokens=100)
    twice = [episode(1, 2, 1, 2, 3)] * 2  # pairs 12 21 12 23: one of four is repeated
    assert np.subtract(shaped(function, twice, [0.0, 1.0]), shaped(plain, twice, [0.0, 1.0])).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "size", "share"),
    [((), 1, 0.0), ((1, 2), 3, 0.0), ((7,) * 10, 1, 0.9), ((1, 2, 3, 1, 2, 3), 3, 0.25), ((1, 2, 3), 2, 0.0)],
)
def test_repeated_ngrams_are_counted_within_a_turn(tokens: tuple[int, ...], size: int, share: float):
    assert repeated_share(episode(*tokens), size) == pytest.approx(share)
    apart = Episode(task=TASK, turns=(*episode(1, 2).turns, *episode(1, 2).turns))
    assert repeated_share(apart, 2) == 0.0


@pytest.mark.parametrize(
    ("sibling_rewards", "rate"),
    [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0, 0.9, 0], 0.25), ([1, 1, 1, 0], 0.75)],
)
def test_the_adaptive_penalty_grows_with_the_pass_rate(sibling_rewards, rate):
    group = [episode(*range(n)) for n in (0, 10, 20, 300)]
    expected = np.array([0, 10, 20, 300]) / 100 * max(rate, 1 / 4)
    np.testing.assert_allclose(shaped(AdaptiveLength(tokens=100), group, sibling_rewards), expected)


def test_a_sum_reads_the_named_part_or_all_that_do_not_shape():
    total = WeightedSum(
        {
            "stop": (StopProperly(factor=0.5), 2.0),
            "right": (Exact(), 3.0),
            "length": (Length(tokens=2), -1.0),
            "brief": (AdaptiveLength(tokens=10, of="right"), -1.0),
        }
    )
    assert total.form == "group"
    measured = {
        "stop": [Score(total=1.0), Score(total=0.0)],
        "right": [Score(total=1.0, answer="5"), Score(total=0.0)],
        "length": [Score(total=0.5), Score(total=1.0)],
        "brief": [Score(total=0.1), Score(total=0.2)],
    }
    first, second = total.combine_all(measured)
    # stop reads 3 - 0.5 = 2.5 and gives -1.25; brief reads 1 and 0, of which half passed.
    assert first.parts == pytest.approx({"stop": -1.25, "right": 1.0, "length": 0.5, "brief": 0.05})
    assert first.total == pytest.approx(2 * -1.25 + 3 - 0.5 - 0.05)
    assert (first.answer, second.total) == ("5", pytest.approx(-1 - 0.1))


@pytest.mark.parametrize("part", ["rigth", "other"])
def test_a_part_that_is_not_there_or_itself_shapes_is_refused(part: str):
    with pytest.raises(ConfigError, match=f"--reward stop depends on .* no part '{part}'") as caught:
        WeightedSum({"stop": (StopProperly(of=part), 1.0), "right": (Exact(), 1.0), "other": (StopProperly(), 1.0)})
    assert caught.value.hint == "name one of: right"


def test_such_a_reward_cannot_score_alone():
    with pytest.raises(ConfigError, match="StopProperly depends on another reward and cannot score alone"):
        RewardService(cast(Any, None), StopProperly())
