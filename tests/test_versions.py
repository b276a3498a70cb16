"""The rules of versions, one by one and against a simple model under random schedules."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forge_rl.errors import WeightsError
from forge_rl.weights.versions import VersionIndex
from tests.fakes import manifest_of, manifest_of_bytes


def index(*, keep_versions: int = 2, keep_bytes: int = 1 << 40) -> VersionIndex:
    return VersionIndex(keep_versions=keep_versions, keep_bytes=keep_bytes)


async def publish(
    versions: VersionIndex, version: int, size: int = 10, shared: dict[str, int] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys that are given up before it is written, and when it is committed."""
    _, before = versions.begin(version)
    after = await versions.commit(manifest_of(version, {f"{version}/0": size, **(shared or {})}))
    return before, after


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, 20)

    asyncio.run(bounded())


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
        await settle()
        await publish(versions, 2)
        await settle()
        assert [waiter.done() for waiter in waiters] == [True, True, True, False]
        assert [waiter.result() for waiter in waiters[:3]] == [2, 2, 2]
        await publish(versions, 4)
        assert await waiters[3] == 4

    run(main())


def test_waiting_takes_no_turn_of_the_loop_while_nothing_happens():
    async def main() -> None:
        versions = index()
        waiter = asyncio.ensure_future(versions.wait_for(1))
        await settle()
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
        await settle()
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
        await settle()
        assert not waiter.done()
        await versions.commit(manifest_of_bytes(1, 10))
        assert await waiter == 1

    run(main())


def test_a_waiter_that_gives_up_harms_nobody():
    async def main() -> None:
        versions = index()
        first, second = (asyncio.ensure_future(versions.wait_for(1)) for _ in range(2))
        await settle()
        first.cancel()
        await settle()
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
        assert versions.bytes == 10

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
        await settle()
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
        assert versions.bytes == 20

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
        assert versions.bytes == 110
        assert await publish(versions, 3, size=10, shared={"1/0": 100}) == ((), ())  # 1 is gone, its bucket is not
        assert versions.bytes == 120
        with pytest.raises(WeightsError, match="held: 2, 3"):
            versions.lease(1)
        assert await publish(versions, 4, size=10, shared={"1/0": 100}) == (("2/0",), ())
        assert versions.bytes == 120
        assert await publish(versions, 5, size=100) == (("3/0",), ())
        assert versions.bytes == 210  # 4 still needs 1/0
        assert await publish(versions, 6, size=100) == (("4/0", "1/0"), ())
        assert versions.bytes == 200

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


class Schedule(RuleBasedStateMachine):
    """Random calls, against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.keep_bytes = 2, 25
        self.loop = asyncio.new_event_loop()
        self.index = VersionIndex(keep_versions=self.keep, keep_bytes=self.keep_bytes)
        self.held: dict[int, dict[str, int]] = {}  # bytes by bucket, by version
        self.writing: dict[int, int | None] = {}  # the version before
        self.base_buckets: dict[int, dict[str, int]] = {}
        self.leases: list[int] = []
        self.waiters: dict[asyncio.Future[int], int] = {}

    @property
    def newest(self) -> int | None:
        return max(self.held, default=None)

    def do(self, awaitable: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            result = await awaitable
            await settle()
            return result

        return self.loop.run_until_complete(bounded())

    def buckets(self) -> dict[str, int]:
        """Of all that must be kept."""
        return {k: n for buckets in (*self.held.values(), *self.base_buckets.values()) for k, n in buckets.items()}

    def retire(self, coming: int = 0) -> None:
        """What the rules say goes: of the unleased, newest first, all past the count or the bytes, but never latest."""
        unleased = sorted((v for v in self.held if v not in self.leases), reverse=True)
        room = self.keep - (coming > 0)
        newest = self.newest
        for place, version in enumerate(unleased):
            taken: dict[str, int] = {}
            for other in unleased[: place + 1]:
                taken |= self.held.get(other, {})
            if version != newest and (place >= room or coming + sum(taken.values()) > self.keep_bytes):
                for gone in unleased[place:]:
                    if gone != newest:
                        del self.held[gone]
                return

    @rule(version=st.integers(0, 12))
    def begin(self, version: int) -> None:
        if version in self.writing or (self.newest is not None and version <= self.newest):
            with pytest.raises(WeightsError):
                self.index.begin(version)
            return
        before, newest = self.buckets(), self.newest
        base, freed = self.index.begin(version)
        assert (base and base.version) == newest
        self.writing[version] = newest
        self.base_buckets[version] = self.held[newest] if newest is not None else {}
        self.retire(coming=base.bytes if base else 0)
        assert set(freed) == before.keys() - self.buckets().keys()

    @precondition(lambda self: self.writing)
    @rule(size=st.sampled_from([5, 10, 30]), shares=st.booleans(), data=st.data())
    def commit(self, size: int, shares: bool, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.writing)))
        base = self.writing[version]
        shared = dict(list(self.base_buckets[version].items())[:2]) if shares else {}
        manifest = manifest_of(version, {f"{version}/0": size, **shared})
        if (self.newest is not None and version < self.newest) or (shared and base != self.newest):
            with pytest.raises(WeightsError, match=r"comes too late|shares tensors"):
                self.do(self.index.commit(manifest))
            return
        before = self.buckets()
        del self.writing[version], self.base_buckets[version]
        freed = self.do(self.index.commit(manifest))
        self.held[version] = {f"{version}/0": size, **shared}
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()
        for waiter, wanted in list(self.waiters.items()):
            if wanted <= version:
                assert waiter.result() == version
                del self.waiters[waiter]

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.writing)))
        before = self.buckets()
        del self.writing[version], self.base_buckets[version]
        freed = self.do(self.index.abort(version, "died"))
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()
        for waiter in self.waiters:
            with pytest.raises(WeightsError, match="died"):
                waiter.result()
        self.waiters.clear()

    @precondition(lambda self: self.writing)
    @rule(ahead=st.integers(0, 3))
    def wait(self, ahead: int) -> None:
        wanted = (self.newest or 0) + ahead
        waiter = self.loop.create_task(self.index.wait_for(wanted))
        self.do(settle())
        if self.newest is not None and wanted <= self.newest:
            assert waiter.result() == self.newest
        elif waiter.done():  # an earlier abort still stands
            assert isinstance(waiter.exception(), WeightsError)
        else:
            self.waiters[waiter] = wanted

    @rule(version=st.none() | st.integers(0, 12))
    def lease(self, version: int | None) -> None:
        wanted = self.newest if version is None else version
        if wanted in self.held:
            assert self.index.lease(version).bytes == sum(self.held[wanted].values())
            self.leases.append(wanted)
        else:
            with pytest.raises(WeightsError, match="there is no version"):
                self.index.lease(version)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        version = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        before = self.buckets()
        freed = self.index.release(version)
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()

    @invariant()
    def what_is_held_agrees(self) -> None:
        assert self.index.latest == self.newest
        kept = {key: size for buckets in self.held.values() for key, size in buckets.items()}
        assert self.index.bytes == sum(kept.values())
        assert all(not waiter.done() for waiter in self.waiters)
        assert set(self.leases) <= set(self.held)

    def teardown(self) -> None:
        for waiter in self.waiters:
            waiter.cancel()
        self.do(settle())
        self.loop.close()


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
