"""The benchmark of hosts: what a real trainer changes is small, and simulated hosts are placed as real ones are."""

from pathlib import Path

import pytest

from benchmarks.hosts_deltas import delta_bytes
from benchmarks.hosts_simulated import Link, simulate
from tests.tiny import bundled_folder

LINK = Link(bytes_per_s=100.0, bucket_bytes=100)


def test_simulated_hosts_take_as_long_as_their_tree():
    assert simulate(LINK, 400, 1).seconds == pytest.approx(4.0)
    few = simulate(LINK, 400, 8)  # a chain: 4 buckets, then one more for each host behind the first
    assert (few.seconds, few.origin_copies) == (pytest.approx(4.0 + 7.0), 1.0)
    many = simulate(LINK, 400, 256)  # a tree of 8 levels
    assert many.seconds <= 2 * (4 + 8)
    assert many.origin_copies == 2.0
    star = simulate(LINK, 400, 8, from_writer=True)
    assert (star.seconds, star.origin_copies) == (pytest.approx(32.0), 8.0)
    death = simulate(LINK, 400, 8, death=True)
    assert death.seconds <= 4.0 + 7.0 + 4.0
    assert 1.0 < death.origin_copies <= 2.0


@pytest.mark.long
@pytest.mark.usefixtures("process_group")
def test_deltas_of_a_real_trainer_are_small_and_restore_exactly(tmp_path: Path):
    version, full, deltas = delta_bytes(0, bundled_folder(), str(tmp_path), 1e-6, 2)
    assert 0.5 * version < full < version
    assert max(deltas) < 0.1 * version
    assert min(deltas) > 0.0005 * version, "something changed"
