"""Engines that load, sleep, come back, stand by for others, or are guests: fake ones, on real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forge_rl.errors import ReplicaError, WeightsError
from forge_rl.runtime.cluster import THIS_HOST
from forge_rl.services.completion import ResumableCompletion
from forge_rl.types import Sampling
from tests.fake_engine import draw
from tests.staged_engines import PROMPT, read, right, stage, stream


@pytest.mark.parametrize("death", ["die", "raise"])
async def test_an_engine_that_dies_while_it_loads_comes_back_with_that_version(
    tmp_path: Path, nothing_left: None, death: str
) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        on.only_once(0, load=death)
        assert await on.load(2) == 2
        await on.until_serving(0, 1)
        assert [await on.state(engine) for engine in (0, 1)] == [(2, []), (2, [])]
        assert [note["version"] for note in on.orders.notes("load") if note["engine"] == 0] == [1, 2, 2]

        for engine in (0, 1):
            on.only_once(engine, load=death)
        assert await on.load(3) == 3
        assert on.generator.version == 3
        turn = await on.generator.generate(PROMPT, Sampling(max_tokens=20))
        assert set(turn.versions) == {3}
        await on.until_serving(0, 1)


async def test_an_engine_revived_during_a_load_serves_what_others_do(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        on.orders.tell(0, load="hold")
        os.kill(await on.pid(0), signal.SIGKILL)
        await on.until(lambda: [note["engine"] for note in on.orders.notes("load")].count(0) == 2)
        assert await on.load(2) == 2, "those that serve do not wait for it"
        assert list(on.generator.engines()) == [1]
        with pytest.raises(ReplicaError, match="does not serve"):
            await on.generator.decode(
                ResumableCompletion(PROMPT, on.generator.sampling, on.generator._tokenizer), engine=0
            )
        await on.generator.pause()
        on.orders.tell(0)
        await on.until_serving(0, 1)
        assert await on.state(0) == (2, ["paused"])
        assert [note["version"] for note in on.orders.notes("load") if note["engine"] == 0] == [1, 1, 2]
        assert on.store.leased == [1, 1, 2, 2]
        await on.generator.resume()
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0))


async def test_engines_that_dropped_their_weights_load_them_again_to_wake(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path, engines=1) as on:
        on.orders.tell(0, forgets=True)
        await on.load(1)
        for version, loads in ((None, [1, 1]), (2, [1, 1, 2])):
            await on.generator.sleep()
            if version:
                await on.load(version)
            await on.generator.wake()
            assert [note["version"] for note in on.orders.notes("load")] == loads
        assert await on.state(0) == (2, [])
        # Engines that decode have a version brought to their hosts first; those that sleep lose nothing meanwhile.
        await on.load(3)
        assert on.store.prefetched == [(1, {THIS_HOST}), (3, {THIS_HOST})]
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20)))


async def test_a_load_does_not_wait_for_an_engine_that_awaits_its_devices(tmp_path: Path, nothing_left: None) -> None:
    free, states = asyncio.Event(), list[bool]()

    @contextlib.asynccontextmanager
    async def devices(index: int) -> AsyncIterator[None]:
        await free.wait()
        states.append(True)
        yield
        states.append(False)

    async with stage(tmp_path, engines=1, replace=devices) as on:
        await on.load(1)
        os.kill(await on.pid(0), signal.SIGKILL)
        await on.until(lambda: bool(on.faults.seen))
        async with asyncio.timeout(240):
            assert await on.load(2) == 2, "the trainer, which has the devices, would wait for it in vain"
        assert not on.generator.engines()
        assert [note["version"] for note in on.orders.notes("load")] == [1]
        on.orders.tell(0, load="hold")
        free.set()
        await on.until(lambda: len(on.orders.notes("load")) == 2)
        assert states == [True]
        on.orders.tell(0)
        await on.until_serving(0)
        assert states == [True, False]
        assert await on.state(0) == (2, [])


async def test_a_version_that_cannot_be_loaded_is_nobodys_death(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path) as on:
        await on.load(1)
        for engine in (0, 1):
            on.orders.tell(engine, load="refuse")
        with pytest.raises(WeightsError, match="a bucket did not come"):
            await on.load(2)
        with pytest.raises(WeightsError, match="loading version 2 failed"):
            await on.generator.generate(PROMPT)
        on.orders.tell(1)
        on.orders.tell(0, reads=7)
        with pytest.raises(WeightsError, match=r"the engines read versions \[7, 3\] instead of 3"):
            await on.load(3)
        assert not on.faults.seen

        on.orders.tell(0)
        os.kill(await on.pid(0), signal.SIGKILL)
        await on.until(lambda: bool(on.faults.seen))
        await on.until_serving(0, 1)
        assert await on.state(0) == (-1, []), "there is no version to serve"
        assert await on.load(4) == 4
        assert [await on.state(engine) for engine in (0, 1)] == [(4, []), (4, [])]


async def test_engines_that_come_back_are_paused_and_asleep_like_the_others(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path) as on:
        await on.generator.serve_model()
        assert on.generator.version == 0
        on.orders.tell(0, stream="hold", after=3)
        async with contextlib.aclosing(stream(on.generator, PROMPT, Sampling(max_tokens=20), engine=0)) as chunks:
            await read(chunks, 3)
            await on.generator.pause()
            await on.generator.pause()
            await on.generator.sleep()
            on.orders.tell(0)
            os.kill(await on.pid(0), signal.SIGKILL)
            await on.until(lambda: bool(on.faults.seen))
            await on.until_serving(0, 1)
            assert await on.state(0) == await on.state(1) == (0, ["asleep", "paused"])

            rest = asyncio.create_task(read(chunks, 17))
            await on.generator.resume()
            assert await on.state(0) == await on.state(1) == (0, ["asleep"])
            assert await on.load(1) == 1
            assert not rest.done()
            await on.generator.wake()
            assert tuple(await rest) == draw(PROMPT, 20)[3:]
        with pytest.raises(WeightsError, match="have already loaded version 1"):
            await on.generator.serve_model()


async def test_a_spare_takes_the_place_of_an_engine_that_dies(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path, spares=1) as on:
        assert on.generator.spares == 0, "the run's own start comes first"
        await on.load(1)
        await on.until(lambda: on.generator.spares == 1)
        spare = await on.spare()
        on.orders.tell(0, setup="hold", stream="hold", after=3)  # no engine can start in its place
        async with contextlib.aclosing(stream(on.generator, PROMPT, Sampling(max_tokens=20), engine=0)) as chunks:
            ids = await read(chunks, 3)
            await on.load(2)
            os.kill(await on.pid(0), signal.SIGKILL)
            assert (*ids, *await read(chunks, 17)) == draw(PROMPT, 20)
        await on.until_serving(0, 1)
        assert await on.pid(0) == spare
        assert await on.state(0) == (2, []), "it loaded the version of now, and woke"
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0))

        await on.until(lambda: on.generator.spares == 1)  # another one
        before = len(on.faults.seen)
        for ending, message in ((signal.SIGKILL, "a spare: .*killed by SIGKILL"), (signal.SIGSTOP, "a spare: hung")):
            os.kill(await on.spare(), ending)
            await on.until(lambda: on.generator.spares == 0)
            await on.until(lambda: on.generator.spares == 1)
            fault = on.faults.seen[-1]
            assert re.search(message, fault.cause), fault.cause
            assert (fault.replica, fault.fatal) == (2, False)
            assert fault.recovered_s is not None
        assert len(on.faults.seen) == before + 2
        assert await on.pid(0) == spare, "they cost no engine"


async def test_a_spare_that_only_imported_starts_with_the_dead_engines_devices(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[str] = []

    @contextlib.asynccontextmanager
    async def devices(index: int) -> AsyncIterator[None]:
        lent.append("lent")
        yield
        lent.append("given back")

    async with stage(tmp_path, spares=1, replace=devices) as on:
        on.orders.tell(2, imports=True)
        await on.generator.serve_model()
        await on.until(lambda: on.generator.spares == 1)
        os.kill(await on.pid(1), signal.SIGKILL)
        await on.until(lambda: bool(on.faults.seen))
        await on.until_serving(0, 1)
        setup = on.orders.notes("setup")[2]
        assert (setup["engine"], setup["environment"]["OMP_NUM_THREADS"]) == (2, "1")
        assert lent == ["lent", "given back"]
        assert await on.state(1) == (0, [])


async def test_spares_that_do_not_start_are_tried_again_later(tmp_path: Path, nothing_left: None) -> None:
    async with stage(tmp_path, 1, spares=1) as on:
        on.orders.tell(1, prepare="raise")
        await on.load(1)
        await on.until(lambda: len(on.faults.seen) == 3)
        assert "a spare: it did not start: RuntimeError: the engine has a bug" in on.faults.seen[0].cause
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20)))
        on.orders.tell(1)
        await on.until(lambda: on.generator.spares == 1)
        assert not any(fault.fatal for fault in on.faults.seen)


async def test_a_guest_serves_while_it_has_devices_then_others_resume(tmp_path: Path, nothing_left: None) -> None:
    free, lent = asyncio.Event(), list[int]()

    @contextlib.asynccontextmanager
    async def devices(index: int) -> AsyncIterator[None]:
        lent.append(index)
        await free.wait()
        yield

    async with stage(tmp_path, engines=1, guests=1, spares=1, replace=devices) as on:
        guests = on.generator.guests
        assert await on.load(1) == 1
        assert set(on.generator.engines()) == {0, 1}
        chunks = stream(on.generator, PROMPT, Sampling(max_tokens=20), engine=0)
        on.orders.tell(0, stream="hold", after=3)
        ids = await read(chunks, 3)
        await guests.sleep()
        assert set(on.generator.engines()) == {1}
        ids += [token async for chunk in chunks for token in chunk.token_ids.tolist()]
        assert tuple(ids) == draw(PROMPT, 20)
        await on.until(lambda: len(on.orders.notes("closed")) == 2)
        assert [note["engine"] for note in on.orders.notes("stream")] == [0, 1]

        # It sleeps through a load and a pause, and catches up when it wakes.
        assert await on.load(2) == 2
        assert [note["engine"] for note in on.orders.notes("load")].count(0) == 1
        await on.generator.pause()
        await on.generator.resume()
        assert await on.state(0) == (1, ["asleep"])
        await on.until(lambda: on.generator.spares == 1)  # a guest that is away is not missing
        await guests.wake()
        assert set(on.generator.engines()) == {0, 1}
        assert await on.state(0) == (2, [])
        on.orders.tell(0)
        assert right(await on.generator.generate(PROMPT, Sampling(max_tokens=20), engine=0))

        # Dead while it is away, it starts again once it has devices, without the spare.
        await guests.sleep()
        await guests.sleep()
        os.kill(await on.pid(0), signal.SIGKILL)
        await on.until(lambda: bool(on.faults.seen))
        await guests.wake()
        assert set(on.generator.engines()) == {1}
        await on.until(lambda: lent == [0])
        free.set()
        await on.until_serving(0, 1)
        assert on.generator.spares == 1
        assert await on.state(0) == (2, [])

        # One that cannot wake costs only itself.
        await guests.sleep()
        assert await on.load(3) == 3
        on.only_once(0, load="raise")
        await guests.wake()
        await on.until(lambda: len(on.faults.seen) == 2)
        assert "wake failed" in on.faults.seen[-1].cause
        await on.until_serving(0, 1)
        assert await on.state(0) == (3, [])
