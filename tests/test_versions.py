"""The rules of versions, one by one."""

import pytest

from forge_rl.errors import WeightsError
from tests.fake_versions import bytes_of, index, publish
from tests.fakes import manifest_of, manifest_of_bytes


def test_a_version_is_invisible_until_it_is_committed():
    versions = index()
    versions.begin(3)
    assert versions.latest is None
    with pytest.raises(WeightsError, match="there is no version 3 of the weights; held: none"):
        versions.lease("", 3)
    versions.commit(manifest_of_bytes(3, 10))
    assert versions.latest == 3
    assert versions.lease("a").version == 3


@pytest.mark.parametrize("version", [3, 2, 0])
def test_versions_are_immutable_and_only_grow(version: int):
    versions = index()
    publish(versions, 3)
    with pytest.raises(WeightsError, match=f"version {version} is not newer than the latest, 3"):
        versions.begin(version)


def test_two_cannot_write_the_same_version():
    versions = index()
    versions.begin(1)
    with pytest.raises(WeightsError, match="version 1 is already being written"):
        versions.begin(1)


def test_a_commit_needs_its_begin():
    versions = index()
    with pytest.raises(WeightsError, match="version 1 was not begun, or was aborted"):
        versions.commit(manifest_of_bytes(1, 10))
    publish(versions, 1)
    with pytest.raises(WeightsError, match="version 1 was not begun"):
        versions.commit(manifest_of_bytes(1, 10))


def test_an_aborted_version_stays_invisible_and_can_be_begun_again():
    versions = index()
    versions.begin(1)
    versions.abort(1)
    assert versions.latest is None
    with pytest.raises(WeightsError, match="was aborted"):
        versions.commit(manifest_of_bytes(1, 10))
    publish(versions, 1)
    assert versions.latest == 1


def test_a_newer_version_that_came_first_is_not_taken_back():
    versions = index()
    versions.begin(1)
    versions.begin(2)
    versions.commit(manifest_of_bytes(2, 10))
    with pytest.raises(WeightsError, match="version 1 comes too late: 2 was committed meanwhile"):
        versions.commit(manifest_of_bytes(1, 10))
    assert versions.latest == 2
    versions.abort(1)
    assert bytes_of(versions) == 10


def test_a_version_that_shares_tensors_follows_the_one_that_it_shares_with():
    versions = index()
    publish(versions, 1)
    versions.begin(2)
    versions.begin(3)
    versions.commit(manifest_of_bytes(2, 10))
    with pytest.raises(WeightsError, match="version 3 shares tensors with 1, and 2 was committed meanwhile"):
        versions.commit(manifest_of(3, {"3/0": 5, "1/0": 10}))
    assert versions.latest == 2
    versions.commit(manifest_of_bytes(3, 10))  # all of its own
    assert versions.latest == 3


def test_an_abort_of_what_is_not_being_written_changes_nothing():
    versions = index(keep_versions=1)
    publish(versions, 1)
    assert versions.abort(1) == ()
    assert versions.abort(2) == ()
    publish(versions, 2)
    assert versions.latest == 2


def test_begin_makes_room_for_what_comes():
    versions = index(keep_versions=2)
    assert publish(versions, 1) == ((), ())
    assert publish(versions, 2) == ((), ())
    assert publish(versions, 3) == (("1/0",), ())
    assert publish(versions, 5) == (("2/0",), ())
    assert bytes_of(versions) == 20


def test_the_latest_stays_while_the_next_one_is_written():
    versions = index(keep_versions=1, keep_bytes=1)
    publish(versions, 1)
    base, freed = versions.begin(2)
    assert base == manifest_of_bytes(1, 10)
    assert freed == ()
    assert versions.lease("a").version == 1
    assert versions.release("a") == ()
    assert versions.commit(manifest_of_bytes(2, 10)) == ("1/0",)


def test_what_was_given_up_for_an_aborted_version_does_not_come_back():
    versions = index(keep_versions=2)
    publish(versions, 1)
    publish(versions, 2)
    assert versions.begin(3)[1] == ("1/0",)
    assert versions.abort(3) == ()
    with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2"):
        versions.lease("", 1)
    assert versions.begin(3)[1] == ()


def test_retention_keeps_within_its_bytes_but_always_the_newest():
    versions = index(keep_versions=9, keep_bytes=25)
    assert publish(versions, 1) == ((), ())
    assert publish(versions, 2) == ((), ())
    assert publish(versions, 3) == (("1/0",), ())  # 2 and 3 are 20 bytes
    assert publish(versions, 4, size=26) == (("2/0",), ("3/0",))  # it was not expected to be this large
    assert versions.lease("a").version == 4


def test_a_lease_keeps_a_version_until_its_last_reader_ends():
    versions = index(keep_versions=1)
    publish(versions, 1)
    versions.lease("a", 1)
    versions.lease("b", 1)
    assert publish(versions, 2) == ((), ())
    assert versions.release("a") == ()
    assert versions.lease("c", 1).version == 1
    assert versions.release("b") == ()
    assert versions.release("b") == (), "it has ended"
    assert versions.release("c") == ("1/0",)
    with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2"):
        versions.lease("", 1)


def test_a_leased_version_does_not_take_the_place_of_a_kept_one():
    versions = index(keep_versions=2)
    publish(versions, 1)
    publish(versions, 2)
    versions.lease("a", 2)
    assert publish(versions, 3) == ((), ())  # 1 and 3 are kept, 2 is being read
    assert versions.release("a") == ("1/0",)


def test_buckets_are_kept_while_any_version_holds_a_tensor_in_them():
    versions = index(keep_versions=2)
    publish(versions, 1, size=100)
    publish(versions, 2, size=10, shared={"1/0": 100})
    assert bytes_of(versions) == 110
    assert publish(versions, 3, size=10, shared={"1/0": 100}) == ((), ())  # 1 is gone, its bucket is not
    assert bytes_of(versions) == 120
    with pytest.raises(WeightsError, match="held: 2, 3"):
        versions.lease("", 1)
    assert publish(versions, 4, size=10, shared={"1/0": 100}) == (("2/0",), ())
    assert bytes_of(versions) == 120
    assert publish(versions, 5, size=100) == (("3/0",), ())
    assert bytes_of(versions) == 210  # 4 still needs 1/0
    assert publish(versions, 6, size=100) == (("4/0", "1/0"), ())
    assert bytes_of(versions) == 200


def test_shared_buckets_stay_while_the_next_version_is_written():
    versions = index(keep_versions=1)
    publish(versions, 1)
    versions.begin(2)  # would share 1/0
    versions.begin(3)
    assert versions.commit(manifest_of_bytes(3, 10)) == ()  # 1 goes, its bucket does not
    with pytest.raises(WeightsError, match="held: 3"):
        versions.lease("", 1)
    assert versions.abort(2) == ("1/0",)
