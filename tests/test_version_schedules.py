"""The version index against a simple model, under random schedules."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forge_rl.errors import WeightsError
from forge_rl.weights.versions import VersionIndex
from tests.fake_versions import bytes_of
from tests.fakes import manifest_of, manifest_of_bytes


class Scheduler(RuleBasedStateMachine):
    """Random calls, against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.keep_bytes = 2, 25
        self.index = VersionIndex(keep_versions=self.keep, keep_bytes=self.keep_bytes)
        self.held: dict[int, dict[str, int]] = {}  # bytes by bucket, by version
        self.epoch = 0
        self.epochs: dict[int, int] = {}  # of what is held
        self.forgotten: dict[tuple[int, int], dict[str, int]] = {}  # by version and epoch: what is still leased
        self.stale: list[tuple[int, int]] = []  # publishes that were begun before the run went back
        self.writing: dict[int, int | None] = {}  # the version before
        self.base_buckets: dict[int, dict[str, int]] = {}
        self.leases: list[tuple[int, int]] = []
        self.names: list[str] = []  # of the leases
        self.named = 0

    @property
    def newest(self) -> int | None:
        return max(self.held, default=None)

    def buckets(self) -> dict[str, int]:
        """Keys of all buckets that must be kept."""
        every = (*self.held.values(), *self.base_buckets.values(), *self.forgotten.values())
        return {key: size for buckets in every for key, size in buckets.items()}

    def retire(self, coming: int = 0) -> None:
        """Drops, of the unleased, newest first, all past the count or the bytes, but never the latest."""
        unleased = sorted((v for v in self.held if (v, self.epochs[v]) not in self.leases), reverse=True)
        room = self.keep - (coming > 0)
        newest = self.newest
        for place, version in enumerate(unleased):
            buckets: dict[str, int] = {}
            for other in unleased[: place + 1]:
                buckets |= self.held.get(other, {})
            if version != newest and (place >= room or coming + sum(buckets.values()) > self.keep_bytes):
                for dropped_version in unleased[place:]:
                    if dropped_version != newest:
                        del self.held[dropped_version]
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
        bucket_key = f"{version}/{self.epoch}.0"
        manifest = replace(manifest_of(version, {bucket_key: size, **shared}), epoch=self.epoch)
        if (self.newest is not None and version < self.newest) or (shared and base != self.newest):
            with pytest.raises(WeightsError, match=r"comes too late|shares tensors"):
                self.index.commit(manifest)
            return
        before = self.buckets()
        del self.writing[version], self.base_buckets[version]
        freed = self.index.commit(manifest)
        self.held[version], self.epochs[version] = {bucket_key: size, **shared}, self.epoch
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.writing)))
        before = self.buckets()
        del self.writing[version], self.base_buckets[version]
        freed = self.index.abort(version, epoch=self.epoch)
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()

    @rule(version=st.none() | st.integers(0, 12))
    def lease(self, version: int | None) -> None:
        version_read = self.newest if version is None else version
        if version_read in self.held:
            name = f"{self.named}"
            self.named += 1
            assert self.index.lease(name, version).bytes == sum(self.held[version_read].values())
            self.leases.append((version_read, self.epochs[version_read]))
            self.names.append(name)
        else:
            with pytest.raises(WeightsError, match="there is no version"):
                self.index.lease("none", version)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.leases) - 1))
        leased, name = self.leases.pop(place), self.names.pop(place)
        before = self.buckets()
        freed = self.index.release(name)
        if leased not in self.leases:
            self.forgotten.pop(leased, None)
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()

    @rule(version=st.integers(0, 12))
    def rollback(self, version: int) -> None:
        before = self.buckets()
        freed = self.index.rollback(version)
        self.stale += [(begun, self.epoch) for begun in self.writing]
        self.writing.clear()
        self.base_buckets.clear()
        for newer in [version_held for version_held in self.held if version_held > version]:
            buckets = self.held.pop(newer)
            if (leased := (newer, self.epochs[newer])) in self.leases:
                self.forgotten[leased] = buckets
        self.epoch += 1
        self.retire()
        assert set(freed) == before.keys() - self.buckets().keys()

    @precondition(lambda self: self.stale)
    @rule(commits=st.booleans())
    def end_a_publish_that_was_begun_before_going_back(self, commits: bool) -> None:
        version, epoch = self.stale.pop()
        if commits:
            with pytest.raises(WeightsError, match="was not begun, or was aborted"):
                self.index.commit(replace(manifest_of_bytes(version, 10), epoch=epoch))
        else:
            assert self.index.abort(version, epoch=epoch) == ()

    @invariant()
    def what_is_held_agrees(self) -> None:
        assert self.index.latest == self.newest
        every = (*self.held.values(), *self.forgotten.values())
        assert bytes_of(self.index) == sum({key: size for buckets in every for key, size in buckets.items()}.values())
        assert set(self.leases) <= {(version, self.epochs[version]) for version in self.held} | self.forgotten.keys()


TestSchedule = Scheduler.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
