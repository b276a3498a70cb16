"""Versions when the run goes back: what came after is forgotten, and its numbers come again."""

import pytest

from forge_rl.errors import WeightsError
from tests.fake_versions import bytes_of, index, of_epoch, publish
from tests.fakes import manifest_of_bytes


def test_going_back_forgets_what_came_after_and_its_numbers_come_again():
    versions = index(keep_versions=9)
    for version in (1, 2, 3):
        publish(versions, version)
    assert versions.rollback(1) == ("2/0", "3/0")
    assert versions.latest == 1
    assert (bytes_of(versions), versions.epoch) == (10, 1)
    with pytest.raises(WeightsError, match="there is no version 2 of the weights; held: 1"):
        versions.lease("", 2)
    base, freed = versions.begin(2)
    assert (base, freed) == (manifest_of_bytes(1, 10), ())
    assert versions.commit(of_epoch(1, 2)) == ()
    assert versions.lease("a") == of_epoch(1, 2)
    assert versions.rollback(0) == ("1/0",)  # 2 is being read
    assert versions.latest is None
    assert versions.begin(1) == (None, ())


def test_going_back_to_the_latest_forgets_nothing():
    versions = index()
    publish(versions, 3)
    assert versions.rollback(3) == versions.rollback(7) == ()
    assert versions.latest == 3


def test_a_forgotten_version_stays_while_read_next_to_its_namesake():
    versions = index(keep_versions=1)
    publish(versions, 1)
    versions.lease("a", 1)
    versions.lease("b", 1)
    assert versions.rollback(0) == ()
    assert versions.needs("1/0")
    with pytest.raises(WeightsError, match="held: none"):
        versions.lease("", 1)
    versions.begin(1)
    versions.commit(of_epoch(1, 1))
    assert versions.lease("new", 1).epoch == 1
    assert bytes_of(versions) == 20
    assert versions.release("a") == ()
    assert versions.release("b") == ("1/0",)
    assert not versions.needs("1/0")
    versions.begin(2)
    assert versions.commit(of_epoch(1, 2)) == ()
    assert versions.release("new") == ("1/1.0",)


def test_a_publish_begun_before_a_rollback_cannot_be_committed():
    versions = index()
    publish(versions, 1)
    versions.begin(2)
    versions.rollback(1)
    with pytest.raises(WeightsError, match="version 2 was not begun, or was aborted"):
        versions.commit(manifest_of_bytes(2, 10))
    versions.begin(2)
    with pytest.raises(WeightsError, match="version 2 was not begun, or was aborted"):
        versions.commit(manifest_of_bytes(2, 10))
    assert versions.abort(2, epoch=0) == ()
    versions.commit(of_epoch(1, 2))
    assert versions.lease("a") == of_epoch(1, 2)
