"""Scheduler: groups that are uniform, fail or cannot be run are replaced, and sources that only fail are named."""

from __future__ import annotations

import random

import pytest

from forge_rl.errors import ContextError, InfrastructureError, TaskError
from forge_rl.types import Outcome
from tests.test_scheduler import begin, end, names, schedule


def test_a_uniform_group_is_replaced_within_its_source_and_place():
    scheduler = schedule(max_lag=1, dynamic_sampling=True)
    episodes = [episode for episode in begin(scheduler) if episode.group.batch == 0]
    for episode in episodes:
        end(scheduler, episode, 1.0 if episode.group.task.id == "a2" else None)
    assert scheduler.planner.pop_batch() is None
    retries = begin(scheduler)
    assert [episode.place[:3] for episode in retries] == [(0, 1, 1), (0, 1, 1)]
    for episode in retries:
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a5", "b1"]
    assert scheduler.planner.replaced == {"uniform": 1}


@pytest.mark.parametrize("failed", [Outcome.ENVIRONMENT_ERROR, Outcome.INFRASTRUCTURE_ERROR])
def test_a_failed_episode_is_retried_then_its_group_is_replaced(failed: Outcome):
    scheduler = schedule(max_lag=0, retries=1)
    episodes = begin(scheduler)
    failing_episode = episodes[0]
    end(scheduler, failing_episode, outcome=failed)
    assert begin(scheduler) == [failing_episode]
    assert failing_episode.place == (0, 0, 0, 0, 1)
    end(scheduler, failing_episode, outcome=failed)
    assert scheduler.pop_cancelled() == [episodes[1]]
    assert scheduler.states["decoding"] == 4
    for episode in episodes[2:] + begin(scheduler):
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a3", "a2", "b1"]
    assert scheduler.outcomes == {failed: 2, "completed": 6}


def test_a_run_stops_once_if_infrastructure_fails_too_often():
    def attempts(failed: list[bool], **policy: object) -> None:
        scheduler, running = schedule(groups=1, episodes=128, max_lag=0, retries=999, **policy), []
        for is_failed in failed:
            running += begin(scheduler)
            end(scheduler, running.pop(), outcome=Outcome.INFRASTRUCTURE_ERROR if is_failed else Outcome.COMPLETED)

    attempts([True] * 255)
    attempts([False] * 100 + [True] * 200, max_infrastructure_failures=1)
    attempts([False] * 127 + [True] * 128)
    with pytest.raises(InfrastructureError, match=r"156 of the latest 256 attempts .*; the last: broken") as caught:
        attempts([False] * 100 + [True] * 156)
    assert "--schedule.max-infrastructure-failures is 0.5" in caught.value.hint


def test_a_source_that_only_fails_ends_the_run_with_its_name():
    scheduler = schedule(max_lag=0, retries=0)

    def fail() -> None:
        for episode in begin(scheduler):
            if episode.group.task.source == "b" and not episode.group.dropped:
                end(scheduler, episode, outcome=Outcome.JUDGE_ERROR)

    for _ in range(4 * 3):
        fail()
    with pytest.raises(
        TaskError, match=r"source b yielded 13 unusable groups in a row; .*judge_error: broken"
    ) as caught:
        fail()
    assert "fix the reward function" in caught.value.hint
    fail()  # the count has begun again
    for episode in begin(scheduler) + [e for g in scheduler.planner.groups() for e in g.episodes]:
        if episode.state == "decoding":
            end(scheduler, episode)
    assert len(names(scheduler.planner.pop_batch())) == 3, "once it is mended the run goes on"


def test_dynamic_sampling_survives_where_most_groups_teach_nothing():
    for seed in range(2):
        rng = random.Random(seed)
        scheduler = schedule(groups=8, max_lag=1, dynamic_sampling=True)
        batches = 0
        while batches < 6:
            for episode in begin(scheduler) or [e for g in scheduler.planner.groups() for e in g.episodes]:
                if episode.state == "decoding":
                    first = episode.group.results
                    teaches = first and rng.random() > 0.95
                    end(scheduler, episode, 1.0 if teaches else 0.0)
            if scheduler.planner.pop_batch() is not None:
                batches += 1
                scheduler.planner.set_versions(batches, batches)


def test_a_source_of_nothing_but_equal_rewards_is_named():
    scheduler = schedule(max_lag=0, dynamic_sampling=True, max_replaced=2)

    def play() -> None:
        for _ in range(100):
            for episode in begin(scheduler):
                end(scheduler, episode, 1.0)
            assert scheduler.planner.pop_batch() is None

    with pytest.raises(
        TaskError, match=r"yielded 7 unusable groups in a row; .*all rewards of the last one were 1"
    ) as caught:
        play()
    assert "--schedule.max-replaced" in caught.value.hint


def test_a_uniform_batch_is_delivered_where_groups_are_not_replaced():
    scheduler = schedule(max_lag=0)
    for episode in begin(scheduler):
        end(scheduler, episode, 0.5)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]


def test_a_task_that_is_too_long_is_replaced_at_once_and_counted():
    scheduler = schedule(max_lag=0)
    first, *later_episodes = begin(scheduler)
    scheduler.finish_turn(first)
    scheduler.skip(first, ContextError("task a1 is too long"))
    for episode in later_episodes[1:] + begin(scheduler):
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a3", "a2", "b1"]
    assert scheduler.planner.replaced == {"too_long": 1}
