"""Scheduler: in any order of events bounds hold and nothing is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.state import EVALUATION, GroupState, InflightEpisode, ScheduleConfig
from forge_rl.types import Outcome
from tests.test_scheduler import Drawn, evaluate, result, schedule


@settings(max_examples=60, deadline=None)
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
def test_lag_mixture_and_budgets_hold_in_any_order_of_events(
    kind, max_lag, over_sampling, dynamic_sampling, slots, groups, publishes, evaluates, changes, seed
):
    """A batch may be followed by any number of publishes; some come while one is waited for. Bounds may change.
    Evaluations overlap with batches, and some are awaited."""
    rng = random.Random(seed)
    tasks = Drawn()
    over_sampling = over_sampling if kind == "pipelined" and max_lag > 1 else 1.0
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
        scheduler.finish_turn(episode, interrupted=(is_interrupted := rng.random() < 0.3) and rng.random() < 0.1)
        if is_interrupted:
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
        batch_groups = scheduler.planner.pop_batch() if waits else None
        if batch_groups is not None:
            assert len(batch_groups) == groups
            if kind != "asynchronous":
                assert Counter(g.task.source for g in batch_groups) == Counter(expected.source_order(groups))
            for group in batch_groups:
                assert len(group.results) == 2
                assert all(result.outcome.scored for result in group.results), (
                    "failures enter no group, nor its baseline"
                )
                assert group.task.source != "held"
                assert all(published - begun[episode] <= policy.lag for episode in group.episodes)
            delivered += batch_groups
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
                    factor = rng.choice([1.0, 1.5, 2.0]) if kind == "pipelined" and lag > 1 else 1.0
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
