"""The mixture: exact quotas, live weights, and resuming. Sources here just count."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_rl.data.adaptive import Adapting
from forge_rl.data.mixture import Mixture
from forge_rl.errors import TaskError
from forge_rl.types import Task


class Counting:
    def __init__(self, name: str) -> None:
        self._name, self.index = name, 0

    @property
    def name(self) -> str:
        return self._name

    def draw(self) -> Task:
        self.index += 1
        return Task(id=str(self.index), source=self.name, messages=())

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        return tuple(Task(id=f"held out {index}", source=self.name, messages=()) for index in range(tasks))

    def state(self) -> dict[str, object]:
        return {"index": self.index}

    def restore(self, state: Mapping[str, object]) -> None:
        index = state["index"]
        assert isinstance(index, int)
        self.index = index


def _mixture(**weights: float) -> Mixture:
    return Mixture({name: Counting(name) for name in weights}, weights)


def _quotas(mixture: Mixture, groups: int) -> dict[str, int]:
    """Groups of the next batch by source; a source without any is absent."""
    return dict(Counter(mixture.source_order(groups)))


def _draw(mixture: Mixture, groups: int) -> list[Task]:
    return [mixture.draw_from(source) for source in mixture.source_order(groups)]


def test_quotas_are_exact_when_shares_divide() -> None:
    assert _quotas(_mixture(a=3, b=1), 8) == {"a": 6, "b": 2}


def test_the_largest_remainder_gets_the_last_group() -> None:
    assert _quotas(_mixture(a=0.6, b=0.4), 4) == {"a": 2, "b": 2}  # 2.4 and 1.6


def test_what_rounding_leaves_is_carried_to_the_next_batch() -> None:
    mixture = _mixture(a=1, b=1, c=1)
    batches = [_quotas(mixture, 4) for _ in range(3)]
    assert [sum(batch.values()) for batch in batches] == [4, 4, 4]
    assert {name: sum(batch[name] for batch in batches) for name in "abc"} == {"a": 4, "b": 4, "c": 4}


def test_a_small_share_gets_its_turn() -> None:
    mixture = _mixture(a=0.95, b=0.05)
    assert sum(_quotas(mixture, 4).get("b", 0) for _ in range(25)) == 5


def test_a_weight_of_zero_gives_nothing() -> None:
    mixture = _mixture(a=1, b=1)
    _quotas(mixture, 3)
    mixture["b"] = 0
    assert [_quotas(mixture, 3) for _ in range(4)] == [{"a": 3}] * 4


def test_sources_that_are_left_out_give_nothing_and_the_others_keep_their_proportions() -> None:
    mixture, changes = _mixture(a=1, b=2, c=1), list[str]()
    mixture.changed.add(changes.append)
    mixture.leave_out(["b", "no source"])
    assert [_quotas(mixture, 4), mixture["b"]] == [{"a": 2, "c": 2}, 2]
    assert "draws nothing from b" in changes[-1]
    restored = _mixture(a=1, b=1, c=1)
    restored.restore(mixture.state())
    assert _quotas(restored, 4) == {"a": 1, "b": 2, "c": 1}, "whoever left it out says so again"
    with pytest.raises(TaskError, match="all weights without a, b, c are 0"):
        mixture.leave_out("abc")
    assert _quotas(mixture, 4) == {"a": 2, "c": 2}, "as before"
    with pytest.raises(TaskError, match="all weights without b are 0"):
        mixture.update({"a": 0, "c": 0})
    mixture.adapt(Adapting(adapt="success"))
    with pytest.raises(TaskError, match="all weights without b are 0"):
        mixture.update({"a": 0, "c": 0})
    assert set(_quotas(mixture, 4)) == {"a", "c"}
    mixture.adapt(Adapting())
    mixture.leave_out([])
    assert set(_quotas(mixture, 8)) == {"a", "b", "c"}


def test_weights_change_while_live() -> None:
    mixture = _mixture(math=1, words=1)
    mixture["math"] = 3
    assert mixture["math"] == 3
    assert _quotas(mixture, 8) == {"math": 6, "words": 2}


def test_weights_are_equal_when_not_given() -> None:
    assert Mixture({"a": Counting("a"), "b": Counting("b")}).shares == {"a": 0.5, "b": 0.5}


def test_the_sources_of_a_batch_are_interleaved() -> None:
    assert _mixture(a=1, b=1).source_order(4) == ["a", "b", "a", "b"]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_every_batch_is_full_and_the_drift_is_bounded(weights: list[float], batches: list[int]) -> None:
    mixture = _mixture(**{f"s{index}": weight for index, weight in enumerate(weights)})
    given_out: Counter[str] = Counter()
    for groups in batches:
        quotas = _quotas(mixture, groups)
        assert sum(quotas.values()) == groups
        assert min(quotas.values()) >= 0
        given_out.update(quotas)
    for name, share in mixture.shares.items():
        assert abs(given_out[name] - share * sum(batches)) < len(weights)


def test_a_restored_mixture_goes_on_where_it_stood() -> None:
    mixture = _mixture(a=0.7, b=0.3)
    mixture["a"] = 0.5
    _draw(mixture, 3)
    state = json.loads(json.dumps(mixture.state()))
    expected = [_draw(mixture, 3) for _ in range(4)]
    resumed = _mixture(a=0.7, b=0.3)
    resumed.restore(state)
    assert resumed["a"] == 0.5
    assert [_draw(resumed, 3) for _ in range(4)] == expected


def test_the_state_of_other_sources_is_refused() -> None:
    with pytest.raises(TaskError, match=r"\['a', 'b'\], this one \['a'\]"):
        _mixture(a=1).restore(_mixture(a=1, b=1).state())


def test_a_state_is_a_copy_and_must_be_json() -> None:
    mixture = _mixture(a=1, b=1)
    remaining = [3, 4]
    mixture.sources["b"].state = lambda: {"remaining": remaining}  # type: ignore[method-assign]
    state = mixture.state()
    remaining.pop()
    assert state["sources"]["b"] == {"remaining": [3, 4]}  # type: ignore[index]
    remaining.append(np.int64(3))  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"the state of source 'b' is not JSON: .*int64"):
        mixture.state()


@pytest.mark.parametrize("adapt", ["off", "success"])
def test_several_weights_are_set_at_once_or_none_is(adapt: Literal["off", "success"]) -> None:
    mixture = _mixture(a=1, b=1, c=1)
    mixture.adapt(Adapting(adapt=adapt))
    before = mixture.state()
    with pytest.raises(TaskError):
        mixture.update({"a": 0.5, "b": -1})
    with pytest.raises(TaskError):
        mixture.update({"a": 0.5, "d": 0.1})
    assert mixture.state() == before
    mixture.update({"a": 0.5, "b": 0.25})
    assert (mixture["a"], mixture["b"]) == (0.5, 0.25)


def test_adapting_anew_keeps_a_share_above_zero() -> None:
    mixture = _mixture(a=1, b=0)
    mixture.adapt(Adapting(adapt="success"))
    mixture["b"] = 0.5
    mixture.leave_out(["a"])
    before = mixture.state()
    with pytest.raises(TaskError, match="all weights without a are 0"):
        mixture.adapt(Adapting(adapt="success", target=0.7))
    assert mixture.state() == before
    assert _quotas(mixture, 4) == {"b": 4}


def test_held_out_tasks_follow_the_shares() -> None:
    mixture = _mixture(a=3, b=1)
    _quotas(mixture, 3)  # leaves a remainder, which evaluation must not see
    assert Counter(task.source for task in mixture.held_out(8)) == {"a": 6, "b": 2}


def test_the_repr_is_a_table() -> None:
    assert repr(_mixture(math=3, words=1)) == ("source  weight   share\nmath         3   75.0%\nwords        1   25.0%")


@pytest.mark.parametrize("adapt", ["off", "success"])
def test_weights_computed_with_numpy_or_pytorch_are_json(adapt: Literal["off", "success"]) -> None:
    mixture = _mixture(a=np.float32(0.5), b=np.int64(2))  # type: ignore[arg-type]
    mixture.adapt(Adapting(adapt=adapt, target=np.float32(0.5)))  # type: ignore[arg-type]
    mixture["a"] = np.float32(0.25)  # type: ignore[assignment]
    assert mixture["a"] == 0.25
    mixture.update({"b": torch.tensor(0.5)})  # type: ignore[dict-item]
    resumed = _mixture(a=1, b=1)
    resumed.restore(json.loads(json.dumps(mixture.state())))
    assert resumed.state() == mixture.state()
    assert (resumed["a"], resumed["b"]) == (0.25, 0.5)


@pytest.mark.parametrize("adapt", ["off", "success"])
@pytest.mark.parametrize("weight", [True, "0.5", None, [0.5, 0.5], torch.ones(2), np.ones(2)])
def test_a_weight_that_is_no_number_is_refused(weight: object, adapt: Literal["off", "success"]) -> None:
    mixture = _mixture(a=1, b=1)
    mixture.adapt(Adapting(adapt=adapt))
    before = mixture.state()
    with pytest.raises(TaskError, match=r"the weight of 'b' is .*"):
        mixture.update({"a": 0.25, "b": weight})  # type: ignore[dict-item]
    assert mixture.state() == before


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    mixture = _mixture(a=1, b=1)
    with pytest.raises(TaskError, match="the weight of 'a' is"):
        mixture["a"] = weight
    assert mixture["a"] == 1


def test_not_all_weights_may_be_zero() -> None:
    with pytest.raises(TaskError, match="all weights are 0"):
        _mixture(a=1)["a"] = 0


def test_an_unknown_source_gets_those_there_are() -> None:
    with pytest.raises(TaskError, match=r"(?s)no source named 'c'.*a, b"):
        _mixture(a=1, b=1)["c"] = 1


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="has no sources"):
        Mixture({}, {})


def test_epochs_are_those_of_sources_whose_tasks_come_again() -> None:
    mixture = _mixture(a=1, b=1)
    source = mixture.sources["b"]
    source.epoch, source.bad_rows = 1.5, 2  # type: ignore[attr-defined]
    assert mixture.epochs == {"b": 1.5}
    assert mixture.metrics() == {"data/b/epoch": 1.5, "data/b/bad_rows": 2.0, "mixture/a": 0.5, "mixture/b": 0.5}
