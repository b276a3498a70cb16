"""Turns that decode without queueing: the same as queueing them and granting at once, and never before others."""

from __future__ import annotations

import random

import pytest

from forge_rl.rollout.state import InflightEpisode
from tests.test_scheduler import evaluate, result, schedule


def history(seed: int, *, at_once: bool) -> list[object]:
    """Let random episodes of a batch decode and end; returns which engine each turn got, and the batches."""
    drawn, events = random.Random(seed), list[object]()
    scheduler = schedule(max_lag=2)
    scheduler.capacity.set_engines({0: 3, 1: 2})
    asking, decoding = scheduler.pop_starts(), list[InflightEpisode]()

    def note(episode: InflightEpisode) -> None:
        decoding.append(episode)
        events.append((episode.group.task.id, episode.index, episode.engine, episode.ticket))

    for _ in range(200):
        scheduler.capacity.set_paused(drawn.random() < 0.1)
        if asking and (drawn.random() < 0.6 or not decoding):
            episode = asking.pop(drawn.randrange(len(asking)))
            if at_once and scheduler.decode_at_once(episode):
                note(episode)
            else:
                scheduler.request_decode(episode)
        elif decoding:
            episode = decoding.pop(drawn.randrange(len(decoding)))
            scheduler.finish_turn(episode, interrupted=drawn.random() < 0.2)
            if drawn.random() < 0.5:
                asking.append(episode)
            else:
                scheduler.record_result(episode, result(episode, drawn.random()))
        for episode in scheduler.pop_grants():
            note(episode)
        if (batch := scheduler.planner.pop_batch()) is not None:
            events.append([group.task.id for group in batch])
            version = scheduler.planner.published + 1
            scheduler.planner.set_versions(version, version)
        asking += scheduler.pop_starts()
    return events


@pytest.mark.parametrize("seed", range(20))
def test_turns_that_decode_at_once_get_the_engines_that_the_queue_gives(seed: int) -> None:
    events = history(seed, at_once=True)
    assert len(events) > 50
    assert events == history(seed, at_once=False)


def test_a_turn_decodes_at_once_while_an_engine_is_free_and_nobody_waits() -> None:
    scheduler = schedule(max_lag=0)
    scheduler.capacity.set_engines({0: 2, 1: 1})
    first, second, third, fourth, *_ = scheduler.pop_starts()
    assert [scheduler.decode_at_once(episode) for episode in (first, second, third, fourth)] == [
        True,
        True,
        True,
        False,
    ]
    assert (first.state, first.engine, first.group.home, first.ticket) == ("decoding", 0, 0, 1)
    assert sorted((first.engine, second.engine, third.engine)) == [0, 0, 1]
    assert (fourth.state, fourth.ticket) == ("in_env", 0), "it is as before"
    scheduler.request_decode(fourth)
    scheduler.finish_turn(first)
    assert not scheduler.decode_at_once(first), "another one waits for this engine"
    assert scheduler.pop_grants() == [fourth]


def test_an_interrupted_episode_that_decodes_at_once_is_one_no_more() -> None:
    scheduler = schedule(max_lag=0)
    episode, *_ = scheduler.pop_starts()
    assert scheduler.decode_at_once(episode)
    scheduler.finish_turn(episode, interrupted=True)
    assert scheduler.decode_at_once(episode)
    assert not episode.interrupted


@pytest.mark.parametrize("awaited", [False, True])
def test_nothing_decodes_at_once_while_paused_or_while_an_evaluation_waits(awaited: bool) -> None:
    scheduler = schedule(max_lag=0)
    evaluate(scheduler, 1)
    *episodes, ours = scheduler.pop_starts()
    assert ours.group.task.id == "e0"
    scheduler.capacity.set_paused(True)
    assert not scheduler.decode_at_once(episodes[0])
    scheduler.await_evaluation(awaited)
    scheduler.request_decode(ours)
    scheduler.capacity.set_paused(False)
    assert not scheduler.decode_at_once(episodes[0]), "the evaluation's is first"


def test_a_dropped_group_decodes_no_more() -> None:
    scheduler = schedule(max_lag=0)
    episode, sibling, *_ = scheduler.pop_starts()
    scheduler.decode_at_once(sibling)
    scheduler.finish_turn(sibling)
    scheduler.planner.replace(episode.group, "failed", "it failed", "")
    assert episode.group.dropped
    assert not scheduler.decode_at_once(sibling)
    scheduler.record_result(sibling, result(sibling, 1.0))  # changes nothing
