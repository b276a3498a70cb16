"""Versions when the run goes back: what came after is forgotten, and its numbers come again."""

import asyncio

import pytest

from forge_rl.errors import WeightsError
from tests.fake_versions import bytes_of, index, of_epoch, publish, run, run_tasks
from tests.fakes import manifest_of_bytes


def test_going_back_forgets_what_came_after_and_its_numbers_come_again():
    async def main() -> None:
        versions = index(keep_versions=9)
        for version in (1, 2, 3):
            await publish(versions, version)
        assert versions.rollback(1) == ("2/0", "3/0")
        assert versions.latest == 1
        assert (bytes_of(versions), versions.epoch) == (10, 1)
        with pytest.raises(WeightsError, match="there is no version 2 of the weights; held: 1"):
            versions.lease(2)
        base, freed = versions.begin(2)
        assert (base, freed) == (manifest_of_bytes(1, 10), ())
        assert await versions.commit(of_epoch(1, 2)) == ()
        assert versions.lease() == of_epoch(1, 2)
        assert versions.rollback(0) == ("1/0",)  # 2 is being read
        assert versions.latest is None
        assert versions.begin(1) == (None, ())

    run(main())


def test_going_back_to_the_latest_forgets_nothing():
    async def main() -> None:
        versions = index()
        await publish(versions, 3)
        assert versions.rollback(3) == versions.rollback(7) == ()
        assert versions.latest == 3

    run(main())


def test_a_forgotten_version_stays_while_it_is_read_and_its_namesake_beside_it():
    async def main() -> None:
        versions = index(keep_versions=1)
        await publish(versions, 1)
        versions.lease(1)
        versions.lease(1)
        assert versions.rollback(0) == ()
        assert versions.needs("1/0")
        with pytest.raises(WeightsError, match="held: none"):
            versions.lease(1)
        versions.begin(1)
        await versions.commit(of_epoch(1, 1))
        assert versions.lease(1).epoch == 1
        assert bytes_of(versions) == 20
        assert versions.release(1, epoch=0) == ()
        assert versions.release(1, epoch=0) == ("1/0",)
        assert not versions.needs("1/0")
        versions.begin(2)
        assert await versions.commit(of_epoch(1, 2)) == ()
        assert versions.release(1, epoch=1) == ("1/1.0",)

    run(main())


def test_who_waits_for_a_forgotten_version_waits_for_the_new_one():
    async def main() -> None:
        versions = index()
        await publish(versions, 1)
        versions.begin(2)
        waiters = [asyncio.ensure_future(versions.wait_for(version)) for version in (2, 3)]
        await run_tasks()
        versions.rollback(0)
        waiters.append(asyncio.ensure_future(versions.wait_for(1)))
        await run_tasks()
        versions.begin(1)
        await versions.commit(of_epoch(1, 1))
        await run_tasks()
        assert [waiter.done() for waiter in waiters] == [False, False, True]
        versions.begin(2)
        await versions.commit(of_epoch(1, 2))
        assert await waiters[0] == 2
        versions.begin(3)
        await versions.commit(of_epoch(1, 3))
        assert await waiters[1] == 3

    run(main())


def test_after_going_back_an_earlier_abort_fails_nobody():
    async def main() -> None:
        versions = index()
        await publish(versions, 1)
        versions.begin(2)
        await versions.abort(2, "the trainer died")
        with pytest.raises(WeightsError, match="the trainer died"):
            await versions.wait_for(2)
        versions.rollback(1)
        waiter = asyncio.ensure_future(versions.wait_for(2))
        await run_tasks()
        versions.begin(2)
        await versions.commit(of_epoch(1, 2))
        assert await waiter == 2

    run(main())


def test_a_publish_that_was_begun_before_going_back_can_neither_be_committed_nor_harm_its_namesake():
    async def main() -> None:
        versions = index()
        await publish(versions, 1)
        versions.begin(2)
        versions.rollback(1)
        with pytest.raises(WeightsError, match="version 2 was not begun, or was aborted"):
            await versions.commit(manifest_of_bytes(2, 10))
        versions.begin(2)
        with pytest.raises(WeightsError, match="version 2 was not begun, or was aborted"):
            await versions.commit(manifest_of_bytes(2, 10))
        waiter = asyncio.ensure_future(versions.wait_for(2))
        assert await versions.abort(2, "it died before", epoch=0) == ()
        await run_tasks()
        await versions.commit(of_epoch(1, 2))
        assert await waiter == 2
        assert versions.lease().epoch == 1

    run(main())


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_what_ends_while_many_wait_is_decided_before_the_run_goes_back(end: str):
    async def main() -> None:
        versions = index()
        await publish(versions, 1)
        versions.begin(2)
        waiters = [asyncio.ensure_future(versions.wait_for(3)) for _ in range(3)]
        await run_tasks()
        async with versions._changed:  # as a waiter has it for a moment
            ending = asyncio.ensure_future(
                versions.commit(manifest_of_bytes(2, 10)) if end == "commit" else versions.abort(2, "died")
            )
            await run_tasks()
            assert versions.rollback(1) == (("2/0",) if end == "commit" else ())
        await ending
        await run_tasks()
        assert versions.latest == 1
        assert not any(waiter.done() for waiter in waiters)
        for waiter in waiters:
            waiter.cancel()

    run(main())
