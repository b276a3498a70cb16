"""Random schedules of publish, read, crash and retire on real segments: nothing torn, leaked or going backwards."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import TestCase

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forge_rl.errors import WeightsError
from forge_rl.services.weight_store import Publication
from forge_rl.services.weight_store_actor import Holder
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.segment import PAGE, readable
from tests.fake_store import (
    RANKS,
    SHAPES,
    VERSION_BYTES,
    StoreState,
    Straggler,
    latest,
    open_shared,
    publish,
    read,
    shards,
    specs,
    until_state,
)

T = TypeVar("T")
CHANGES = st.one_of(st.just(tuple(SHAPES)), st.lists(st.sampled_from(list(SHAPES)), unique=True))
KEEP = 2


class Died(Exception):
    """Error that the controller meets when a rank dies."""


class StoreSchedule(RuleBasedStateMachine):
    """The store in a process of its own, on real segments; writers and readers that die are processes too."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="schedule-"))
        self.next = 1
        self.stragglers: list[Straggler] = []
        self.mapped: list[tuple[torch.Tensor, bytes]] = []

    @initialize()
    def open(self) -> None:
        self.watched = self.run(open_shared(self.shm, keep_versions=KEEP))
        self.store = self.watched.store
        self.values: dict[int, dict[str, int]] = {}
        """Values of the tensors of each committed version."""
        self.leases: list[tuple[contextlib.AbstractAsyncContextManager[Manifest], Manifest]] = []
        self.forgotten: list[tuple[contextlib.AbstractAsyncContextManager[Manifest], Manifest, dict[str, int]]] = []
        """Leases on versions that the run went back behind, with what their tensors say."""

    def run(self, work: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, 60)

        return self.runner.run(bounded())

    @property
    def state(self) -> StoreState:
        return self.run(self.watched.state())

    @property
    def latest(self) -> int | None:
        return max(self.values, default=None)

    def coming(self, changed: Collection[str]) -> tuple[int, dict[str, int]]:
        """The next version, and what its tensors will say."""
        version, self.next = self.next, self.next + 1
        before = {} if self.latest is None else self.values[self.latest]
        return version, {name: version if name in changed else before.get(name, version) for name in SHAPES}

    @rule(changed=CHANGES)
    def publish(self, changed: Sequence[str]) -> None:
        version, values = self.coming(changed)
        self.run(publish(self.store, version, values, changed))
        assert self.run(latest(self.store)) == version
        self.values[version] = values
        state = self.state
        if not self.stragglers:
            assert not state.freed
            if not state.leases:
                assert state.bytes <= (KEEP + 0.5) * VERSION_BYTES

    def give_up(self, changed: Sequence[str], end: Any) -> None:
        """Publish, and end with an error: nobody sees the version, and the next one may have its number."""
        version, values = self.coming(changed)

        async def main() -> None:
            async with self.store.publishing(version, specs(changed), torch.float32) as publication:
                await end(publication, values)

        with pytest.raises((Died, WeightsError)):
            self.run(main())
        with pytest.raises(WeightsError, match=f"there is no version {version}"):
            self.run(self.watched.call("lease", version, "never", Holder.this_process()))
        self.next = version

    @rule(changed=CHANGES, ranks=st.integers(0, RANKS))
    def give_up_when_some_ranks_have_written(self, changed: Sequence[str], ranks: int) -> None:
        async def end(publication: Publication, values: dict[str, int]) -> None:
            for rank in range(ranks):
                await self.store.transport().write(publication.draft, shards(values, rank), rank=rank)
            raise Died

        self.give_up(changed, end)

    @rule()
    def commit_without_a_rank(self) -> None:
        async def end(publication: Publication, values: dict[str, int]) -> None:
            reports = await self.store.transport().write(publication.draft, shards(values, 0), rank=0)
            await publication.commit([reports])

        self.give_up(tuple(SHAPES), end)

    @rule(changed=CHANGES)
    def give_up_because_a_writer_is_killed(self, changed: Sequence[str]) -> None:
        async def end(publication: Publication, values: dict[str, int]) -> None:
            self.straggler(publication.draft).kill()
            raise Died

        self.give_up(changed, end)

    @precondition(lambda self: len(self.stragglers) < 2)
    @rule()
    def give_up_while_a_writer_goes_on(self) -> None:
        async def end(publication: Publication, values: dict[str, int]) -> None:
            self.stragglers.append(self.straggler(publication.draft))
            raise Died

        self.give_up(tuple(SHAPES), end)

    @precondition(lambda self: self.stragglers)
    @rule(killed=st.booleans())
    def a_writer_that_was_given_up_ends(self, killed: bool) -> None:
        straggler = self.stragglers.pop(0)
        if killed:
            straggler.kill()
        else:
            assert not straggler.finish(), "it was told that it wrote a version"

    def straggler(self, drafted: Manifest) -> Straggler:
        """Halfway through values that no version has."""
        values = dict.fromkeys(SHAPES, -drafted.version)
        return Straggler(self.store.transport(), drafted, shards(values, 1))  # type: ignore[arg-type]

    @precondition(lambda self: self.values)
    @rule()
    def fetch(self) -> None:
        async def main() -> None:
            async with self.store.lease() as manifest:
                assert manifest.version == self.latest
                assert await read(self.store.transport(), manifest) == self.values[manifest.version]

        self.run(main())

    @precondition(lambda self: self.values and len(self.leases) < 3)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.state.versions)))
        context = self.store.lease(version)
        manifest = self.run(context.__aenter__())
        assert manifest.version == version
        self.leases.append((context, manifest))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        context, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.run(context.__aexit__(None, None, None))

    @precondition(lambda self: self.values)
    @rule(steps=st.integers(0, 3))
    def rollback(self, steps: int) -> None:
        version = max(0, self.next - 1 - steps)
        self.run(self.store.rollback(version))
        for context, manifest in list(self.leases):
            if manifest.version > version:
                self.leases.remove((context, manifest))
                self.forgotten.append((context, manifest, self.values[manifest.version]))
        versions = self.state.versions
        assert set(versions) == {held for held in self.values if held <= version and held in versions}
        self.values = {version: values for version, values in self.values.items() if version in versions}
        self.next = version + 1

    @precondition(lambda self: self.forgotten)
    @rule()
    def a_reader_of_a_forgotten_version_ends(self) -> None:
        context, manifest, values = self.forgotten.pop(0)
        assert self.run(read(self.store.transport(), manifest)) == values
        self.run(context.__aexit__(None, None, None))

    @precondition(lambda self: self.values)
    @rule(newer=st.integers(0, 3))
    def a_reader_dies_with_its_lease(self, newer: int) -> None:
        reader = subprocess.Popen(["sleep", "600"])
        try:
            holder = Holder(reader.pid, Holder.this_process().space)
            manifest = self.run(self.watched.call("lease", None, "of the dead", holder))
            for _ in range(newer):
                self.publish(tuple(SHAPES))
            assert self.run(read(self.store.transport(), manifest)) == self.values[manifest.version]
        finally:
            reader.kill()
            reader.wait()
        self.run(until_state(self.watched, lambda state: "of the dead" not in state.leases))

    def end_leases(self) -> None:
        for context, *_ in (*self.leases, *self.forgotten):
            self.run(context.__aexit__(None, None, None))

    @precondition(lambda self: self.values)
    @rule()
    def map_the_latest(self) -> None:
        for bucket in self.state.versions[self.latest or 0].buckets[:1]:
            assert bucket.segment is not None
            memory = readable(bucket.segment)
            self.mapped.append((memory, bytes(memory.numpy())))

    @rule()
    def the_store_dies(self) -> None:
        """Whatever is mapped stays as it is; the next store finds what is left."""
        (folder,) = self.store.folders
        file_bytes = sum(path.stat().st_size for path in folder.iterdir())
        intact_mappings = [(memory, content) for memory, content in self.mapped if bytes(memory.numpy()) == content]
        self.run(self.watched.call("abandon"))
        self.end_leases()
        self.open()
        assert self.state.reclaimed == file_bytes
        assert not folder.exists()
        assert all(bytes(memory.numpy()) == content for memory, content in intact_mappings)
        self.mapped.clear()

    @invariant()
    def every_version_is_whole_and_no_segment_is_leaked(self) -> None:
        state = self.state
        assert self.run(latest(self.store)) == self.latest
        for version, manifest in state.versions.items():
            assert self.run(read(self.store.transport(), manifest)) == self.values[version]

        leased = {manifest.version for _, manifest in self.leases}
        assert leased <= set(state.versions)
        assert self.latest is None or self.latest in state.versions
        assert len(set(state.versions) - leased) <= KEEP

        forgotten = [manifest for _, manifest, _ in self.forgotten]
        needed = {key for manifest in (*state.versions.values(), *forgotten) for key in manifest.keys}
        used_versions = set(state.used)
        assert needed <= used_versions
        assert used_versions - needed <= set(state.unneeded)
        refs = [*state.used.values(), *state.freed, *state.spare]
        files = [path for path in self.shm.rglob("*") if path.is_file() and path.name != "lock"]
        assert sorted(map(str, files)) == sorted(ref.path for ref in refs)
        assert sum(path.stat().st_size - PAGE for path in files) == state.bytes

    def teardown(self) -> None:
        for straggler in self.stragglers:
            straggler.kill()
        self.end_leases()
        self.run(self.store.stop())
        left = list(self.shm.iterdir())
        shutil.rmtree(self.shm)
        self.runner.close()
        assert not left


@pytest.mark.usefixtures("store_process")
def test_a_dead_readers_version_gives_its_memory_back() -> None:
    schedule = StoreSchedule()
    schedule.open()
    try:
        for _ in range(2):
            schedule.publish(tuple(SHAPES))
        schedule.a_reader_dies_with_its_lease(newer=1)
        schedule.publish(())
    finally:
        schedule.teardown()


def schedules(examples: int) -> type[TestCase]:
    """A test of so many random schedules."""
    case: type[TestCase] = type("Schedules", (StoreSchedule,), {}).TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return pytest.mark.usefixtures("store_process")(case)


TestSchedules = schedules(12)
TestManySchedules = pytest.mark.nightly(schedules(200))
