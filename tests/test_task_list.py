"""Tasks that an environment brings: drawn by the seed, resumed, split by their content."""

from __future__ import annotations

import json

import pytest

from forge_rl.envs.task_list import TaskList, seeded, split
from forge_rl.errors import TaskError
from forge_rl.types import Task


def tasks(count: int, kinds: int) -> list[Task]:
    return [
        Task(id=str(number), source="s", messages=({"role": "user", "content": f"kind {number % kinds}"},))
        for number in range(count)
    ]


def test_each_epoch_has_every_task_once_in_seeded_order_and_resumes():
    task_list = tasks(7, 7)
    source = TaskList("s", task_list, (), seed=1)
    drawn = [source.draw().id for _ in range(10)]
    state = json.loads(json.dumps(source.state()))
    assert (sorted(drawn[:7]), len(set(drawn[7:]))) == (sorted(task.id for task in task_list), 3)
    rest = [source.draw().id for _ in range(20)]
    other = TaskList("s", task_list, (), seed=1)
    other.restore(state)
    assert [other.draw().id for _ in range(20)] == rest
    assert [TaskList("s", task_list, (), seed=2).draw().id for _ in range(1)] + [source.epoch] == [
        TaskList("s", task_list, (), seed=2).draw().id,
        30 / 7,
    ]
    with pytest.raises(TaskError, match="it has 6 tasks"):
        TaskList("s", task_list[1:], (), seed=1).restore(state)


def test_tasks_of_the_same_content_are_not_on_both_sides():
    train, held_out = split(tasks(60, 20), 0.2, key=lambda task: task.prompt)
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert (len({task.prompt for task in (*train, *held_out)}), len(held_out)) == (
        20,
        len({t.prompt for t in held_out}),
    )
    assert 0 < len(held_out) < 10
    assert split(tasks(60, 20), 0.0, key=lambda task: task.prompt)[1] == []
    assert [len(side) for side in split(tasks(2, 2), 0.01, key=lambda task: task.prompt)] == [1, 1]


def test_held_out_seeds_are_separate_and_some_must_be_trained_on():
    source = seeded("w", tasks=3, held_out=2, prompt="Play.", seed=0)
    assert {source.draw().truth["seed"] for _ in range(9)} == {2, 3, 4}
    assert [task.truth["seed"] for task in source.held_out(5)] == [0, 1]
    with pytest.raises(TaskError, match="no tasks to train on"):
        TaskList("s", [], tasks(1, 1), seed=0)
