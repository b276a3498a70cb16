"""avg@k, pass@k, maj@k and paired differences: hand-worked numbers, and references that are computed otherwise."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from benchmarks.intervals import coverage
from forge_rl.algorithms.evaluation import avg_at_k, compare_paired, maj_at_k, mean_over_tasks, pass_at_k


def test_a_score_and_its_error_count_tasks_and_not_episodes() -> None:
    # Means of the tasks: 0.5, 1, 0; their standard deviation is 0.5.
    score = avg_at_k([[0, 1], [1, 1], [0, 0]])
    assert score.value == 0.5
    assert score.stderr == pytest.approx(0.5 / math.sqrt(3))
    alike = avg_at_k([[reward] * 100 for reward in (0.0, 1.0, 1.0)])
    assert alike == avg_at_k([[0.0], [1.0], [1.0]]), "a hundred equal episodes say no more than one"


def test_failed_tasks_are_left_out_and_a_single_task_has_no_error() -> None:
    assert avg_at_k([[1.0], [], [0.0]]).value == 0.5
    one, none = avg_at_k([[0.25, 0.75]]), mean_over_tasks([])
    assert (one.value, math.isnan(one.stderr)) == (0.5, True)
    assert math.isnan(none.value)


def test_pass_at_k_by_hand() -> None:
    # 4 episodes, 1 success: of the 6 pairs, 3 hold it. No success: 0. 3 successes: no pair is without.
    assert pass_at_k([[1, 0, 0, 0]], 2).value == 0.5
    assert pass_at_k([[0, 0, 0, 0]], 2).value == 0.0
    assert pass_at_k([[1, 1, 1, 0]], 2).value == 1.0
    score = pass_at_k([[1, 0, 0, 0], [1, 1, 1, 0]], 2)
    assert score.value == 0.75
    assert score.stderr == pytest.approx(0.25)  # 0.5 / sqrt(2) / sqrt(2)
    assert pass_at_k([[0.5, 0.2]], 1, success=0.5).value == 0.5
    assert math.isnan(pass_at_k([[1.0]], 2).value), "a task with fewer episodes says nothing of k"


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_episodes(k: int) -> None:
    rng = random.Random(k)
    for _ in range(20):
        rewards = [float(rng.random() < 0.4) for _ in range(6)]
        choices = list(itertools.combinations(rewards, k))
        assert pass_at_k([rewards], k).value == pytest.approx(statistics.fmean(max(each) for each in choices))


def test_maj_at_k_takes_the_most_frequent_answer_and_shares_between_equals() -> None:
    assert maj_at_k([[1, 0, 1]], [["5", "6", " 5"]]).value == 1.0
    assert maj_at_k([[1, 0, 0]], [["5", "6", "6"]]).value == 0.0
    assert maj_at_k([[1, 0]], [["5", "6"]]).value == 0.5
    assert maj_at_k([[0, 0, 1]], [["", "", "5"]]).value == 1.0, "no answer has no vote"
    assert maj_at_k([[0.0, 0.5]], [["", ""]]).value == 0.25
    score = maj_at_k([[1, 1, 0], [0, 0, 1]], [["5", "5", "6"], ["1", "1", "2"]])
    assert (score.value, score.stderr) == (0.5, pytest.approx(0.5))
    assert math.isnan(maj_at_k([[]], [[]]).value)


def test_a_comparison_is_paired_and_counts_won_and_lost_tasks() -> None:
    first, second = [0.0, 0.0, 1.0, 0.5], [1.0, 0.0, 0.0, 1.0]
    found = compare_paired(first, second)
    assert (found.difference, found.won, found.lost, found.tasks) == (0.125, 2, 1, 4)
    turned = compare_paired(second, first)
    assert (turned.difference, turned.won, turned.lost) == (-0.125, 1, 2)
    assert (turned.low, turned.high) == (-found.high, -found.low)
    # The same differences have the same interval, however different the tasks are: that is what pairs are for.
    levels = compare_paired([0.0, 5.0, 9.0], [1.0, 6.0, 10.0])
    assert levels == compare_paired([2.0, 2.0, 2.0], [3.0, 3.0, 3.0])


def test_paired_intervals_are_bonett_price_or_normal_for_many_tasks() -> None:
    # 20 tasks: 4 won, 1 lost; the adjusted shares are 5/22 and 2/22
    found = compare_paired([0.0] * 4 + [1.0] + [0.0] * 15, [1.0] * 4 + [0.0] * 16)
    half = 1.959964 * math.sqrt((5 / 22 + 2 / 22 - (3 / 22) ** 2) / 22)
    assert (found.low, found.high) == (pytest.approx(3 / 22 - half), pytest.approx(3 / 22 + half))

    rng = random.Random(5)
    first = [rng.random() for _ in range(400)]
    second = [score + rng.gauss(0.1, 0.5) for score in first]
    paired = [b - a for a, b in zip(first, second, strict=True)]
    half = 1.96 * statistics.stdev(paired) / math.sqrt(len(paired))
    found = compare_paired(first, second)
    assert found.low == pytest.approx(statistics.fmean(paired) - half, abs=0.004)
    assert found.high == pytest.approx(statistics.fmean(paired) + half, abs=0.004)


def test_intervals_of_equal_scores_have_a_width_within_bounds() -> None:
    never, always = mean_over_tasks([0.0] * 10), mean_over_tasks([1.0] * 10)
    assert (never.stderr, never.low, always.high) == (0.0, 0.0, 1.0)
    assert 0.2 < never.high < 0.45, "ten failures leave room for a chance of a quarter"
    assert always.low == pytest.approx(1 - never.high)
    alike = compare_paired([0.0] * 10, [0.0] * 10)
    assert 0.02 < alike.high == -alike.low < 0.3
    assert compare_paired([0.0] * 3, [1.0] * 3).high == 1.0
    rewards = mean_over_tasks([-5.0, 3.0, 9.0])
    assert rewards.high == pytest.approx(rewards.value + 1.959964 * rewards.stderr), "no share: nothing bounds it"


@pytest.mark.parametrize("tasks", [10, 30])
@pytest.mark.parametrize("chance", [0.01, 0.5, 0.99])
def test_intervals_cover_rare_and_common_successes_of_few_tasks(tasks: int, chance: float) -> None:
    drawn = np.random.default_rng(1)
    for episodes, varies in ((1, False), (4, True)):
        shares = coverage(tasks, chance, episodes, varies=varies, draws=300, random=drawn)
        assert min(shares) > 0.85, (episodes, shares)
