"""The rules of versions, one by one."""

import asyncio

import pytest

from forge_rl.errors import WeightsError
from tests.fake_versions import bytes_of, index, publish, run, run_tasks
from tests.fakes import manifest_of, manifest_of_bytes


def test_a_version_is_invisible_until_it_is_committed():
    async def main() -> None:
        versions = index()
        versions.begin(3)
        assert versions.latest is None
        with pytest.raises(WeightsError, match="there is no version 3 of the weights; held: none"):
            versions.lease(3)
        await versions.commit(manifest_of_bytes(3, 10))
        assert versions.latest == 3
        assert versions.lease().version == 3

    run(main())


@pytest.mark.parametrize("version", [3, 2, 0])
def test_versions_are_immutable_and_only_grow(version: int):
    async def main() -> None:
        versions = index()
        await publish(versions, 3)
        with pytest.raises(WeightsError, match=f"version {version} is not newer than the latest, 3"):
            versions.begin(version)

    run(main())


def test_two_cannot_write_the_same_version():
    versions = index()
    versions.begin(1)
    with pytest.raises(WeightsError, match="version 1 is already being written"):
        versions.begin(1)


def test_a_commit_needs_its_begin():
    async def main() -> None:
        versions = index()
        with pytest.raises(WeightsError, match="version 1 was not begun, or was aborted"):
            await versions.commit(manifest_of_bytes(1, 10))
        await publish(versions, 1)
        with pytest.raises(WeightsError, match="version 1 was not begun"):
            await versions.commit(manifest_of_bytes(1, 10))

    run(main())


def test_an_aborted_version_stays_invisible_and_can_be_begun_again():
    async def main() -> None:
        versions = index()
        versions.begin(1)
        await versions.abort(1, "a rank died")
        assert versions.latest is None
        with pytest.raises(WeightsError, match="was aborted"):
            await versions.commit(manifest_of_bytes(1, 10))
        await publish(versions, 1)
        assert versions.latest == 1

    run(main())


def test_waiters_are_woken_by_the_commit():
    async def main() -> None:
        versions = index()
        waiters = [asyncio.ensure_future(versions.wait_for(version)) for version in (1, 1, 2, 4)]
        await run_tasks()
        await publish(versions, 2)
        await run_tasks()
        assert [waiter.done() for waiter in waiters] == [True, True, True, False]
        assert [waiter.result() for waiter in waiters[:3]] == [2, 2, 2]
        await publish(versions, 4)
        assert await waiters[3] == 4

    run(main())


def test_waiting_takes_no_turn_of_the_loop_while_nothing_happens():
    async def main() -> None:
        versions = index()
        waiter = asyncio.ensure_future(versions.wait_for(1))
        await run_tasks()
        loop = asyncio.get_running_loop()
        assert not loop._ready, "a waiter polls"  # type: ignore[attr-defined]
        assert not loop._scheduled or all(handle.when() > loop.time() + 1 for handle in loop._scheduled)  # type: ignore[attr-defined]
        await publish(versions, 1)
        assert await waiter == 1

    run(main())


def test_a_version_that_exists_is_not_waited_for():
    async def main() -> None:
        versions = index()
        await publish(versions, 5)
        assert await versions.wait_for(3) == 5
        assert await versions.wait_for(5) == 5

    run(main())


def test_an_abort_fails_those_who_wait_at_once():
    async def main() -> None:
        versions = index()
        versions.begin(1)
        waiter = asyncio.ensure_future(versions.wait_for(1))
        await run_tasks()
        await versions.abort(1, "rank 2 died")
        with pytest.raises(WeightsError, match="version 1 will not come: version 1 was aborted: rank 2 died"):
            await waiter

    run(main())


def test_who_waits_after_an_abort_fails_at_once_until_the_next_begin():
    async def main() -> None:
        versions = index()
        versions.begin(1)
        await versions.abort(1, "it died")
        with pytest.raises(WeightsError, match="will not come"):
            await versions.wait_for(1)
        versions.begin(1)
        waiter = asyncio.ensure_future(versions.wait_for(1))
        await run_tasks()
        assert not waiter.done()
        await versions.commit(manifest_of_bytes(1, 10))
        assert await waiter == 1

    run(main())


def test_a_waiter_that_gives_up_harms_nobody():
    async def main() -> None:
        versions = index()
        first, second = (asyncio.ensure_future(versions.wait_for(1)) for _ in range(2))
        await run_tasks()
        first.cancel()
        await run_tasks()
        await publish(versions, 1)
        assert await second == 1

    run(main())


def test_a_newer_version_that_came_first_is_not_taken_back():
    async def main() -> None:
        versions = index()
        versions.begin(1)
        versions.begin(2)
        await versions.commit(manifest_of_bytes(2, 10))
        with pytest.raises(WeightsError, match="version 1 comes too late: 2 was committed meanwhile"):
            await versions.commit(manifest_of_bytes(1, 10))
        assert versions.latest == 2
        await versions.abort(1, "too late")
        assert bytes_of(versions) == 10

    run(main())


def test_a_version_that_shares_tensors_follows_the_one_that_it_shares_with():
    async def main() -> None:
        versions = index()
        await publish(versions, 1)
        versions.begin(2)
        versions.begin(3)
        await versions.commit(manifest_of_bytes(2, 10))
        with pytest.raises(WeightsError, match="version 3 shares tensors with 1, and 2 was committed meanwhile"):
            await versions.commit(manifest_of(3, {"3/0": 5, "1/0": 10}))
        assert versions.latest == 2
        await versions.commit(manifest_of_bytes(3, 10))  # all of its own
        assert versions.latest == 3

    run(main())


def test_an_abort_of_what_is_not_being_written_changes_nothing():
    async def main() -> None:
        versions = index(keep_versions=1)
        await publish(versions, 1)
        assert await versions.abort(1, "late") == ()
        assert await versions.abort(2, "never begun") == ()
        waiter = asyncio.ensure_future(versions.wait_for(2))
        await run_tasks()
        assert not waiter.done()
        await publish(versions, 2)
        assert await waiter == 2

    run(main())


def test_begin_makes_room_for_what_comes():
    async def main() -> None:
        versions = index(keep_versions=2)
        assert await publish(versions, 1) == ((), ())
        assert await publish(versions, 2) == ((), ())
        assert await publish(versions, 3) == (("1/0",), ())
        assert await publish(versions, 5) == (("2/0",), ())
        assert bytes_of(versions) == 20

    run(main())


def test_the_latest_stays_while_the_next_one_is_written():
    async def main() -> None:
        versions = index(keep_versions=1, keep_bytes=1)
        await publish(versions, 1)
        base, freed = versions.begin(2)
        assert base == manifest_of_bytes(1, 10)
        assert freed == ()
        assert versions.lease().version == 1
        assert versions.release(1) == ()
        assert await versions.commit(manifest_of_bytes(2, 10)) == ("1/0",)

    run(main())


def test_what_was_given_up_for_an_aborted_version_does_not_come_back():
    async def main() -> None:
        versions = index(keep_versions=2)
        await publish(versions, 1)
        await publish(versions, 2)
        assert versions.begin(3)[1] == ("1/0",)
        assert await versions.abort(3, "died") == ()
        with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2"):
            versions.lease(1)
        assert versions.begin(3)[1] == ()

    run(main())


def test_retention_keeps_within_its_bytes_but_always_the_newest():
    async def main() -> None:
        versions = index(keep_versions=9, keep_bytes=25)
        assert await publish(versions, 1) == ((), ())
        assert await publish(versions, 2) == ((), ())
        assert await publish(versions, 3) == (("1/0",), ())  # 2 and 3 are 20 bytes
        assert await publish(versions, 4, size=26) == (("2/0",), ("3/0",))  # it was not expected to be this large
        assert versions.lease().version == 4

    run(main())


def test_a_lease_keeps_a_version_until_its_last_reader_ends():
    async def main() -> None:
        versions = index(keep_versions=1)
        await publish(versions, 1)
        versions.lease(1)
        versions.lease(1)
        assert await publish(versions, 2) == ((), ())
        assert versions.release(1) == ()
        assert versions.lease(1).version == 1
        assert versions.release(1) == ()
        assert versions.release(1) == ("1/0",)
        with pytest.raises(WeightsError, match="there is no version 1 of the weights; held: 2"):
            versions.lease(1)

    run(main())


def test_a_leased_version_does_not_take_the_place_of_a_kept_one():
    async def main() -> None:
        versions = index(keep_versions=2)
        await publish(versions, 1)
        await publish(versions, 2)
        versions.lease(2)
        assert await publish(versions, 3) == ((), ())  # 1 and 3 are kept, 2 is being read
        assert versions.release(2) == ("1/0",)

    run(main())


def test_buckets_are_kept_while_any_version_holds_a_tensor_in_them():
    async def main() -> None:
        versions = index(keep_versions=2)
        await publish(versions, 1, size=100)
        await publish(versions, 2, size=10, shared={"1/0": 100})
        assert bytes_of(versions) == 110
        assert await publish(versions, 3, size=10, shared={"1/0": 100}) == ((), ())  # 1 is gone, its bucket is not
        assert bytes_of(versions) == 120
        with pytest.raises(WeightsError, match="held: 2, 3"):
            versions.lease(1)
        assert await publish(versions, 4, size=10, shared={"1/0": 100}) == (("2/0",), ())
        assert bytes_of(versions) == 120
        assert await publish(versions, 5, size=100) == (("3/0",), ())
        assert bytes_of(versions) == 210  # 4 still needs 1/0
        assert await publish(versions, 6, size=100) == (("4/0", "1/0"), ())
        assert bytes_of(versions) == 200

    run(main())


def test_a_version_s_buckets_stay_while_the_next_one_that_may_share_them_is_written():
    async def main() -> None:
        versions = index(keep_versions=1)
        await publish(versions, 1)
        versions.begin(2)  # would share 1/0
        versions.begin(3)
        assert await versions.commit(manifest_of_bytes(3, 10)) == ()  # 1 goes, its bucket does not
        with pytest.raises(WeightsError, match="held: 3"):
            versions.lease(1)
        assert await versions.abort(2, "died") == ("1/0",)

    run(main())
