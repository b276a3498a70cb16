"""The batch planner on its own: quotas, deadlines, replacements, and whom it tells of planned and dropped groups."""

from __future__ import annotations

from collections import Counter

import pytest

from forge_rl.errors import TaskError
from forge_rl.rollout.batch_planner import BatchPlanner
from forge_rl.rollout.state import GroupState, ScheduleConfig
from forge_rl.types import Outcome
from tests.test_scheduler import Drawn, result


class Plan:
    """A planner of batches of three groups of two episodes, and the groups that it told of."""

    def __init__(self, **policy: object) -> None:
        self.planned: list[GroupState] = []
        self.dropped: list[GroupState] = []
        self.tasks = Drawn()
        self.planner = BatchPlanner(
            ScheduleConfig(**policy),  # type: ignore[arg-type]
            groups=3,
            episodes=2,
            tasks=self.tasks,
            on_planned=self.planned.append,
            on_dropped=self.dropped.append,
        )

    def complete(self, group: GroupState, *, uniform: bool = False) -> None:
        self.planner.start(group)
        for episode in group.episodes:
            episode.result = result(episode, 1.0 if uniform else float(episode.index), Outcome.COMPLETED)
        self.planner.complete(group)


def ids(groups: list[GroupState] | None) -> list[str]:
    assert groups is not None
    return [group.task.id for group in groups]


def test_a_batch_has_its_quotas_and_batches_are_open_up_to_the_lag() -> None:
    plan = Plan(max_lag=2)
    assert list(plan.planner.open_batches()) == [0, 1, 2]
    plan.planner.fill(0, idle=False)
    plan.planner.fill(0, idle=False)
    assert Counter(group.task.source for group in plan.planned) == {"a": 2, "b": 1}
    for group in reversed(plan.planned):
        assert plan.planner.pop_batch() is None
        plan.complete(group)
    assert plan.planner.progress() == (3, 3)
    assert ids(plan.planner.pop_batch()) == ["a1", "a2", "b1"]
    assert list(plan.planner.open_batches()) == [1, 2]
    assert plan.dropped == []


def test_a_replaced_group_and_its_replacement_are_reported() -> None:
    plan = Plan(max_lag=1, dynamic_sampling=True)
    plan.planner.fill(0, idle=False)
    first = plan.planned[0]
    plan.complete(first, uniform=True)
    assert plan.dropped == [first]
    assert first.dropped
    assert plan.planned[-1].place == (0, 0, 1)
    assert plan.planned[-1].task.source == first.task.source
    assert first not in plan.planner.groups()
    plan.planner.replace(plan.planned[-1], "failed", "it broke", "mend it")
    assert plan.planned[-1].place == (0, 0, 2)
    assert plan.planner.replaced == {"uniform": 1, "failed": 1}


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_group_with_rewards_close_to_their_mean_is_replaced(max_lag: int) -> None:
    plan = Plan(max_lag=max_lag, dynamic_sampling=True, least_advantage=0.5)
    plan.planner.fill(0, idle=False)
    first, second, third = plan.planned
    for group, spread in ((first, 0.98), (second, 1.0), (third, 0.0)):
        plan.planner.start(group)
        for episode in group.episodes:
            episode.result = result(episode, spread * episode.index, Outcome.COMPLETED)
        plan.planner.complete(group)
    assert plan.planner.pop_batch() is None
    assert {id(group) for group in plan.dropped} == {id(first), id(third)}
    assert plan.planner.replaced == {"weak": 1, "uniform": 1}
    observed = {group.task.id: group.rewards for group in plan.tasks.observed}
    assert observed == {first.task.id: (0.0, 0.98), third.task.id: (0.0, 0.0)}


def test_too_many_weak_groups_are_an_error_that_names_their_rewards() -> None:
    plan = Plan(max_lag=1, dynamic_sampling=True, least_advantage=0.6, max_replaced=1)
    plan.planner.fill(0, idle=False)

    def complete() -> None:
        plan.complete(next(group for group in plan.planner.groups() if group.task.source == "a"))

    for _ in range(3):
        complete()
    with pytest.raises(
        TaskError, match="4 unusable groups in a row; the rewards of the last one, from 0 to 1, are with"
    ):
        complete()


def test_weak_groups_of_a_round_are_observed_once_though_one_is_too_many() -> None:
    plan = Plan(max_lag=0, dynamic_sampling=True, max_replaced=1)
    plan.planner.fill(0, idle=False)

    def complete() -> None:
        for group in plan.planner.incomplete_groups():
            plan.complete(group, uniform=True)

    complete()
    assert plan.planner.pop_batch() is None
    complete()
    with pytest.raises(TaskError, match="source a yielded 4 unusable groups in a row"):
        plan.planner.pop_batch()
    complete()
    assert plan.planner.pop_batch() is None
    assert [group.task.id for group in plan.tasks.observed] == ["a1", "a2", "b1", "a3", "a4", "b2", "a5", "a6", "b3"]


def test_a_surplus_group_is_carried_on_until_its_deadline_and_then_dropped() -> None:
    plan = Plan(max_lag=2, over_sampling=2.0)
    plan.planner.fill(0, idle=False)
    assert plan.planner.add_surplus()
    (*needed, surplus) = plan.planned
    plan.planner.start(surplus)
    for group in needed:
        plan.complete(group)
    assert ids(plan.planner.pop_batch()) == ["a1", "a2", "b1"]
    assert surplus.batch == 1
    plan.planner.set_versions(1, 1)
    plan.planner.fill(1, idle=False)
    assert Counter(group.task.source for group in plan.planned[4:]) == {"a": 1, "b": 1}, (
        "the surplus is one of the two a"
    )
    for group in plan.planned[4:]:
        plan.complete(group)
    assert plan.planner.pop_batch() is None, "batch 1 is the last that the surplus may be part of"
    assert plan.planner.incomplete_groups() == [surplus]
    plan.complete(surplus)
    assert surplus in (plan.planner.pop_batch() or [])


def test_a_lagging_group_names_the_oldest_version() -> None:
    plan = Plan(max_lag=1)
    plan.planner.fill(0, idle=False)
    plan.planner.start(plan.planned[0])
    plan.planner.set_versions(1, 1)
    plan.planner.start(plan.planned[1])
    assert plan.planner.oldest_version() == 0


def test_too_many_unusable_groups_of_a_source_in_a_row_are_an_error() -> None:
    plan = Plan(max_lag=0)
    plan.planner.fill(0, idle=False)

    def replace() -> None:
        broken = next(group for group in plan.planner.groups() if group.place[1] == 0)
        plan.planner.replace(broken, "failed", "it broke", "mend it")

    for _ in range(12):
        replace()
    with pytest.raises(TaskError, match=r"source a yielded 13 unusable groups in a row; it broke") as caught:
        replace()
    assert caught.value.hint == "mend it"
    assert len(list(plan.planner.groups())) == 3, "another is planned all the same"


def test_a_batch_reports_its_completed_and_discarded_groups() -> None:
    plan = Plan(max_lag=1, dynamic_sampling=True)
    plan.planner.fill(0, idle=False)
    second, third, _ = plan.planned[1], plan.planned[2], plan.complete(plan.planned[0], uniform=True)
    assert "completed/groups" not in plan.planner.tally.pop_metrics(0), "its batch is not delivered"
    plan.complete(second, uniform=True)
    plan.planner.replace(third, "failed", "it broke", "mend it")
    for group in plan.planned[3:]:
        plan.complete(group)
    delivered = plan.planner.pop_batch()
    assert delivered is not None
    rewards = [episode.reward for group in delivered for episode in group.results]
    assert sum(rewards) / len(rewards) == 0.5
    assert plan.planner.tally.pop_metrics(1) == {
        "completed/groups": 5,  # one that failed is not complete
        "completed/episodes": 10,
        "completed/tokens": 10,
        "completed/uniform": 0.4,
        "completed/reward_mean": 0.7,
        "discarded/uniform_tokens": 2,  # the other one was told before
        "discarded/uniform_s": 0,
        "discarded/failed_tokens": 0,
        "discarded/failed_s": 0,
    }
    assert plan.planner.tally.pop_metrics(1) == {}
