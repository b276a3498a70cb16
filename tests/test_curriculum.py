"""Difficulty pools: shares of what is drawn, solve rates of a bounded number of tasks, resuming, and crafted states."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_rl.data.curriculum import Curriculum, DifficultyPools
from forge_rl.data.mixture import Mixture
from forge_rl.data.solve_rates import SolveRates
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import ConfigError, TaskError
from forge_rl.types import Episode, Group, Score, Task
from tests.test_mixture import Counting

ON = Curriculum(pools="solve_rate", easy_share=0.25, hard_share=0.25)


@pytest.fixture(autouse=True)
def last_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's solve rate is its last group's, so that pools can be worked out by hand."""
    monkeypatch.setattr("forge_rl.data.curriculum._MOMENTUM", 0.0)


class Cycling(Counting):
    """Tasks 0 to 99, again and again."""

    def draw(self) -> Task:
        return replace(super().draw(), id=str((self.index - 1) % 100))


def solved(source: str, name: object, *rewards: float, **parts: float) -> Group:
    task = Task(id=str(name), source=source, messages=())
    ended = [Episode(task=task, turns=(), score=Score(total=reward, parts=parts)) for reward in rewards]
    return Group(task=task, episodes=tuple(ended))


def difficulty(name: int) -> float:
    """Of ten tasks, six are easy, three normal and one hard."""
    return 1.0 if name % 10 < 6 else 0.5 if name % 10 < 9 else 0.0


def learned(config: Curriculum = ON, rate: Callable[[int], float] = difficulty, source: str = "a") -> DifficultyPools:
    pools = DifficultyPools(config)
    pools.observe(solved(source, name, rate(name)) for name in range(100))
    return pools


def chosen(pools: DifficultyPools, count: int, source: Counting | None = None) -> Counter[str]:
    source = source or Cycling("a")
    tasks = [pools.choose(source.name, source.draw) for _ in range(count)]
    return Counter(str(pools.pool_of(task)) for task in tasks)


@pytest.mark.parametrize(
    ("easy", "hard", "expected"),
    [
        (0.25, 0.25, {"normal": 40, "easy": 20, "hard": 20}),
        (0.0, 0.5, {"normal": 40, "hard": 40}),
        (0.0, 0.0, {"normal": 80}),
        (0.5, 0.5, {"easy": 40, "hard": 40}),
    ],
)
def test_pools_have_their_shares_of_what_is_chosen(easy: float, hard: float, expected: dict[str, int]):
    pools = learned(replace(ON, easy_share=easy, hard_share=hard))
    assert chosen(pools, 80) == expected
    first = chosen(pools, 8)  # of each batch, too
    assert all(abs(first[pool] - count / 10) <= 1 for pool, count in expected.items())


def test_new_tasks_are_taken_as_they_come():
    source = Cycling("a")
    pools = DifficultyPools(ON)
    assert [pools.choose("a", source.draw).id for _ in range(100)] == [str(name) for name in range(100)]
    assert pools.metrics()["curriculum/new"] == 100


def test_a_pool_that_a_source_lacks_is_replaced_and_rarely_sought():
    pools, source = learned(rate=lambda name: 0.5), Cycling("a")
    assert chosen(pools, 100, source) == {"normal": 100}
    assert source.index <= 100 + 100 / 10 * 2 * 100  # a hundred passed over for each of two pools, every ten draws
    mastered = learned(replace(ON, easy_share=0.0), rate=lambda name: 1.0)
    assert chosen(mastered, 50) == {"easy": 50}, "the mixture stays exact, even if all of a source is easy"


def test_a_rare_pool_is_found_once_it_is_there():
    pools, source = learned(rate=lambda name: 0.5), Cycling("a")
    chosen(pools, 500, source)
    pools.observe(solved("a", name, 0.0) for name in range(50))
    counts = chosen(pools, 400, source)
    assert 110 <= counts["hard"] <= 160, "its share and some of easy's, without a debt from before"


@pytest.mark.parametrize(("right", "pool"), [(0, "hard"), (1, "hard"), (2, "normal"), (3, "normal"), (4, "easy")])
def test_bounds_belong_to_their_pools_although_rates_are_rounded(right: int, pool: str):
    pools = DifficultyPools(Curriculum(pools="solve_rate"))
    pools.observe([solved("a", 1, *[1.0] * right, *[0.0] * (5 - right))])
    assert pools.pool_of(Task(id="1", source="a", messages=())) == pool
    assert pools.metrics()[f"curriculum/{pool}_tasks"] == 1


def test_sources_have_pools_of_their_own():
    pools = learned(source="a")
    assert pools.pool_of(Task(id="9", source="a", messages=())) == "hard"
    assert pools.pool_of(Task(id="9", source="b", messages=())) is None


def test_the_solve_rate_is_a_running_mean_of_clipped_rewards_or_of_a_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # the momentum of a run
    pools = DifficultyPools(replace(ON, easy_from=0.75, hard_to=0.74))
    task = Task(id="1", source="a", messages=())
    pools.observe([solved("a", 1, 3.0, -5.0, 1.0, 1.0)])  # 0.75
    assert pools.pool_of(task) == "easy"
    pools.observe([solved("a", 1, 0.0, 1.0)])  # 0.625
    assert pools.pool_of(task) == "hard"
    by_part = DifficultyPools(replace(ON, part="math"))
    by_part.observe([solved("a", 1, -2.0, -3.0, math=1.0)])
    assert by_part.pool_of(task) == "easy"
    with pytest.raises(ConfigError, match=r"--curriculum.part is math, which is not a part .* of a") as caught:
        by_part.observe([solved("a", 1, 1.0, format=1.0)])
    assert caught.value.hint == "its parts: format"


def test_metrics_count_tasks_by_pool_since_the_last_call():
    pools = learned()
    chosen(pools, 4)
    values = pools.metrics()
    assert {name: values[f"curriculum/{name}_tasks"] for name in ("easy", "normal", "hard")} == {
        "easy": 60,
        "normal": 30,
        "hard": 10,
    }
    assert [values[f"curriculum/{name}"] for name in ("easy", "normal", "hard", "new")] == [1, 2, 1, 0]
    assert values["curriculum/passed_over"] > 0
    assert pools.metrics()["curriculum/easy"] == 0


def test_it_forgets_the_tasks_first_seen_beyond_its_bound():
    rates = SolveRates(3)
    for key, rate in ((1, 0.1), (2, 0.2), (3, 0.3), (1, 0.9), (4, 0.4), (5, 0.5)):
        rates[key] = rate
    assert [rates.get(key) is None for key in (1, 2, 3, 4, 5)] == [True, True, False, False, False]
    assert len(rates) == 3
    assert rates.count(0.35, 0.5) == (1, 1, 1)


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 9), st.floats(0, 1)), max_size=60), st.integers(1, 9)
)
def test_restored_solve_rates_are_the_same_and_forget_in_the_same_order(changes, max_tasks):
    rates = SolveRates(max_tasks)
    for key, rate in changes:
        rates[key] = rate
    restored = SolveRates.restored(json.loads(json.dumps(rates.state())), max_tasks)
    assert restored.state() == rates.state()
    for key in range(20):
        rates[key] = restored[key] = 0.5
        assert restored.state() == rates.state()
    for key, _ in changes:
        assert restored.get(key) == rates.get(key)
    fewer = SolveRates.restored(rates.state(), 1)
    assert len(fewer) == 1
    assert fewer.get(19) == 0.5


def test_a_million_tasks_take_sixteen_bytes_each_in_a_checkpoint():
    rates = SolveRates(10_000)
    for key in range(20_000):
        rates[key] = 0.5
    assert len(json.dumps(rates.state())) <= 16.1 * 10_000


def stream(pools: DifficultyPools | None, weights: tuple[int, int] = (2, 1)) -> ResumableTaskStream:
    return ResumableTaskStream(
        Mixture({"a": Cycling("a"), "b": Cycling("b")}, dict(zip("ab", weights, strict=True))), pools
    )


def batch(tasks: ResumableTaskStream, size: int = 6) -> list[Task]:
    return [tasks.draw_from(source) for source in tasks.source_order(size)]


def results(drawn: list[Task]) -> list[Group]:
    return [solved(task.source, task.id, difficulty(int(task.id))) for task in drawn]


def saved(tasks: ResumableTaskStream, pending: list[Task]) -> tuple[dict[str, Any], list[list[str]]]:
    state, consumed = json.loads(json.dumps([tasks.state(), tasks.consumed(pending)]))
    return state, consumed


def test_the_mixture_stays_exact_and_a_resumed_run_draws_the_same_tasks():
    whole_stream = stream(DifficultyPools(ON))
    for _ in range(61):  # both sources come again
        drawn = batch(whole_stream, 9)
        assert Counter(task.source for task in drawn) == {"a": 6, "b": 3}
        whole_stream.batch_delivered(results(drawn))
    state, consumed = saved(whole_stream, [])
    assert consumed == []
    resumed = stream(DifficultyPools(ON))
    resumed.restore(state, consumed)
    assert saved(resumed, []) == (state, consumed)
    for _ in range(60):
        drawn = batch(whole_stream, 9)
        assert batch(resumed, 9) == drawn
        for task_stream in (whole_stream, resumed):
            task_stream.batch_delivered(results(drawn))
    assert saved(resumed, []) == saved(whole_stream, [])


@pytest.mark.parametrize("done", range(1, 14))
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_undelivered_batches_are_drawn_again_although_difficulties_changed(done: int, rate: float):
    tasks = stream(learned())
    tasks.batch_delivered(results(batch(tasks, 5)))
    drawn = [*batch(tasks, 7), *batch(tasks, 7)]
    tasks.observe([solved(task.source, task.id, rate) for task in drawn[:done]])
    resumed = stream(DifficultyPools(ON))
    resumed.restore(*saved(tasks, drawn[done:]))
    resumed_tasks = [*batch(resumed, 7), *batch(resumed, 7)]
    for source in "ab":
        pending = [task for task in drawn[done:] if task.source == source]
        assert [task for task in resumed_tasks if task.source == source][: len(pending)] == pending


def test_states_with_and_without_a_curriculum_are_interchangeable():
    plain, pools = stream(None), stream(learned())
    pools.restore(*saved(plain, []))
    assert pools.metrics()["curriculum/easy_tasks"] == 0
    plain.restore(*saved(stream(learned()), []))
    assert plain.metrics() == {}


GOOD = learned().rates()
CRAFTED = {
    "no mapping": (["solve_rates"], 3),
    "no keys": (["solve_rates"], {"rates": GOOD["rates"]}),
    "not base64": (["solve_rates", "keys"], "%%%"),
    "half a number": (["solve_rates", "keys"], "AAAA"),
    "fewer rates": (["solve_rates", "rates"], ""),
    "a rate above one": (["solve_rates"], {"keys": "AQAAAAAAAAA=", "rates": "AAAAQA=="}),
    "a rate that is no number": (["solve_rates"], {"keys": "AQAAAAAAAAA=", "rates": "AADAfw=="}),
    "a key twice": (["solve_rates"], {"keys": "AQAAAAAAAAABAAAAAAAAAA==", "rates": "AAAAAAAAAAA="}),
    "no pools": (["pools"], None),
    "pools of no mapping": (["pools", "owed"], {"a": 1}),
    "an unknown pool": (["pools", "owed"], {"a": {"hardest": 0.5}}),
    "a debt without end": (["pools", "owed"], {"a": {"hard": 1e300}}),
    "a debt that is no number": (["pools", "owed"], {"a": {"hard": float("nan")}}),
    "a rest without end": (["pools", "resting"], {"a": {"hard": 10**9}}),
    "a rest that is true": (["pools", "resting"], {"a": {"hard": True}}),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_state_is_refused_and_changes_nothing(name: str):
    path, value = CRAFTED[name]
    tasks = stream(learned())
    batch(tasks)
    state, consumed = saved(tasks, [])
    *parents, last = path
    place = state
    for parent in parents:
        place = place[parent]
    place[last] = value
    fresh = stream(learned())
    before = saved(fresh, [])
    with pytest.raises(TaskError, match="the saved state of the curriculum is malformed"):
        fresh.restore(state, consumed)
    assert saved(fresh, []) == before


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"easy_share": 0.6, "hard_share": 0.6}, "--curriculum.easy-share 0.6 and --curriculum.hard-share 0.6"),
        ({"easy_share": -0.1}, "--curriculum.easy-share is -0.1"),
        ({"easy_share": float("nan")}, "--curriculum.easy-share is nan"),
        ({"hard_to": 0.8}, "--curriculum.hard-to is 0.8, not below --curriculum.easy-from 0.8"),
        ({"easy_from": 1.5}, "--curriculum.easy-from is 1.5"),
    ],
)
def test_settings_that_cannot_be_name_their_flag(settings: dict[str, Any], flag: str):
    with pytest.raises(ConfigError, match=flag):
        Curriculum(**settings)


def test_keys_do_not_collide_across_sources_and_ids():
    pools = DifficultyPools(ON)
    pools.observe([solved("a", "b/c", 1.0), solved("a/b", "c", 0.0)])
    assert np.array_equal(list(pools._rates.count(0.2, 0.8)), [1, 0, 1])
