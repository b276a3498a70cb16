"""Routing: the serving replica with the least load."""

from dataclasses import dataclass

import pytest

from forge_rl.errors import ServiceError
from forge_rl.runtime.router import least_loaded


@dataclass
class Replica:
    index: int
    load: int
    serving: bool = True


def test_the_replica_with_the_least_load_is_chosen():
    assert least_loaded("generator", [Replica(0, 3), Replica(1, 1), Replica(2, 2)]).index == 1


def test_among_equals_the_first_is_chosen_in_whatever_order_they_come():
    assert least_loaded("generator", [Replica(2, 1), Replica(0, 5), Replica(1, 1)]).index == 1


def test_a_replica_that_does_not_serve_is_skipped_although_it_has_no_load():
    assert least_loaded("generator", [Replica(0, 0, serving=False), Replica(1, 9)]).index == 1


@pytest.mark.parametrize("replicas", [[], [Replica(0, 0, serving=False)]])
def test_without_a_serving_replica_the_service_is_named(replicas: list[Replica]):
    with pytest.raises(ServiceError, match="no replica is alive") as caught:
        least_loaded("generator", replicas)
    assert caught.value.service == "generator"
