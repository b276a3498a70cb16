"""Adaptive shares: exact projection, bounds in any course of a run, hand-set shares, and resuming."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_rl.data.adaptive import Adapting, AdaptiveShares, bounded_shares
from forge_rl.data.mixture import Mixture
from forge_rl.errors import ConfigError, TaskError
from forge_rl.types import Episode, Group, Outcome, Score, Task
from tests.test_mixture import Counting

SUCCESS = Adapting(adapt="success", momentum=0.5)


def group(source: str, *rewards: float) -> Group:
    task = Task(id="1", source=source, messages=())
    ended = [Episode(task=task, turns=(), score=Score(total=reward), outcome=Outcome.COMPLETED) for reward in rewards]
    return Group(task=task, episodes=tuple(ended))


def mixture(**weights: float) -> Mixture:
    return Mixture({name: Counting(name) for name in weights}, weights)


@pytest.mark.parametrize(
    ("scores", "min_share", "max_share", "expected"),
    [
        ([1, 3], 0.0, 1.0, [0.25, 0.75]),  # no bound holds: proportional
        ([1, 99], 0.1, 0.9, [0.1, 0.9]),
        ([1, 1, 98], 0.0, 0.5, [0.25, 0.25, 0.5]),  # what the largest may not have, the others share
        ([0, 1, 3], 0.2, 1.0, [0.2, 0.2, 0.6]),
        ([0, 0, 0], 0.0, 1.0, [1 / 3] * 3),
        ([0, 0, 1], 0.0, 0.6, [0.2, 0.2, 0.6]),
        ([5], 1.0, 1.0, [1.0]),
        ([1, 2, 4], 1 / 3, 1 / 3, [1 / 3] * 3),
    ],
)
def test_shares_are_proportional_where_no_bound_holds_them(scores, min_share, max_share, expected):
    shares = bounded_shares(dict(enumerate(scores)), min_share=min_share, max_share=max_share)  # type: ignore[arg-type]
    assert list(shares.values()) == pytest.approx(expected, abs=1e-9)


@given(
    scores=st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=1, max_size=12),
    low=st.floats(0, 1),
    high=st.floats(0, 1),
    total=st.floats(0.01, 1),
)
def test_shares_are_bounded_add_up_and_keep_the_ratios_of_free_ones(scores, low, high, total):
    equal_share = total / len(scores)
    min_share, max_share = low * equal_share, equal_share + high * (1 - equal_share)
    shares = list(
        bounded_shares(dict(enumerate(scores)), min_share=min_share, max_share=max_share, total=total).values()
    )  # type: ignore[arg-type]
    assert math.fsum(shares) == pytest.approx(total, rel=1e-9)
    assert all(min_share - 1e-12 <= share <= max_share + 1e-12 for share in shares)
    for score, share in zip(scores, shares, strict=True):
        for other, others_share in zip(scores, shares, strict=True):
            if score > other:
                assert share >= others_share - 1e-12
            free = all(min_share + 1e-9 < value < max_share - 1e-9 for value in (share, others_share))
            if free and min(score, other) > 1e-6 * max(scores):
                assert share * other == pytest.approx(others_share * score, rel=1e-6)


@given(seed=st.integers(0, 10_000), sources=st.integers(3, 6), target=st.floats(0.1, 0.9))
def test_in_any_course_of_rewards_shares_add_up_to_one_within_the_bounds(seed, sources, target):
    rng = random.Random(seed)
    names = [f"s{index}" for index in range(sources)]
    config = Adapting(adapt="success", least=0.05, most=0.7, target=target, momentum=rng.choice([0.0, 0.5, 0.95]))
    adaptive = AdaptiveShares(config, {name: rng.choice([0.1, 1, 5]) for name in names})
    for _ in range(30):
        adaptive.observe([group(rng.choice(names), *(rng.choice([0, 0, 1, -3, 8, 0.5]) for _ in range(4)))])
        if rng.random() < 0.1 and len(adaptive.pinned) < 2:
            adaptive.pin(rng.choice(names[:2]), rng.choice([0, 0.01, 0.3, 0.4]))
        shares = adaptive.shares()
        assert math.fsum(shares.values()) == pytest.approx(1)
        assert all(shares[name] == share for name, share in adaptive.pinned.items())
        if not adaptive.pinned:
            assert all(0.05 - 1e-12 <= share <= 0.7 + 1e-12 for share in shares.values())


def test_half_solved_sources_grow_and_others_fall_to_the_minimum():
    adaptive_mixture = mixture(hard=1, right=1, easy=1)
    adaptive_mixture.adapt(SUCCESS)
    assert adaptive_mixture.shares == pytest.approx({"hard": 1 / 3, "right": 1 / 3, "easy": 1 / 3})
    assert adaptive_mixture.metrics()["data/mixture_shift"] == 0
    for _ in range(20):
        adaptive_mixture.observe([group("hard", 0, 0), group("right", 0, 1), group("easy", 1, 1)])
    assert adaptive_mixture.shares == pytest.approx({"hard": 0.05, "right": 0.9, "easy": 0.05})
    assert adaptive_mixture.metrics()["data/mixture_shift"] == pytest.approx(0.9 - 1 / 3)


def test_mixed_always_and_never_solved_tasks_give_nothing_to_learn():
    adaptive_mixture = mixture(split=1, right=1)
    adaptive_mixture.adapt(SUCCESS)
    for _ in range(20):
        adaptive_mixture.observe(
            [group("split", 0, 0), group("split", 1, 1), group("right", 0, 1), group("right", 0, 1)]
        )
    assert adaptive_mixture.shares["split"] == pytest.approx(0.1), (
        "their mean reward is 0.5, too; the other has its most"
    )


@pytest.mark.parametrize(("target", "more"), [(0.25, "quarter"), (0.75, "most")])
def test_the_target_is_where_a_source_has_its_largest_share(target: float, more: str):
    adaptive_mixture = mixture(quarter=1, most=1)
    adaptive_mixture.adapt(Adapting(adapt="success", target=target, momentum=0.0))
    adaptive_mixture.observe([group("quarter", 0, 0, 0, 1), group("most", 0, 1, 1, 1)])
    assert adaptive_mixture.shares[more] == max(adaptive_mixture.shares.values()) > 0.5


def test_a_share_set_by_hand_stays_until_adapt_is_set_again():
    adaptive_mixture, heard = mixture(a=1, b=1, c=1), []
    adaptive_mixture.changed.add(heard.append)
    adaptive_mixture.adapt(SUCCESS)
    adaptive_mixture["a"] = 0.02  # the hand may pass the bounds
    adaptive_mixture.observe([group("b", 0, 1), group("c", 0, 0)])
    assert adaptive_mixture.shares["a"] == pytest.approx(0.02)
    assert adaptive_mixture.shares["b"] > adaptive_mixture.shares["c"]
    assert "set by hand" in repr(adaptive_mixture)
    adaptive_mixture.adapt(SUCCESS)
    adaptive_mixture.observe([group("a", 0, 0)])
    assert adaptive_mixture.shares["a"] >= 0.05
    adaptive_mixture.adapt(Adapting())
    before = adaptive_mixture.shares
    adaptive_mixture.observe([group("b", 0, 0), group("c", 0, 1)])
    assert adaptive_mixture.shares == before
    adapts = "mixture adapts: shares by success, between 0.05 and 0.9, target 0.5"
    assert heard == [adapts, "mixture a 0.333333 -> 0.02", adapts, "mixture keeps its current weights"]


@pytest.mark.parametrize("share", [1.5, -0.1, 0.6])
def test_a_share_that_is_not_there_to_give_is_refused(share: float):
    adaptive_mixture = mixture(a=1, b=1)
    adaptive_mixture.adapt(SUCCESS)
    adaptive_mixture["a"] = 0.5
    with pytest.raises(TaskError, match="the share of 'b' is set to"):
        adaptive_mixture["b"] = share
    assert adaptive_mixture.shares == pytest.approx({"a": 0.5, "b": 0.5})


def test_a_small_share_that_changes_often_still_gets_its_turn():
    adaptive_mixture = mixture(a=1, b=1)
    adaptive_mixture.adapt(Adapting(adapt="success", least=0.05, most=0.95))
    given_out = 0
    for _ in range(400):
        order = adaptive_mixture.source_order(4)
        adaptive_mixture.observe([group(name, *((0, 1) if name == "a" else (0, 0))) for name in order])
        given_out += order.count("b")
    assert 400 * 4 * 0.05 <= given_out <= 400 * 4 * 0.1


def test_a_source_whose_weight_is_zero_stays_out():
    adaptive_mixture = mixture(a=1, b=1, c=0)
    adaptive_mixture.adapt(SUCCESS)
    assert adaptive_mixture.shares == pytest.approx({"a": 0.5, "b": 0.5, "c": 0.0})


def test_a_restored_mixture_continues_adapting_from_its_state():
    adaptive_mixture, resumed = mixture(a=2, b=1, c=1), mixture(a=2, b=1, c=1)
    adaptive_mixture.adapt(SUCCESS)
    adaptive_mixture["c"] = 0.25
    adaptive_mixture.observe([group("a", 0, 1), group("b", 1, 1)])
    resumed.restore(json.loads(json.dumps(adaptive_mixture.state())))
    for source_mixture in (adaptive_mixture, resumed):
        source_mixture.observe([group("a", 1, 1), group("b", 0, 1), group("c", 0, 1)])
    assert resumed.shares == adaptive_mixture.shares
    assert repr(resumed) == repr(adaptive_mixture)
    assert resumed.state() == adaptive_mixture.state()


@pytest.mark.parametrize(
    "change",
    [
        {"rates": {"a": 0.5}},
        {"config": {"adapt": "success", "speed": 3}},
        {"pinned": {"z": 1}},
        {"signals": {"a": "much", "b": 1}},
        {"base": {"a": math.nan, "b": 1.0}},
    ],
)
def test_a_crafted_state_is_refused(change: dict[str, object]):
    adaptive_mixture = mixture(a=1, b=1)
    adaptive_mixture.adapt(SUCCESS)
    state = adaptive_mixture.state()
    state["adaptive"] |= change  # type: ignore[operator]
    with pytest.raises(TaskError, match=r"the saved (mixture|state)"):
        mixture(a=1, b=1).restore(state)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"least": -0.1}, "least"),
        ({"most": 1.5}, "most"),
        ({"least": 0.5, "most": 0.4}, "least"),
        ({"target": 0.0}, "target"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_settings_that_cannot_be_name_their_flag(settings: dict[str, float], flag: str):
    with pytest.raises(ConfigError, match=f"--mixture.{flag}"):
        Adapting(**settings)  # type: ignore[arg-type]


def test_bounds_that_leave_no_room_for_the_sources_are_refused():
    for min_share, max_share in ((0.4, 0.9), (0.05, 0.3)):
        with pytest.raises(ConfigError, match="3 sources cannot each have a share between"):
            mixture(a=1, b=1, c=1).adapt(Adapting(adapt="success", least=min_share, most=max_share))
