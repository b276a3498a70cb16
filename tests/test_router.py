"""Routing: the living replica with the fewest requests."""

from dataclasses import dataclass

import pytest

from forge_rl.errors import ServiceError
from forge_rl.runtime.router import least_loaded


@dataclass
class Replica:
    index: int
    in_flight: int
    alive: bool = True


def test_the_replica_with_the_fewest_requests_is_chosen():
    assert least_loaded("generator", [Replica(0, 3), Replica(1, 1), Replica(2, 2)]) == 1


def test_among_equals_the_first_is_chosen_in_whatever_order_they_come():
    assert least_loaded("generator", [Replica(2, 1), Replica(0, 5), Replica(1, 1)]) == 1


def test_a_dead_replica_is_skipped_although_it_has_no_load():
    assert least_loaded("generator", [Replica(0, 0, alive=False), Replica(1, 9)]) == 1


@pytest.mark.parametrize("replicas", [[], [Replica(0, 0, alive=False)]])
def test_without_a_living_replica_the_service_is_named(replicas: list[Replica]):
    with pytest.raises(ServiceError, match="no replica is alive") as caught:
        least_loaded("generator", replicas)
    assert caught.value.service == "generator"
