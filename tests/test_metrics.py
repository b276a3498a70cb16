"""Values that merge, histograms, and the phase clock."""

import math
import pickle
from types import SimpleNamespace

import pytest

from forge_rl.errors import ForgeError, ServiceError
from forge_rl.metrics import (
    Histogram,
    Max,
    Mean,
    PhaseClock,
    Sum,
    Value,
    lag_histogram,
    merge_all,
    reduce,
)
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.records.gap import describe_gap
from forge_rl.run.records.step_metrics import StepMetrics
from forge_rl.types import Batch, Episode, Group, Task, Turn


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_means_of_unequal_parts_merge_to_the_mean_of_the_whole() -> None:
    total = Mean(1.0 + 2.0 + 6.0 + 7.0, 4)
    assert merge_all([{"x": Mean(1.0, 1)}, {"x": Mean(2.0 + 6.0 + 7.0, 3)}]) == {"x": total}
    assert reduce({"loss": total}) == {"loss": 4.0}


def test_every_grouping_of_parts_merges_to_the_same() -> None:
    parts: list[dict[str, Value]] = [
        {"loss": Mean(3.0, 2), "tokens": Sum(10), "worst": Max(0.5)},
        {"loss": Mean(-8.0, 4), "tokens": Sum(30), "worst": Max(2.0)},
        {"loss": Mean(1.0, 1), "tokens": Sum(2), "worst": Max(1.0)},
    ]
    flat = merge_all(parts)
    assert merge_all([merge_all(parts[:2]), parts[2]]) == flat
    assert merge_all([parts[0], merge_all(parts[1:])]) == flat
    assert reduce(flat) == {"loss": pytest.approx(-4 / 7), "tokens": 42.0, "worst": 2.0}


def test_a_name_that_only_some_parts_have_is_merged_from_those() -> None:
    merged = merge_all([{"a": Sum(1)}, {"b": Sum(2)}, {"a": Sum(4)}])
    assert reduce(merged) == {"a": 5.0, "b": 2.0}


def test_a_merge_does_not_hide_nan_in_either_order() -> None:
    for value, other in ((1.0, math.nan), (math.nan, 1.0)):
        assert math.isnan(reduce(merge_all([{"x": Max(value)}, {"x": Max(other)}]))["x"])


def test_a_mean_over_nothing_is_nan_and_leaves_others_unchanged() -> None:
    assert math.isnan(reduce({"x": Mean(0.0, 0)})["x"])
    assert merge_all([{"x": Mean(0.0, 0)}, {"x": Mean(3.0, 2)}]) == {"x": Mean(3.0, 2)}


def test_two_kinds_under_one_name_are_refused_and_the_name_is_told() -> None:
    with pytest.raises(AssertionError, match="'loss' has values of two kinds"):
        merge_all([{"loss": Sum(1)}, {"loss": Mean(1, 1)}])


def test_values_pickle() -> None:
    values = [Sum(1), Mean(1, 2), Max(3), Histogram({0: 3, 2: 1})]
    assert pickle.loads(pickle.dumps(values)) == values


def test_a_bin_holds_one_number_until_there_are_too_many() -> None:
    histogram = Histogram({2: 5, 5: 7, 6: 1})
    assert histogram.bins() == ([5, 0, 0, 7, 1], [1.5, 2.5, 3.5, 4.5, 5.5, 6.5])
    assert histogram.bins(max_bins=5) == histogram.bins()
    assert histogram.bins(max_bins=4) == ([5, 7, 1], [1.5, 3.5, 5.5, 7.5])
    assert Histogram({}).bins() == ([], [])
    counts, edges = Histogram({0: 1, 100_000: 2}).bins()
    assert (sum(counts), len(counts) <= 512, len(edges) - len(counts)) == (3, True, 1)


def test_tokens_are_counted_by_lag_over_all_turns() -> None:
    task = Task(id="1", source="s", messages=())

    def group(*episodes: list[tuple[int, ...]]) -> Group:
        episodes_of_group = [
            Episode(task=task, turns=tuple(turn(versions) for versions in turns)) for turns in episodes
        ]
        return Group(task=task, episodes=tuple(episodes_of_group))

    def turn(versions: tuple[int, ...]) -> Turn:
        zeros = (0,) * len(versions)
        return Turn(prompt_ids=(1,), token_ids=zeros, logprobs=(0.0,) * len(versions), versions=versions, text="")

    batch = Batch(groups=(group([(5, 5, 5)], [(3, 4)]), group([(4,), (5, 5)], [()])), version=5)
    lags = lag_histogram(batch)
    assert list(lags.counts.items()) == [(0, 5), (1, 2), (2, 1)]
    assert lag_histogram(Batch(groups=(), version=5)) == Histogram({})


def test_a_step_reports_seconds_tokens_and_busy_shares() -> None:
    time = FakeClock()
    clock = PhaseClock(time)
    with clock.phase("rollout"):
        time.seconds += 2.0
        clock.tokens("rollout", 1024)
    with clock.phase("train"):
        time.seconds += 6.0
        clock.tokens("train", 1200)
        clock.tokens("train", 600)
    with clock.phase("rollout"):
        time.seconds += 2.0
    clock.busy("trainer", 5.0)
    clock.busy("trainer", 2.5)
    clock.busy("generator/0", 4.0)
    time.seconds += 2.5
    assert clock.finish_step() == {
        "seconds/rollout": 4.0,
        "seconds/train": 6.0,
        "seconds/step": 12.5,
        "tokens/rollout": 1024.0,
        "tokens/train": 1800.0,
        "tokens_per_s/rollout": 256.0,
        "tokens_per_s/train": 300.0,
        "busy/trainer": 0.6,
        "busy/generator/0": 0.32,
    }


def test_the_next_step_begins_where_the_last_ended() -> None:
    time = FakeClock()
    clock = PhaseClock(time)
    with clock.phase("rollout"):
        time.seconds += 2.0
    clock.tokens("rollout", 9)
    clock.busy("trainer", 1.0)
    clock.finish_step()
    time.seconds += 1.0
    with clock.phase("train"):
        time.seconds += 3.0
    assert clock.finish_step() == {"seconds/train": 3.0, "seconds/step": 4.0}


def test_busy_seconds_of_a_phase_are_a_share_of_that_phase_alone() -> None:
    time = FakeClock()
    clock = PhaseClock(time)
    for seconds in (3.0, 5.0):
        with clock.phase("rollout"):
            time.seconds += seconds
    time.seconds += 2.0
    clock.busy("generator/0", 5.0)
    clock.busy("generator/0", 2.0, phase="rollout")
    clock.busy("generator/0", 4.0, phase="rollout")
    clock.busy("generator/0", 1.0, phase="never entered")
    values = clock.finish_step()
    assert {name: share for name, share in values.items() if name.startswith("busy")} == {
        "busy/generator/0": 0.5,
        "busy_rollout/generator/0": 0.75,
    }
    time.seconds += 1.0
    assert clock.finish_step() == {"seconds/step": 1.0}


def test_tokens_of_a_phase_that_took_no_time_have_no_rate() -> None:
    clock = PhaseClock(FakeClock())
    clock.tokens("rollout", 7)
    assert clock.finish_step() == {"tokens/rollout": 7.0, "seconds/step": 0.0}


def test_the_clock_tells_the_phase_and_how_long_it_has_lasted() -> None:
    time = FakeClock()
    clock = PhaseClock(time)
    assert (clock.current, clock.used) == ("", False)
    time.seconds += 1.0
    with clock.phase("rollout"):
        time.seconds += 2.0
        assert (clock.current, clock.since, clock.used) == ("rollout", 101.0, True)
        assert clock.now() == ("rollout", 2.0, 3.0)
    time.seconds += 4.0
    assert clock.now() == ("", 4.0, 7.0)


def test_phases_do_not_nest() -> None:
    clock = PhaseClock(FakeClock())
    with clock.phase("rollout"):
        with pytest.raises(ForgeError, match="'train' was entered inside phase 'rollout'"), clock.phase("train"):
            pass
        assert clock.current == "rollout"


def test_a_step_does_not_end_inside_a_phase() -> None:
    clock = PhaseClock(FakeClock())
    with clock.phase("rollout"), pytest.raises(ForgeError, match="inside phase 'rollout'"):
        clock.finish_step()


def test_a_phase_that_fails_is_timed_and_ended() -> None:
    time = FakeClock()
    clock = PhaseClock(time)

    def fail() -> None:
        time.seconds += 2.0
        raise KeyError

    with pytest.raises(KeyError), clock.phase("rollout"):
        fail()
    assert clock.current == ""
    assert clock.finish_step()["seconds/rollout"] == 2.0


def test_a_listener_is_told_each_phase_at_its_end_also_one_that_fails() -> None:
    time = FakeClock()
    clock = PhaseClock(time)
    phases: list[tuple[str, float, float, str]] = []
    clock.ended.add(lambda name, begin, end: phases.append((name, begin, end, clock.current)))

    def fail() -> None:
        time.seconds += 4.0
        raise KeyError

    with clock.phase("rollout"):
        time.seconds += 2.0
        assert phases == []
    time.seconds += 1.0
    with pytest.raises(KeyError), clock.phase("train"):
        fail()
    assert phases == [("rollout", 100.0, 102.0, ""), ("train", 103.0, 107.0, "")]
    assert clock.finish_step() == {"seconds/rollout": 2.0, "seconds/train": 4.0, "seconds/step": 7.0}


def test_a_service_error_learns_the_phase_that_it_broke() -> None:
    clock = PhaseClock(FakeClock())
    error = ServiceError("gone", service="generator", replica=1)
    with pytest.raises(ServiceError, match="generator replica 1, phase rollout: gone"), clock.phase("rollout"):
        raise error


def test_grouped_service_errors_get_the_phase_unless_they_have_one() -> None:
    clock = PhaseClock(FakeClock())
    new, old = ServiceError("gone", service="generator"), ServiceError("late", service="reward")
    old.phase = "evaluate"
    with pytest.raises(ExceptionGroup), clock.phase("rollout"):
        raise ExceptionGroup("rollouts", [ExceptionGroup("inner", [new]), old, ValueError()])
    assert (new.phase, old.phase) == ("rollout", "evaluate")


def test_a_gap_is_told_by_the_formats_of_both_sides():
    assert describe_gap(1e-4, engines="float32", trainer="float32") == ""
    assert describe_gap(0.04, engines="bfloat16", trainer="float32") == ""
    assert describe_gap(0.04, engines="float32", trainer="bfloat16") == "", "the trainer's roundings count as well"
    warning = describe_gap(0.01, engines="float32", trainer="float32")
    assert warning == "trainer's and engines' logprobs differ by 0.01 on average, more than 0.001"
    assert "--trainer.dtype" not in describe_gap(0.2, engines="bfloat16", trainer="bfloat16")
    assert "set --trainer.dtype bfloat16" in describe_gap(0.2, engines="bfloat16", trainer="float32")


def test_a_pause_on_request_counts_in_no_phase_and_no_step() -> None:
    seconds = paused = 0.0
    clock = PhaseClock(lambda: seconds, paused_s=lambda: paused)
    with clock.phase("rollout"):
        seconds, paused = 12.0, 10.0
    seconds, paused = 17.0, 13.0
    assert clock.finish_step() == {"seconds/rollout": 2.0, "seconds/step": 4.0}
    seconds = 18.0
    assert clock.finish_step() == {"seconds/step": 1.0}


def test_waiting_for_an_evaluation_changes_no_seconds_of_its_step() -> None:
    time = FakeClock()
    clock, trainer = PhaseClock(time), SimpleNamespace(name="trainer", busy_s=0.0)
    config = SimpleNamespace(schedule=ScheduleConfig(), trainer=SimpleNamespace(dtype="float32"))
    mixture = SimpleNamespace(epochs={}, metrics=dict)
    monitor = SimpleNamespace(clock=clock, pop_depths=dict)
    services = SimpleNamespace(trainers=[trainer], rollout=None)
    metrics = StepMetrics(config, services, SimpleNamespace(metrics=dict), mixture, monitor)  # type: ignore[arg-type]

    def spend(phase: str, seconds: float) -> None:
        with metrics.phase(phase):
            time.seconds += seconds
            trainer.busy_s += seconds / 2

    spend("train", 4.0)
    row = metrics.end_step({}, None, None)
    spend("evaluate", 20.0)
    clock.tokens("evaluate", 40)
    row |= metrics.end_evaluation()
    assert row == {
        "seconds/train": 4.0,
        "seconds/step": 4.0,
        "busy/trainer": 0.5,
        "seconds/evaluate": 20.0,
        "tokens/evaluate": 40.0,
        "tokens_per_s/evaluate": 2.0,
    }
    spend("train", 2.0)
    assert metrics.end_step({}, None, None) == {"seconds/train": 2.0, "seconds/step": 2.0, "busy/trainer": 0.5}
