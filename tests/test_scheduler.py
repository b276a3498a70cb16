"""The schedule: bounds that hold in any order of events, exact mixtures, engines' budgets, and what comes first."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedules import Config, simulate
from benchmarks.virtual_time import run
from forge_rl.errors import ConfigError, TaskError
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import GroupState, InflightEpisode, ScheduleConfig
from forge_rl.types import Episode, Outcome, Task, Turn


class Drawn:
    """Tasks without end, sources in turn: two of a, one of b."""

    def __init__(self) -> None:
        self.drawn: Counter[str] = Counter()
        self._turn = 0

    def source_order(self, groups: int) -> list[str]:
        found = ["aab"[(self._turn + place) % 3] for place in range(groups)]
        self._turn += groups
        return found

    def draw_from(self, source: str) -> Task:
        self.drawn[source] += 1
        return Task(id=f"{source}{self.drawn[source]}", source=source, messages=())


def result(plan: InflightEpisode, reward: float, outcome: Outcome = Outcome.COMPLETED, tokens: int = 1) -> Episode:
    turn = Turn(prompt_ids=(), token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, versions=(0,) * tokens, text="")
    return Episode(task=plan.group.task, turns=(turn,), reward=reward, outcome=outcome, problem="broken")


def schedule(*, groups: int = 3, episodes: int = 2, tasks: Drawn | None = None, **policy: object) -> Scheduler:
    made = Scheduler(
        ScheduleConfig(**policy),  # type: ignore[arg-type]
        groups=groups,
        episodes=episodes,
        tasks=tasks or Drawn(),
        clock=lambda: 0.0,
    )
    made.set_engines({0: 100})
    return made


def begin(made: Scheduler) -> list[InflightEpisode]:
    """Begin what may begin, and let it decode."""
    started = made.starts()
    for plan in started:
        made.wants(plan)
    made.grants()
    return started


def end(made: Scheduler, plan: InflightEpisode, reward: float | None = None, **more: object) -> None:
    made.leaves(plan)
    made.ends(plan, result(plan, float(plan.index) if reward is None else reward, **more))  # type: ignore[arg-type]


def names(groups: list[GroupState] | None) -> list[str]:
    assert groups is not None
    return [group.task.id for group in groups]


def test_a_batch_is_its_own_groups_in_the_order_of_the_plan_whatever_ends_first():
    made = schedule(max_lag=0)
    for plan in reversed(begin(made)):
        assert made.take() is None
        end(made, plan)
    assert names(made.take()) == ["a1", "a2", "b1"]


def test_work_ahead_begins_while_a_batch_waits_but_no_further_than_the_lag():
    made = schedule(max_lag=2)
    started = begin(made)
    assert Counter(plan.group.batch for plan in started) == {0: 6, 1: 6, 2: 6}
    straggler, *others = started
    for plan in others:
        end(made, plan)
    assert made.take() is None  # the later batches are complete, and wait
    assert begin(made) == []
    assert "batch 0 lacks 1 episodes: 1 decoding" in made.missing()
    end(made, straggler)
    assert names(made.take()) == ["a1", "a2", "b1"]
    assert begin(made) == []  # batch 3 may begin only once the engines serve version 1
    made.version = 1
    assert {plan.group.batch for plan in begin(made)} == {3}


def test_synchronous_begins_nothing_of_the_next_batch():
    made = schedule(kind="synchronous", max_lag=3)
    plans = begin(made)
    assert {plan.group.batch for plan in plans} == {0}
    for plan in plans:
        end(made, plan)
    made.take()
    assert begin(made) == []


def test_one_step_begins_the_next_batch_when_the_one_before_is_delivered():
    made = schedule(kind="one_step")
    plans = begin(made)
    assert {plan.group.batch for plan in plans} == {0}
    for plan in plans:
        end(made, plan)
    made.take()
    plans = begin(made)
    assert {plan.group.batch for plan in plans} == {1}
    for plan in plans:
        end(made, plan)
    made.take()
    assert begin(made) == []  # batch 2 would be two steps behind


def test_asynchronous_takes_what_ends_first_but_waits_for_what_would_be_too_old():
    made = schedule(kind="asynchronous", max_lag=1)
    plans = begin(made)
    assert len({plan.group for plan in plans}) == 6
    for plan in plans[6:]:
        end(made, plan)
    assert names(made.take()) == ["a3", "a4", "b2"]
    made.version = 1
    fresh = begin(made)
    for plan in fresh:
        end(made, plan)
    assert made.take() is None  # the first three groups were begun under version 0, and would be two steps behind later
    for plan in plans[:6]:
        end(made, plan)
    assert names(made.take()) == ["a1", "a2", "b1"]


def test_surplus_groups_are_carried_on_and_the_mixture_stays_exact():
    tasks = Drawn()
    made = schedule(max_lag=2, over_sampling=2.0, tasks=tasks)
    plans = begin(made)
    first = [plan for plan in plans if plan.group.batch == 0]
    assert Counter(plan.group.task.source for plan in first) == {"a": 8, "b": 4}
    slow = {first[0].group}
    for plan in first:
        if plan.group not in slow:
            end(made, plan)
    assert Counter(group.task.source for group in made.take() or []) == {"a": 2, "b": 1}
    made.version = 1
    carried = [group for group in made.planned() if group.place[0] == 0]
    assert {group.batch for group in carried} == {1}
    assert slow <= set(carried)
    for plan in plans + begin(made):
        if plan.state == "decoding" and plan.group.batch == 1:
            end(made, plan)
    taken = made.take() or []
    assert Counter(group.task.source for group in taken) == {"a": 2, "b": 1}
    assert set(carried) & set(taken)
    assert made.replaced == {}


def test_a_uniform_group_is_replaced_within_its_source_and_place():
    made = schedule(max_lag=1, replace_uniform=True)
    plans = [plan for plan in begin(made) if plan.group.batch == 0]
    for plan in plans:
        end(made, plan, 1.0 if plan.group.task.id == "a2" else None)
    assert made.take() is None
    again = begin(made)
    assert [plan.place[:3] for plan in again] == [(0, 1, 1), (0, 1, 1)]
    for plan in again:
        end(made, plan)
    assert names(made.take()) == ["a1", "a5", "b1"]
    assert made.replaced == {"uniform": 1}


def test_a_failed_episode_starts_again_and_then_its_group_is_replaced_and_the_others_of_it_are_ended():
    made = schedule(max_lag=0, retries=1)
    plans = begin(made)
    bad = plans[0]
    end(made, bad, outcome=Outcome.ENVIRONMENT_ERROR)
    assert begin(made) == [bad]
    assert bad.place == (0, 0, 0, 0, 1)
    end(made, bad, outcome=Outcome.ENVIRONMENT_ERROR)
    assert made.cancels() == [plans[1]]
    assert made.count("decoding") == 4
    for plan in plans[2:] + begin(made):
        end(made, plan)
    assert names(made.take()) == ["a3", "a2", "b1"]
    assert made.outcomes == {"environment_error": 2, "completed": 6}


def test_a_source_that_only_fails_ends_the_run_with_its_name():
    made = schedule(max_lag=0, retries=0, most_replaced=3)

    def fail() -> None:
        for plan in begin(made):
            if plan.group.task.source == "b" and not plan.group.dropped:
                end(made, plan, outcome=Outcome.JUDGE_ERROR)

    for _ in range(3):
        fail()
    with pytest.raises(TaskError, match=r"source b gave 3 groups in a row .* judge_error: broken"):
        fail()


def test_engines_get_no_more_than_their_budgets_and_an_episode_comes_back_to_its_own():
    made = schedule(groups=3, episodes=4, max_lag=1)
    made.set_engines({3: 2, 5: 4})
    plans = begin(made)
    assert Counter(plan.engine for plan in plans if plan.state == "decoding") == {3: 2, 5: 4}
    first = next(plan for plan in plans if plan.engine == 3)
    made.leaves(first)
    made.wants(first)
    assert first in made.grants()
    assert first.engine == 3
    made.set_engines({5: 4})
    made.leaves(first, interrupted=True)
    made.wants(first)
    assert made.grants() == []
    made.leaves(next(plan for plan in plans if plan.engine == 5 and plan.state == "decoding"))
    assert made.grants() == [first]  # before those that waited for longer
    assert first.engine == 5


def test_within_a_batch_the_longest_expected_begin_first():
    made = schedule(max_lag=1)
    for plan in begin(made):
        if plan.group.batch == 0:
            end(made, plan, tokens=50 if plan.group.task.source == "b" else 5)
    made.take()
    made.version = 1
    assert [plan.group.task.source for plan in begin(made)] == ["b", "b", "a", "a", "a", "a"]


def test_a_pause_holds_back_all_but_evaluations():
    made = schedule(max_lag=0)
    plans = made.starts()
    made.pause()
    assert made.starts() == []
    made.wants(plans[0])
    assert made.grants() == []
    tested = made.outside(Task(id="1", source="held out", messages=()))
    made.wants(tested)
    assert made.grants() == [tested]
    made.resume()
    assert made.grants() == [plans[0]]


def test_busy_time_counts_requests_against_budgets_and_leaves_out_pauses():
    now = [0.0]
    made = Scheduler(ScheduleConfig(max_lag=0), groups=1, episodes=2, tasks=Drawn(), clock=lambda: now[0])
    made.set_engines({0: 4})
    first, _ = begin(made)
    now[0] = 10.0
    made.leaves(first)
    now[0] = 15.0
    made.pause()
    now[0] = 100.0
    made.resume()
    now[0] = 105.0
    assert made.take_busy() == (2 * 10 + 1 * 5 + 1 * 5, 4 * 20)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["pipelined", "synchronous", "one_step", "asynchronous"]),
    max_lag=st.integers(1, 3),
    over_sampling=st.sampled_from([1.0, 1.5, 2.0]),
    replace_uniform=st.booleans(),
    slots=st.integers(1, 40),
    groups=st.integers(1, 5),
    seed=st.integers(0, 10_000),
)
def test_in_any_order_of_events_the_lag_the_mixture_and_the_budgets_hold_and_nothing_is_lost(
    kind, max_lag, over_sampling, replace_uniform, slots, groups, seed
):
    rng = random.Random(seed)
    tasks = Drawn()
    made = schedule(
        groups=groups,
        episodes=2,
        tasks=tasks,
        kind=kind,
        max_lag=max_lag,
        over_sampling=over_sampling if kind == "pipelined" else 1.0,
        replace_uniform=replace_uniform,
    )
    made.set_engines({0: slots})
    expected = Drawn()
    begun: dict[InflightEpisode, int] = {}
    under_way: list[InflightEpisode] = []
    delivered: list[GroupState] = []
    version = trained = idle = 0
    for _ in range(1000):
        for plan in made.starts():
            begun[plan] = version if plan.tries == 0 else min(begun[plan], version)
            made.wants(plan)
        under_way += made.grants()
        ended = made.cancels()
        under_way = [plan for plan in under_way if plan not in ended]
        assert len(under_way) == made.count("decoding") <= slots
        taken = made.take() if trained == version else None
        if taken is not None:
            assert len(taken) == groups
            if kind != "asynchronous":
                assert Counter(g.task.source for g in taken) == Counter(expected.source_order(groups))
            for group in taken:
                assert len(group.results) == 2
                assert all(trained - begun[plan] <= made.config.lag for plan in group.episodes)
            delivered += taken
            trained += 1
            if not made.config.decodes_while_training:
                version = made.version = trained
        elif version < trained and rng.random() < 0.2:
            version = made.version = trained
        elif under_way:
            plan = under_way.pop(rng.randrange(len(under_way)))
            outcome = Outcome.COMPLETED if rng.random() < 0.9 else Outcome.INFRASTRUCTURE_ERROR
            made.leaves(plan)
            if rng.random() < 0.3:
                made.wants(plan)
            else:
                made.ends(plan, result(plan, float(rng.random() < 0.5), outcome))
        elif version == trained:
            idle += 1
            assert idle < 3, f"nobody works, and {made.missing()}"
            continue
        idle = 0
    assert trained >= 3
    ids = [group.task.id for group in delivered]
    assert len(ids) == len(set(ids))
    assert kind == "asynchronous" or over_sampling > 1 or made.replaced["aged"] == 0
    open_ones = {group.task.id for group in made.planned()}
    unused = made.replaced.total()
    assert tasks.drawn.total() == len(ids) + len(open_ones) + unused


def test_settings_that_cannot_be_name_their_flag():
    for settings_, flag in (
        ({"max_lag": -1}, "max-lag"),
        ({"over_sampling": 0.5}, "over-sampling"),
        ({"over_sampling": 2.0, "max_lag": 0}, "over-sampling"),
        ({"kind": "asynchronous", "max_lag": 0}, "max-lag"),
        ({"retries": -1}, "retries"),
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
