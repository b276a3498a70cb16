"""Scheduler: when evaluations begin and decode among the batches of training."""

from __future__ import annotations

from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from tests.test_scheduler import Drawn, begin, evaluate, kinds, result, schedule


def test_an_evaluation_starts_between_the_batch_and_work_ahead():
    scheduler = schedule(groups=2, episodes=2, max_lag=2)
    evaluate(scheduler, 3)
    assert kinds(begin(scheduler)) == [0] * 4 + ["eval"] * 3 + [1] * 4 + [2] * 4
    # Where nothing of a batch may start, it goes on: it has no lag.
    evaluate(scheduler, 2)
    assert kinds(begin(scheduler)) == ["eval"] * 2


def test_evaluations_decode_between_the_batch_and_work_ahead():
    scheduler = schedule(groups=1, episodes=2, max_lag=2)
    evaluate(scheduler, 2)
    episodes = scheduler.pop_starts()
    scheduler.capacity.set_engines({0: 1})
    order = []
    for episode in reversed(episodes):
        scheduler.request_decode(episode)
    for _ in range(8):
        (granted,) = scheduler.pop_grants()
        order.append(granted)
        scheduler.finish_turn(granted)
        if len(order) == 6:  # the second batch is awaited now, and a new evaluation comes after it
            for episode in order[:2]:
                scheduler.record_result(episode, result(episode, float(episode.index)))
            assert scheduler.planner.pop_batch() is not None
            for riding in order[2:4]:
                scheduler.request_decode(riding)
    assert kinds(order) == [0, 0, "eval", "eval", 1, 1, "eval", "eval"]


def test_an_evaluation_pauses_with_batches_unless_it_is_awaited():
    now = [0.0]
    scheduler = Scheduler(ScheduleConfig(max_lag=1), groups=2, episodes=2, tasks=Drawn(), clock=lambda: now[0])
    scheduler.capacity.set_engines({0: 4})
    evaluate(scheduler, 4)
    started = scheduler.pop_starts()
    assert kinds(started) == [0, 0, 0, 0, "eval"]
    batch, (riding,) = started[:4], started[4:]
    began_s = scheduler.own_s(riding)
    for episode in started:
        scheduler.request_decode(episode)
    assert scheduler.pop_grants() == batch
    now[0] = 5.0
    scheduler.finish_turn(batch[0])
    assert scheduler.pop_grants() == [riding]
    now[0] = 7.0
    assert scheduler.own_s(riding) - began_s == 2.0, "a wait for an engine is not its own time"
    scheduler.finish_turn(riding)
    scheduler.capacity.set_paused(True)
    scheduler.request_decode(batch[0])
    scheduler.request_decode(riding)
    now[0] = 10.0
    assert (scheduler.pop_starts(), scheduler.pop_grants(), scheduler.own_s(riding) - began_s) == ([], [], 2.0)
    # Awaited, it goes on in the pause, before all else; nothing of a batch does, and what is paused holds up no start.
    scheduler.await_evaluation(True)
    assert scheduler.pop_grants() == [riding]
    now[0] = 11.0
    assert scheduler.own_s(riding) - began_s == 3.0
    rest = scheduler.pop_starts()
    assert kinds(rest) == ["eval"] * 3
    scheduler.finish_turn(riding)
    for episode in rest:
        scheduler.request_decode(episode)
        assert scheduler.pop_grants() == [episode]
        scheduler.finish_turn(episode)
    for episode in (riding, *rest):
        scheduler.record_result(episode, result(episode, 1.0))
    scheduler.await_evaluation(False)
    assert (scheduler.pop_starts(), scheduler.pop_grants()) == ([], [])
    scheduler.capacity.set_paused(False)
    assert scheduler.pop_grants() == [batch[0]]


def test_an_evaluation_whose_engine_dies_goes_first():
    scheduler = schedule(groups=1, episodes=2, max_lag=1)
    evaluate(scheduler, 1)
    *batch, riding = begin(scheduler)[:3]
    scheduler.capacity.set_engines({0: 1})
    for episode in (*batch, riding):
        scheduler.finish_turn(episode, interrupted=episode is riding)
        scheduler.request_decode(episode)
    assert scheduler.capacity.choose(()) is None, "work ahead has the engine"
    scheduler.capacity.set_engines({0: 3})
    assert scheduler.pop_grants() == [riding]
    scheduler.finish_turn(riding)
    scheduler.restart(riding)
    scheduler.capacity.set_engines({0: 100})
    assert riding in scheduler.pop_starts()


def test_an_interrupted_evaluation_goes_on_in_a_pause_once_it_is_awaited() -> None:
    scheduler = schedule(groups=1, episodes=2, max_lag=0)
    evaluate(scheduler, 1)
    *batch, riding = begin(scheduler)
    scheduler.capacity.set_engines({})  # its engine has died
    scheduler.finish_turn(riding, interrupted=True)
    scheduler.request_decode(riding)
    scheduler.finish_turn(batch[0], interrupted=True)
    scheduler.request_decode(batch[0])
    scheduler.capacity.set_engines({1: 4})
    scheduler.capacity.set_paused(True)
    assert scheduler.pop_grants() == []
    scheduler.await_evaluation(True)
    assert scheduler.pop_grants() == [riding]


def test_a_pause_of_everything_holds_an_awaited_evaluation() -> None:
    scheduler = schedule(groups=1, episodes=2, max_lag=0)
    evaluate(scheduler, 2)
    first, second = begin(scheduler)[2:]
    scheduler.capacity.set_paused(True)
    scheduler.await_evaluation(True)
    for riding in (first, second):
        scheduler.finish_turn(riding)
    scheduler.request_decode(first)  # it waits before the user pauses, the other one after
    scheduler.await_evaluation(False)
    scheduler.request_decode(second)
    assert scheduler.pop_grants() == []
    scheduler.await_evaluation(True)
    assert scheduler.pop_grants() == [first, second]
