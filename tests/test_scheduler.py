"""Scheduler and batch planner: bounds in any order of events, exact mixtures, capacity, and the order of starts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.schedules import Config, simulate
from benchmarks.virtual_time import run
from forge_rl.errors import ConfigError, ContextError, InfrastructureError, TaskError
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import EVALUATION, GroupState, InflightEpisode, ScheduleConfig
from forge_rl.types import Episode, Group, Outcome, Sampling, Score, Task, Turn


class Drawn:
    """Tasks without end, sources in turn: two of a, one of b."""

    def __init__(self) -> None:
        self.drawn: Counter[str] = Counter()
        self.observed: list[Group] = []
        self._turn = 0

    def source_order(self, groups: int) -> list[str]:
        found = ["aab"[(self._turn + place) % 3] for place in range(groups)]
        self._turn += groups
        return found

    def draw_from(self, source: str) -> Task:
        self.drawn[source] += 1
        return Task(id=f"{source}{self.drawn[source]}", source=source, messages=())

    def observe(self, groups: list[Group]) -> None:
        self.observed += groups


def result(episode: InflightEpisode, reward: float, outcome: Outcome = Outcome.COMPLETED, tokens: int = 1) -> Episode:
    turn = Turn(prompt_ids=(), token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, versions=(0,) * tokens, text="")
    return Episode(task=episode.group.task, turns=(turn,), score=Score(total=reward), outcome=outcome, problem="broken")


def schedule(*, groups: int = 3, episodes: int = 2, tasks: Drawn | None = None, **policy: object) -> Scheduler:
    scheduler = Scheduler(
        ScheduleConfig(**policy),  # type: ignore[arg-type]
        groups=groups,
        episodes=episodes,
        tasks=tasks or Drawn(),
        clock=lambda: 0.0,
    )
    scheduler.capacity.set_engines({0: 100})
    return scheduler


def begin(scheduler: Scheduler) -> list[InflightEpisode]:
    """Start the episodes that may start, and let them decode."""
    started = scheduler.pop_starts()
    for episode in started:
        scheduler.request_decode(episode)
    scheduler.pop_grants()
    return started


def end(scheduler: Scheduler, episode: InflightEpisode, reward: float | None = None, **more: object) -> None:
    scheduler.finish_turn(episode)
    scheduler.record_result(episode, result(episode, float(episode.index) if reward is None else reward, **more))  # type: ignore[arg-type]


def evaluate(scheduler: Scheduler, tasks: int, *, episodes: int = 1) -> Evaluation:
    """Overlap an evaluation with the batches."""
    named = [Task(id=f"e{number}", source="held", messages=()) for number in range(tasks)]
    evaluation = Evaluation({"held_out": named}, episodes=episodes, sampling=Sampling(max_tokens=4), version=0)
    scheduler.add_evaluation(evaluation.groups["held_out"])
    return evaluation


def kinds(episodes: list[InflightEpisode]) -> list[object]:
    """Batch of each episode, or "eval"."""
    return ["eval" if episode.group.batch == EVALUATION else episode.group.batch for episode in episodes]


def names(groups: list[GroupState] | None) -> list[str]:
    assert groups is not None
    return [group.task.id for group in groups]


def test_a_batch_is_its_own_groups_in_the_order_of_the_plan_whatever_ends_first():
    scheduler = schedule(max_lag=0)
    for episode in reversed(begin(scheduler)):
        assert scheduler.planner.pop_batch() is None
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]


def test_work_ahead_begins_while_a_batch_waits_but_no_further_than_the_lag():
    scheduler = schedule(max_lag=2)
    started = begin(scheduler)
    assert Counter(episode.group.batch for episode in started) == {0: 6, 1: 6, 2: 6}
    straggler, *others = started
    for episode in others:
        end(scheduler, episode)
    assert scheduler.planner.pop_batch() is None  # the later batches are complete, and wait
    assert begin(scheduler) == []
    assert "batch 0 lacks 1 episodes: 1 decoding" in scheduler.describe_missing()
    end(scheduler, straggler)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]
    assert begin(scheduler) == []  # batch 3 may begin only once the engines serve version 1
    scheduler.planner.set_versions(1, 1)
    assert {episode.group.batch for episode in begin(scheduler)} == {3}


@pytest.mark.parametrize("max_lag", [0, 1])
def test_batches_that_are_trained_without_a_publish_go_on(max_lag: int):
    scheduler = schedule(max_lag=max_lag)
    for _ in range(4):
        scheduler.planner.await_batch()
        for episode in begin(scheduler):
            end(scheduler, episode)
        assert scheduler.planner.pop_batch() is not None
        assert len(list(scheduler.planner.groups())) <= 3 * max_lag


def test_two_publishes_a_batch_keep_the_lag_and_planned_work_bounded():
    scheduler = schedule(max_lag=1)
    started: dict[GroupState, int] = {}
    for batch in range(8):
        scheduler.planner.set_versions(2 * batch, 2 * batch)
        scheduler.planner.await_batch()
        while (taken := scheduler.planner.pop_batch()) is None:
            episodes = begin(scheduler)
            started |= {each.group: min(started.get(each.group, 2 * batch), 2 * batch) for each in episodes}
            for group in scheduler.planner.incomplete_groups():
                for episode in group.episodes:
                    if episode.state == "decoding":
                        end(scheduler, episode)
        assert all(2 * batch - started[group] <= 1 for group in taken)
        assert len(list(scheduler.planner.groups())) <= 3
    # What was begun ahead before the pace was known is dropped; from then on nothing is begun that would be too old.
    assert scheduler.planner.replaced == {"aged": 3}


def test_engines_that_serve_too_old_a_version_start_nothing_and_this_is_said():
    scheduler = schedule(max_lag=1)
    scheduler.planner.set_versions(0, 2)
    scheduler.planner.await_batch()
    assert begin(scheduler) == []
    assert "the engines serve version 0 but the latest is 2: load it" in scheduler.describe_missing()
    scheduler.planner.set_versions(1, 2)
    assert {episode.group.batch for episode in begin(scheduler)} == {0}


def test_synchronous_begins_nothing_of_the_next_batch():
    scheduler = schedule(kind="synchronous", max_lag=3)
    episodes = begin(scheduler)
    assert {episode.group.batch for episode in episodes} == {0}
    for episode in episodes:
        end(scheduler, episode)
    scheduler.planner.pop_batch()
    assert begin(scheduler) == []


def test_one_step_begins_the_next_batch_when_the_one_before_is_delivered():
    scheduler = schedule(kind="one_step")
    episodes = begin(scheduler)
    assert {episode.group.batch for episode in episodes} == {0}
    for episode in episodes:
        end(scheduler, episode)
    scheduler.planner.pop_batch()
    episodes = begin(scheduler)
    assert {episode.group.batch for episode in episodes} == {1}
    for episode in episodes:
        end(scheduler, episode)
    scheduler.planner.set_versions(0, 1)
    scheduler.planner.pop_batch()
    assert begin(scheduler) == []  # batch 2 would be two versions behind, until the engines have loaded version 1
    scheduler.planner.set_versions(1, 1)
    assert {episode.group.batch for episode in begin(scheduler)} == {2}


def test_asynchronous_takes_what_ends_first_but_waits_for_what_would_be_too_old():
    scheduler = schedule(kind="asynchronous", max_lag=1)
    episodes = begin(scheduler)
    assert len({episode.group for episode in episodes}) == 6
    for episode in episodes[6:]:
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a3", "a4", "b2"]
    scheduler.planner.set_versions(1, 1)
    fresh = begin(scheduler)
    for episode in fresh:
        end(scheduler, episode)
    # The first three groups started under version 0, and would be two steps behind later.
    assert scheduler.planner.pop_batch() is None
    for episode in episodes[:6]:
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]


def test_surplus_groups_are_carried_on_and_the_mixture_stays_exact():
    tasks = Drawn()
    scheduler = schedule(max_lag=2, over_sampling=2.0, tasks=tasks)
    episodes = begin(scheduler)
    first = [episode for episode in episodes if episode.group.batch == 0]
    assert Counter(episode.group.task.source for episode in first) == {"a": 8, "b": 4}
    slow = {first[0].group}
    for episode in first:
        if episode.group not in slow:
            end(scheduler, episode)
    assert Counter(group.task.source for group in scheduler.planner.pop_batch() or []) == {"a": 2, "b": 1}
    scheduler.planner.set_versions(1, 1)
    carried = [group for group in scheduler.planner.groups() if group.place[0] == 0]
    assert {group.batch for group in carried} == {1}
    assert slow <= set(carried)
    for episode in episodes + begin(scheduler):
        if episode.state == "decoding" and episode.group.batch == 1:
            end(scheduler, episode)
    taken = scheduler.planner.pop_batch() or []
    assert Counter(group.task.source for group in taken) == {"a": 2, "b": 1}
    assert set(carried) & set(taken)
    assert scheduler.planner.replaced == {}


def test_a_uniform_group_is_replaced_within_its_source_and_place():
    scheduler = schedule(max_lag=1, dynamic_sampling=True)
    episodes = [episode for episode in begin(scheduler) if episode.group.batch == 0]
    for episode in episodes:
        end(scheduler, episode, 1.0 if episode.group.task.id == "a2" else None)
    assert scheduler.planner.pop_batch() is None
    again = begin(scheduler)
    assert [episode.place[:3] for episode in again] == [(0, 1, 1), (0, 1, 1)]
    for episode in again:
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a5", "b1"]
    assert scheduler.planner.replaced == {"uniform": 1}


@pytest.mark.parametrize("failed", [Outcome.ENVIRONMENT_ERROR, Outcome.INFRASTRUCTURE_ERROR])
def test_a_failed_episode_starts_again_and_then_its_group_is_replaced_and_the_others_of_it_are_ended(failed: Outcome):
    scheduler = schedule(max_lag=0, retries=1)
    episodes = begin(scheduler)
    bad = episodes[0]
    end(scheduler, bad, outcome=failed)
    assert begin(scheduler) == [bad]
    assert bad.place == (0, 0, 0, 0, 1)
    end(scheduler, bad, outcome=failed)
    assert scheduler.pop_cancelled() == [episodes[1]]
    assert scheduler.states["decoding"] == 4
    for episode in episodes[2:] + begin(scheduler):
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a3", "a2", "b1"]
    assert scheduler.outcomes == {failed: 2, "completed": 6}


def test_a_run_whose_infrastructure_fails_past_a_share_of_the_latest_attempts_is_stopped_once():
    def attempts(failed: list[bool], **policy: object) -> None:
        scheduler, running = schedule(groups=1, episodes=128, max_lag=0, retries=999, **policy), []
        for each in failed:
            running += begin(scheduler)
            end(scheduler, running.pop(), outcome=Outcome.INFRASTRUCTURE_ERROR if each else Outcome.COMPLETED)

    attempts([True] * 255)
    attempts([False] * 100 + [True] * 200, max_infrastructure_failures=1)
    attempts([False] * 127 + [True] * 128)
    with pytest.raises(InfrastructureError, match=r"156 of the latest 256 attempts .*; the last: broken") as caught:
        attempts([False] * 100 + [True] * 156)
    assert "--schedule.max-infrastructure-failures is 0.5" in caught.value.hint


def test_a_source_that_only_fails_ends_the_run_with_its_name_and_what_to_mend():
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


def test_a_batch_of_equal_rewards_is_delivered_where_groups_are_not_replaced():
    scheduler = schedule(max_lag=0)
    for episode in begin(scheduler):
        end(scheduler, episode, 0.5)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]


def test_a_task_that_is_too_long_is_replaced_at_once_and_counted():
    scheduler = schedule(max_lag=0)
    first, *others = begin(scheduler)
    scheduler.finish_turn(first)
    scheduler.skip(first, ContextError("task a1 is too long"))
    for episode in others[1:] + begin(scheduler):
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a3", "a2", "b1"]
    assert scheduler.planner.replaced == {"too_long": 1}


def test_engines_get_no_more_than_their_budgets_and_an_episode_comes_back_to_its_own():
    scheduler = schedule(groups=3, episodes=4, max_lag=1)
    scheduler.capacity.set_engines({3: 2, 5: 4})
    episodes = begin(scheduler)
    assert Counter(episode.engine for episode in episodes if episode.state == "decoding") == {3: 2, 5: 4}
    first = next(episode for episode in episodes if episode.engine == 3)
    scheduler.finish_turn(first)
    scheduler.request_decode(first)
    assert first in scheduler.pop_grants()
    assert first.engine == 3
    scheduler.capacity.set_engines({5: 4})
    scheduler.finish_turn(first, interrupted=True)
    scheduler.request_decode(first)
    assert scheduler.pop_grants() == []
    scheduler.finish_turn(next(episode for episode in episodes if episode.engine == 5 and episode.state == "decoding"))
    assert scheduler.pop_grants() == [first]  # before those that waited for longer
    assert first.engine == 5


def test_within_a_batch_the_longest_expected_begin_first():
    scheduler = schedule(max_lag=1)
    for episode in begin(scheduler):
        if episode.group.batch == 0:
            end(scheduler, episode, tokens=50 if episode.group.task.source == "b" else 5)
    scheduler.planner.pop_batch()
    scheduler.planner.set_versions(1, 1)
    assert [episode.group.task.source for episode in begin(scheduler)] == ["b", "b", "a", "a", "a", "a"]


def test_a_pause_holds_back_all_but_evaluations():
    scheduler = schedule(max_lag=0)
    episodes = scheduler.pop_starts()
    scheduler.capacity.set_paused(True)
    assert scheduler.pop_starts() == []
    scheduler.request_decode(episodes[0])
    assert scheduler.pop_grants() == []
    evaluate(scheduler, 1)
    scheduler.await_evaluation(True)
    (tested,) = scheduler.pop_starts()
    scheduler.request_decode(tested)
    assert scheduler.pop_grants() == [tested]
    scheduler.capacity.set_paused(False)
    assert scheduler.pop_grants() == [episodes[0]]


def test_an_evaluation_starts_after_the_awaited_batch_and_before_work_ahead():
    scheduler = schedule(groups=2, episodes=2, max_lag=2)
    evaluate(scheduler, 3)
    assert kinds(begin(scheduler)) == [0] * 4 + ["eval"] * 3 + [1] * 4 + [2] * 4
    # Where nothing of a batch may start, it goes on: it has no lag.
    evaluate(scheduler, 2)
    assert kinds(begin(scheduler)) == ["eval"] * 2


def test_an_evaluation_decodes_after_the_awaited_batch_and_before_work_ahead_whatever_asked_first():
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


def test_an_evaluation_pauses_with_batches_and_goes_first_once_it_is_awaited():
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


def test_an_evaluation_whose_engine_dies_goes_first_and_one_that_restarts_is_started_again():
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


def test_busy_time_counts_requests_against_budgets_and_leaves_out_pauses():
    now = [0.0]
    scheduler = Scheduler(ScheduleConfig(max_lag=0), groups=1, episodes=2, tasks=Drawn(), clock=lambda: now[0])
    scheduler.capacity.set_engines({0: 4})
    first, _ = begin(scheduler)
    now[0] = 10.0
    scheduler.finish_turn(first)
    now[0] = 15.0
    scheduler.capacity.set_paused(True)
    now[0] = 100.0
    scheduler.capacity.set_paused(False)
    now[0] = 105.0
    assert scheduler.capacity.pop_busy() == (2 * 10 + 1 * 5 + 1 * 5, 4 * 20)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["pipelined", "synchronous", "one_step", "asynchronous"]),
    max_lag=st.integers(1, 3),
    over_sampling=st.sampled_from([1.0, 1.5, 2.0]),
    dynamic_sampling=st.booleans(),
    slots=st.integers(1, 40),
    groups=st.integers(1, 5),
    publishes=st.sampled_from([(1,), (0,), (2,), (0, 1), (1, 2), (0, 1, 2, 3)]),
    evaluates=st.booleans(),
    changes=st.booleans(),
    seed=st.integers(0, 10_000),
)
@example(
    kind="pipelined",
    max_lag=3,
    over_sampling=1.5,
    dynamic_sampling=False,
    slots=6,
    groups=1,
    publishes=(0, 1),
    evaluates=True,
    changes=False,
    seed=0,
)
def test_in_any_order_of_events_the_lag_the_mixture_and_the_budgets_hold_and_nothing_is_lost(
    kind, max_lag, over_sampling, dynamic_sampling, slots, groups, publishes, evaluates, changes, seed
):
    """A batch may be followed by any number of publishes; some come while one is waited for. Bounds may change.
    Evaluations overlap with batches, and some are awaited."""
    rng = random.Random(seed)
    tasks = Drawn()
    over_sampling = over_sampling if kind == "pipelined" else 1.0
    policy = ScheduleConfig(
        kind=kind,
        max_lag=max_lag,
        over_sampling=over_sampling,
        dynamic_sampling=dynamic_sampling,
        max_episodes=64,
        max_infrastructure_failures=1,
    )
    largest = (policy.lag + 2) * over_sampling
    scheduler = schedule(groups=groups, episodes=2, tasks=tasks, **vars(policy))
    scheduler.capacity.set_engines({0: slots})
    expected = Drawn()
    begun: dict[InflightEpisode, int] = {}
    in_flight: list[InflightEpisode] = []
    delivered: list[GroupState] = []
    served = published = trained = idle = to_publish = 0
    waits = True
    evaluation: Evaluation | None = None
    evaluated = 0

    def end_one() -> None:
        episode = in_flight.pop(rng.randrange(len(in_flight)))
        outcome = Outcome.COMPLETED if rng.random() < 0.9 else Outcome.INFRASTRUCTURE_ERROR
        scheduler.finish_turn(episode, interrupted=(again := rng.random() < 0.3) and rng.random() < 0.1)
        if again:
            scheduler.request_decode(episode)
        elif episode.group.batch != EVALUATION:
            scheduler.record_result(episode, result(episode, float(rng.random() < 0.5), outcome))
        elif outcome is Outcome.COMPLETED:
            assert evaluation is not None
            scheduler.record_result(episode, result(episode, 1.0))
            evaluation.record(episode, result(episode, 1.0))
        else:
            scheduler.restart(episode)

    for _ in range(2000 if evaluates else 1000):
        if evaluates and evaluation is None and rng.random() < 0.05:
            evaluation = evaluate(scheduler, 3, episodes=2)
        if evaluation is not None and not scheduler.capacity.evaluating and rng.random() < 0.01:
            scheduler.await_evaluation(True)
        for episode in scheduler.pop_starts():
            assert episode.group.batch == EVALUATION or not scheduler.capacity.evaluating
            begun[episode] = served if episode.tries == 0 else min(begun[episode], served)
            scheduler.request_decode(episode)
        in_flight += scheduler.pop_grants()
        ended = scheduler.pop_cancelled()
        in_flight = [episode for episode in in_flight if episode not in ended]
        decoding = scheduler.states["decoding"] + scheduler.evaluation_states["decoding"]
        assert len(in_flight) == decoding <= slots
        assert sum(1 for _ in scheduler.planner.groups()) <= groups * largest + 3
        if evaluation is not None and evaluation.complete:
            evaluated, evaluation = evaluated + 1, None
            scheduler.await_evaluation(False)
        if scheduler.capacity.evaluating:
            assert in_flight, "an evaluation that is awaited goes on, also while batches are paused"
            end_one()
            continue
        taken = scheduler.planner.pop_batch() if waits else None
        if taken is not None:
            assert len(taken) == groups
            if kind != "asynchronous":
                assert Counter(g.task.source for g in taken) == Counter(expected.source_order(groups))
            for group in taken:
                assert len(group.results) == 2
                assert all(each.outcome.scored for each in group.results), "failures enter no group, nor its baseline"
                assert group.task.source != "held"
                assert all(published - begun[episode] <= policy.lag for episode in group.episodes)
            delivered += taken
            trained += 1
            to_publish, waits = rng.choice(publishes), False
            scheduler.capacity.set_paused(not policy.decodes_while_training)
        elif not waits and (not policy.decodes_while_training or rng.random() < 0.2):
            if served < published:
                served = published
            elif to_publish:
                published, to_publish = published + 1, to_publish - 1
            else:
                waits = True
                scheduler.planner.await_batch()
                scheduler.capacity.set_paused(False)
                if changes and rng.random() < 0.5:
                    lag = rng.randrange(kind == "asynchronous", 4)
                    factor = rng.choice([1.0, 1.5, 2.0]) if kind == "pipelined" and lag else 1.0
                    policy = replace(policy, max_lag=lag, over_sampling=factor, max_episodes=rng.choice([1, 3, 64]))
                    largest = max(largest, (policy.lag + 2) * factor)
                    scheduler.reconfigure(policy)
                    ended = scheduler.pop_cancelled()
                    in_flight = [episode for episode in in_flight if episode not in ended]
            scheduler.planner.set_versions(served, published)
        elif waits and publishes != (1,) and rng.random() < 0.01:
            served = published = published + 1
            scheduler.planner.set_versions(served, published)
        elif in_flight:
            end_one()
        elif waits:
            idle += 1
            assert idle < 3, f"nobody works, and {scheduler.describe_missing()}"
            continue
        idle = 0
    assert trained >= 3
    assert evaluated >= 3 * evaluates
    ids = [group.task.id for group in delivered]
    assert len(ids) == len(set(ids))
    if publishes == (1,) and kind != "asynchronous" and over_sampling == 1 and not changes:
        assert scheduler.planner.replaced["aged"] == 0
    open_ones = {group.task.id for group in scheduler.planner.groups()}
    unused = scheduler.planner.replaced.total()
    assert tasks.drawn.total() == len(ids) + len(open_ones) + unused


def test_a_lower_bound_on_the_lag_drops_what_comes_too_late_at_once_and_replaces_it_by_other_tasks():
    scheduler = schedule(max_lag=2)
    started = begin(scheduler)
    assert Counter(episode.group.batch for episode in started) == {0: 6, 1: 6, 2: 6}
    scheduler.reconfigure(ScheduleConfig(max_lag=0))
    gone = scheduler.pop_cancelled()
    assert {episode.group.batch for episode in gone} == {1, 2}, "they would be one and two versions too old"
    assert scheduler.planner.replaced == {"aged": 6}
    assert begin(scheduler) == [], "no work ahead"
    for episode in [episode for episode in started if episode not in gone]:
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]
    scheduler.planner.set_versions(1, 1)
    scheduler.planner.await_batch()
    assert Counter(episode.group.batch for episode in begin(scheduler)) == {1: 6}
    scheduler.reconfigure(ScheduleConfig(max_lag=1))
    assert Counter(episode.group.batch for episode in begin(scheduler)) == {2: 6}, "a higher one lets work ahead begin"


def test_settings_that_cannot_be_name_their_flag():
    for settings_, flag in (
        ({"max_lag": -1}, "max-lag"),
        ({"over_sampling": 0.5}, "over-sampling"),
        ({"over_sampling": 2.0, "max_lag": 0}, "over-sampling"),
        ({"kind": "asynchronous", "max_lag": 0}, "max-lag"),
        ({"retries": -1}, "retries"),
        ({"max_infrastructure_failures": 0}, "max-infrastructure-failures"),
        ({"least_advantage": 0.1}, "least-advantage"),
        ({"least_advantage": -0.1, "dynamic_sampling": True}, "least-advantage"),
    ):
        with pytest.raises(ConfigError, match=f"--schedule.{flag}"):
            ScheduleConfig(**settings_)


def test_on_a_virtual_clock_pipelined_keeps_engines_busy_where_synchronous_waits():
    config = Config(batches=4, warm_up=3)
    pipelined, synchronous = (run(simulate(config, name, 8)) for name in ("pipelined", "synchronous"))
    assert pipelined.busy_share > 0.97
    assert synchronous.busy_share < 0.5
    assert pipelined.mixture_deviation == synchronous.mixture_deviation == 0
    assert (pipelined.lag_max, synchronous.lag_max) == (2, 0)
    assert run(simulate(config, "pipelined", 8)) == pipelined
