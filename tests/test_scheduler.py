"""Scheduler: which groups a batch has, what begins when under each schedule, capacity, and the order of starts."""

from __future__ import annotations

import heapq
import sys
from collections import Counter

import pytest

from benchmarks.schedules import Config, simulate
from benchmarks.virtual_time import run
from forge_rl.errors import ConfigError
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import EVALUATION, GroupState, InflightEpisode, ScheduleConfig
from forge_rl.services import generator_config
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.types import Episode, Group, Outcome, Sampling, Score, Task, Turn


class Drawn:
    """Tasks without end, sources in turn: two of a, one of b."""

    def __init__(self) -> None:
        self.drawn: Counter[str] = Counter()
        self.observed: list[Group] = []
        self._turn = 0

    def source_order(self, groups: int) -> list[str]:
        names = ["aab"[(self._turn + place) % 3] for place in range(groups)]
        self._turn += groups
        return names

    def draw_from(self, source: str) -> Task:
        self.drawn[source] += 1
        return Task(id=f"{source}{self.drawn[source]}", source=source, messages=())

    def observe(self, groups: list[Group]) -> None:
        self.observed += groups


def result(episode: InflightEpisode, reward: float, outcome: Outcome = Outcome.COMPLETED, tokens: int = 1) -> Episode:
    turn = Turn(prompt_ids=(), token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, versions=(0,) * tokens, text="")
    return Episode(task=episode.group.task, turns=(turn,), score=Score(total=reward), outcome=outcome, problem="broken")


def schedule(
    *,
    groups: int = 3,
    episodes: int = 2,
    tasks: Drawn | None = None,
    ahead_requests: int = sys.maxsize,
    **policy: object,
) -> Scheduler:
    scheduler = Scheduler(
        ScheduleConfig(**policy),  # type: ignore[arg-type]
        groups=groups,
        episodes=episodes,
        tasks=tasks or Drawn(),
        ahead_requests=ahead_requests,
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


def test_a_batch_has_its_own_groups_in_planned_order():
    scheduler = schedule(max_lag=0)
    for episode in reversed(begin(scheduler)):
        assert scheduler.planner.pop_batch() is None
        end(scheduler, episode)
    assert names(scheduler.planner.pop_batch()) == ["a1", "a2", "b1"]


def test_work_ahead_begins_while_a_batch_waits_but_no_further_than_the_lag():
    scheduler = schedule(max_lag=2)
    started = begin(scheduler)
    assert Counter(episode.group.batch for episode in started) == {0: 6, 1: 6, 2: 6}
    straggler, *later_episodes = started
    for episode in later_episodes:
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
        while (groups := scheduler.planner.pop_batch()) is None:
            episodes = begin(scheduler)
            started |= {episode.group: min(started.get(episode.group, 2 * batch), 2 * batch) for episode in episodes}
            for group in scheduler.planner.incomplete_groups():
                for episode in group.episodes:
                    if episode.state == "decoding":
                        end(scheduler, episode)
        assert all(2 * batch - started[group] <= 1 for group in groups)
        assert len(list(scheduler.planner.groups())) <= 3
    # What was begun ahead before the pace was known is dropped; from then on nothing is begun that would be too old.
    assert scheduler.planner.replaced == {"aged": 3}


def test_engines_with_too_old_a_version_start_nothing_and_are_named():
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


def test_asynchronous_takes_the_first_to_end_unless_others_grow_old():
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
    groups = scheduler.planner.pop_batch() or []
    assert Counter(group.task.source for group in groups) == {"a": 2, "b": 1}
    assert set(carried) & set(groups)
    assert scheduler.planner.replaced == {}


def simulated(batches: int, **policy: object) -> tuple[list[int], float]:
    """How many stragglers each batch went ahead of, and the seconds of all, where every eighth group takes 8 s and the
    others 1 s, on as many slots as a batch has groups."""
    clock_s, ends = 0.0, list[tuple[float, int, InflightEpisode]]()
    scheduler = schedule(groups=6, episodes=1, **policy)
    scheduler.capacity.set_engines({0: 6})
    overtaken = list[int]()
    for version in range(batches):
        scheduler.planner.set_versions(version, version)
        scheduler.planner.await_batch()
        while True:
            for episode in scheduler.pop_starts():
                scheduler.request_decode(episode)
            for episode in scheduler.pop_grants():
                heapq.heappush(
                    ends, (clock_s + (8 if episode.group.order % 8 == 0 else 1), episode.group.order, episode)
                )
            before = scheduler.planner.overtaken
            if scheduler.planner.pop_batch() is not None:
                overtaken.append(scheduler.planner.overtaken - before)
                break
            clock_s, _, episode = heapq.heappop(ends)
            end(scheduler, episode)
    return overtaken, clock_s


def test_over_sampling_overtakes_stragglers_in_most_batches():
    overtaken, seconds = simulated(24, max_lag=2, over_sampling=2.0)
    assert sum(count > 0 for count in overtaken[1:]) > 12
    assert seconds < simulated(24, max_lag=1)[1]
    assert sum(simulated(24, max_lag=1)[0]) == 0


def test_engines_work_ahead_only_beside_few_requests():
    scheduler = schedule(groups=3, episodes=4, ahead_requests=2, max_lag=1)
    scheduler.capacity.set_engines({3: 50, 5: 50})
    episodes = begin(scheduler)
    assert kinds(episodes) == [0] * 12
    for episode in episodes[:8]:
        end(scheduler, episode)
        assert begin(scheduler) == []
    evaluate(scheduler, 1)
    end(scheduler, episodes[8])
    assert kinds(begin(scheduler)) == ["eval"], "evaluations are not work ahead"
    end(scheduler, episodes[9])
    assert kinds(begin(scheduler)) == [1], "three requests remain, of four on both engines together"


@pytest.mark.parametrize(
    ("device", "urls", "expected"),
    [("cpu", (), 8), ("cuda", (), sys.maxsize), ("cpu", ("http://10.0.0.7:8000",), sys.maxsize)],
)
def test_only_engines_on_cpu_work_ahead_beside_few_requests(
    device: str, urls: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_config, "device_type", lambda: device)
    assert GeneratorConfig(urls=urls).ahead_requests == expected


def test_engines_keep_their_budgets_and_episodes_their_engines():
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


def test_busy_time_counts_requests_against_budgets_and_leaves_out_pauses():
    clock_s = [0.0]
    scheduler = Scheduler(ScheduleConfig(max_lag=0), groups=1, episodes=2, tasks=Drawn(), clock=lambda: clock_s[0])
    scheduler.capacity.set_engines({0: 4})
    first, _ = begin(scheduler)
    clock_s[0] = 10.0
    scheduler.finish_turn(first)
    clock_s[0] = 15.0
    scheduler.capacity.set_paused(True)
    clock_s[0] = 100.0
    scheduler.capacity.set_paused(False)
    clock_s[0] = 105.0
    assert scheduler.capacity.pop_busy() == (2 * 10 + 1 * 5 + 1 * 5, 4 * 20)


def test_a_lower_lag_bound_drops_and_replaces_late_work_at_once():
    scheduler = schedule(max_lag=2)
    started = begin(scheduler)
    assert Counter(episode.group.batch for episode in started) == {0: 6, 1: 6, 2: 6}
    scheduler.reconfigure(ScheduleConfig(max_lag=0))
    cancelled_episodes = scheduler.pop_cancelled()
    assert {episode.group.batch for episode in cancelled_episodes} == {1, 2}, (
        "they would be one and two versions too old"
    )
    assert scheduler.planner.replaced == {"aged": 6}
    assert begin(scheduler) == [], "no work ahead"
    for episode in [episode for episode in started if episode not in cancelled_episodes]:
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
        ({"over_sampling": 2.0, "max_lag": 1}, "over-sampling"),
        ({"kind": "asynchronous", "max_lag": 0}, "max-lag"),
        ({"retries": -1}, "retries"),
        ({"max_infrastructure_failures": 0}, "max-infrastructure-failures"),
        ({"least_advantage": 0.1}, "least-advantage"),
        ({"least_advantage": -0.1, "dynamic_sampling": True}, "least-advantage"),
    ):
        with pytest.raises(ConfigError, match=f"--schedule.{flag}"):
            ScheduleConfig(**settings_)


def test_pipelined_keeps_engines_busy_where_synchronous_waits():
    config = Config(batches=4, warm_up=3)
    pipelined, synchronous = (run(simulate(config, name, 8)) for name in ("pipelined", "synchronous"))
    assert pipelined.busy_share > 0.97
    assert synchronous.busy_share < 0.5
    assert pipelined.mixture_deviation == synchronous.mixture_deviation == 0
    assert (pipelined.lag_max, synchronous.lag_max) == (2, 0)
    assert run(simulate(config, "pipelined", 8)) == pipelined
