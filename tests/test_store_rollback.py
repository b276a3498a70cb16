"""The WeightStore when the run goes back: the same numbers come again with other bytes, and old readers keep theirs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.errors import WeightsError
from tests.fake_store import VERSION_BYTES, all_of, exist, latest, publish, read, shards, shared, specs

pytestmark = pytest.mark.usefixtures("store_process", "nothing_left")


async def test_after_going_back_the_same_numbers_come_again_with_other_bytes(shm: Path):
    async with shared(shm, keep_versions=2) as (store, watched):
        transport = store.transport()
        for version in (1, 2, 3):
            await publish(store, version)
        async with store.lease(3) as old:
            await store.rollback(2)
            assert await latest(store) == 2
            # "d" is as in 2, so its bucket is shared with that, and not with the 3 that was forgotten.
            await publish(store, 3, all_of(13) | {"d": 2}, ("a", "b", "c"))
            assert await latest(store) == 3
            async with store.lease(3) as new:
                assert await read(transport, new) == all_of(13) | {"d": 2}
                assert not set(new.keys) & set(old.keys)
            assert await read(transport, old) == all_of(3)
            await publish(store, 4)
            assert await read(transport, old) == all_of(3)
            assert all(exist(old))
        for version in (5, 6):
            await publish(store, version)
        assert not any(exist(old))
        assert (await watched.state()).bytes == 2 * VERSION_BYTES

        # Back to before all that is kept, again and again, takes no more memory.
        for _ in range(3):
            await store.rollback(0)
            assert await latest(store) is None
            with pytest.raises(WeightsError, match="held: none"):
                async with store.lease():
                    pass
            for version in (1, 2):
                await publish(store, version, all_of(20 + version))
            assert (await watched.state()).bytes == 2 * VERSION_BYTES
        async with store.lease() as manifest:
            assert await read(transport, manifest) == all_of(22)


@pytest.mark.parametrize("namesake", ["is being written", "is there"])
async def test_a_publish_that_was_begun_before_going_back_ends_without_harm(namesake: str, shm: Path):
    async with shared(shm, keep_versions=2) as (store, watched):
        await publish(store, 1)
        begun, go_on = asyncio.Event(), asyncio.Event()
        transport = store.transport()

        async def late() -> None:
            async with store.publishing(2, specs(), torch.float32) as publication:
                ranks = [await transport.write(publication.draft, shards(all_of(-2), r), rank=r) for r in (0, 1)]
                begun.set()
                await go_on.wait()
                await publication.commit(ranks)

        publishing = asyncio.create_task(late())
        await begun.wait()
        await store.rollback(1)

        async def end() -> None:
            go_on.set()
            with pytest.raises(WeightsError, match="version 2 was not begun, or was aborted"):
                await publishing

        async with store.publishing(2, specs(), torch.float32) as publication:
            if namesake == "is being written":
                await end()
            ranks = [await transport.write(publication.draft, shards(all_of(2), r), rank=r) for r in (0, 1)]
            await publication.commit(ranks)
        if namesake == "is there":
            await end()
        async with store.lease(2) as manifest:
            assert await read(transport, manifest) == all_of(2)
        for version in (3, 4):
            await publish(store, version)
        assert sorted((await watched.state()).used) == ["3/1.0", "3/1.1", "4/1.0", "4/1.1"]


async def test_a_commit_whose_answer_was_lost_holds_also_after_going_back(shm: Path):
    async with shared(shm, keep_versions=2) as (store, watched):
        await publish(store, 1)
        replica = store._service.replicas[0]
        call = replica.call

        async def lose_the_answer(method: str, *args: object, deadline_s: float) -> Any:
            answer = await call(method, *args, deadline_s=deadline_s)
            if method == "commit":
                raise WeightsError("no answer")
            return answer

        replica.call = lose_the_answer  # type: ignore[assignment,method-assign]
        with pytest.raises(WeightsError, match="no answer"):
            await publish(store, 2)
        replica.call = call  # type: ignore[method-assign]
        async with store.lease(2) as manifest:
            assert await read(store.transport(), manifest) == all_of(2)
            await store.rollback(1)
            await publish(store, 2, all_of(12))
            assert await read(store.transport(), manifest) == all_of(2)
        await publish(store, 3)
        assert sorted((await watched.state()).used) == ["2/1.0", "2/1.1", "3/1.0", "3/1.1"]
