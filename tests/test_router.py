"""Routing: the serving replica with the least load."""

from dataclasses import dataclass

import pytest

from forge_rl.runtime.service import least_loaded


@dataclass
class Replica:
    index: int
    load: int
    serving: bool = True


@pytest.mark.parametrize(
    ("replicas", "index"),
    [
        ([Replica(0, 3), Replica(1, 1), Replica(2, 2)], 1),
        ([Replica(2, 1), Replica(0, 5), Replica(1, 1)], 1),  # the lowest index among equals, in any order
        ([Replica(0, 0, serving=False), Replica(1, 9)], 1),  # a dead one has no load
    ],
)
def test_the_serving_replica_with_the_least_load_is_chosen(replicas: list[Replica], index: int):
    assert least_loaded(replicas).index == index


@pytest.mark.parametrize("replicas", [[], [Replica(0, 0, serving=False)]])
def test_without_a_serving_replica_none_is_chosen(replicas: list[Replica]):
    assert least_loaded(replicas) is None
