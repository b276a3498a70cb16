"""The task stream: after a stop it repeats nothing and loses nothing."""

import json
from dataclasses import replace

import pytest

from forge_rl.data.adaptive import Adapting
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.types import Episode, Group, Score, Task
from tests.test_mixture import Counting


def _mixture() -> Mixture:
    return Mixture({"a": Counting("a"), "b": Counting("b")}, {"a": 2, "b": 1})


def _batch(stream: ResumableTaskStream) -> list[Task]:
    return [stream.draw_from(source) for source in stream.source_order(3)]


def _resumed(stream: ResumableTaskStream, pending: list[Task]) -> ResumableTaskStream:
    state, consumed = json.loads(json.dumps([stream.state(), stream.consumed(pending)]))
    resumed = ResumableTaskStream(_mixture())
    resumed.restore(state, consumed)
    return resumed


@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_undelivered_batches_are_drawn_again(delivered: int) -> None:
    stream = ResumableTaskStream(_mixture())
    batches = [_batch(stream) for _ in range(2)]
    for _ in range(delivered):
        stream.batch_delivered()
    pending = [task for batch in batches[delivered:] for task in batch]
    resumed = _resumed(stream, pending)
    assert [_batch(resumed) for _ in range(3 - delivered)] == [*batches[delivered:], _batch(stream)]


def test_an_adapting_mixture_sees_the_groups_that_are_replaced() -> None:
    def group_of(source: str, *rewards: float) -> Group:
        task = Task(id="1", source=source, messages=())
        return Group(task=task, episodes=tuple(Episode(task=task, turns=(), score=Score(total=r)) for r in rewards))

    mixture = _mixture()
    mixture.adapt(Adapting(adapt="success", momentum=0.5))
    stream = ResumableTaskStream(mixture)
    _batch(stream)
    stream.observe([group_of("a", 1.0, 1.0) for _ in range(8)])
    stream.batch_delivered([group_of("a", 1.0, 0.0), group_of("b", 1.0, 0.0)])
    assert mixture.shares["a"] < mixture.shares["b"]  # nearly all of its groups teach nothing


def test_a_consumed_task_is_passed_over_however_often_the_run_stops() -> None:
    stream = ResumableTaskStream(_mixture())
    first, second = _batch(stream), _batch(stream)
    assert first[0].id == "1"
    pending = [*first[1:], *second]
    resumed = _resumed(_resumed(stream, pending), [])  # stopped twice, the second time before anything was drawn
    drawn = [task for _ in range(3) for task in _batch(resumed)]
    assert [task.id for task in drawn if task.source == "a"] == ["2", "3", "4", "5", "6", "7"]
    assert [task.id for task in drawn if task.source == "b"] == ["1", "2", "3"]


class Repeating(Counting):
    def draw(self) -> Task:
        return replace(super().draw(), id="the only one")


def test_a_task_that_comes_again_is_skipped_as_often_as_consumed() -> None:
    stream = ResumableTaskStream(Mixture({"a": Repeating("a")}))
    first = _batch(stream)[0]
    state, consumed = stream.state(), stream.consumed([first])
    assert consumed == [["a", "the only one"]] * 2
    stream.restore(state, consumed)
    assert _batch(stream) == [first] * 3


def test_weights_are_those_of_the_stop_and_not_of_the_checkpoint() -> None:
    mixture = _mixture()
    stream = ResumableTaskStream(mixture)
    _batch(stream)
    mixture["b"] = 0
    assert stream.state()["weights"] == {"a": 2, "b": 0}


class Cycling(Counting):
    """Two tasks, which come again and again, as those of a small file do."""

    def draw(self) -> Task:
        return replace(super().draw(), id=str(self.index % 2))


def test_a_task_is_drawn_as_often_after_a_stop_as_without_one() -> None:
    def stream() -> ResumableTaskStream:
        return ResumableTaskStream(Mixture({"a": Cycling("a")}))

    first, resumed = stream(), stream()
    drawn = [task for _ in range(2) for task in _batch(first)]  # 1 0 1 0 1 0
    assert [task.id for task in drawn] == ["1", "0", "1", "0", "1", "0"]
    state, consumed = json.loads(json.dumps([first.state(), first.consumed([drawn[1], drawn[3]])]))
    resumed.restore(state, consumed)
    assert [task.id for _ in range(2) for task in _batch(resumed)] == ["0", "0", "1", "0", "1", "0"]


@pytest.mark.parametrize("kind", [Counting, Repeating])
def test_what_is_left_out_as_too_old_is_not_kept(kind: type[Counting]) -> None:
    stream = ResumableTaskStream(Mixture({"a": kind("a")}))
    pending: list[Task] = []
    for _ in range(50):  # of two batches drawn one is delivered, and of the other one task stays pending
        pending = [*_batch(stream), *_batch(stream)][5:]
        stream.batch_delivered(pending=pending)
        assert len(stream._checkpoints) <= 2
        assert len(stream._drawn) <= 6
    resumed = ResumableTaskStream(Mixture({"a": kind("a")}))
    resumed.restore(*json.loads(json.dumps([stream.state(), stream.consumed(pending)])))
    assert resumed.draw_from("a") == pending[0]
