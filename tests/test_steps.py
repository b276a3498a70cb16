"""The watch of an engine's steps, with a clock of its own."""

from __future__ import annotations

import asyncio

import pytest

from forge_rl.engines.vllm.steps import watch_steps


class Engine:
    """An engine that answers pings while it steps."""

    def __init__(self) -> None:
        self.steps = asyncio.Event()
        self.works = True
        self.pings = 0
        self.seconds = 0.0

    async def ping(self) -> None:
        self.pings += 1
        await self.steps.wait()

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)

    async def watch_for(self, seconds: float) -> bool:
        """Watch for so long; returns whether it was found to hang."""
        until = self.seconds + seconds
        watch = asyncio.create_task(watch_steps(self.ping, lambda: self.works, stall_s=20, sleep=self.sleep))
        while self.seconds < until and not watch.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        parts = watch.done()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return parts


async def test_an_engine_hangs_when_it_has_work_and_ends_no_step() -> None:
    engine = Engine()
    assert not await engine.watch_for(20)
    assert await engine.watch_for(30)

    engine.steps.set()
    engine.pings = 0
    assert not await engine.watch_for(100)
    assert engine.pings > 20


async def test_an_engine_without_work_or_with_other_work_is_not_hung() -> None:
    engine = Engine()
    engine.works = False
    assert not await engine.watch_for(100)
    assert engine.pings == 0

    engine.works = True
    watch = asyncio.create_task(watch_steps(engine.ping, lambda: engine.works, stall_s=20, sleep=engine.sleep))
    for _ in range(20):
        engine.works = not engine.works  # such as loads, one after the other
        begun = engine.seconds
        while engine.seconds < begun + 15 and not watch.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()


async def test_a_ping_that_fails_is_told() -> None:
    async def broken() -> None:
        raise RuntimeError("the engine died")

    engine = Engine()
    with pytest.raises(RuntimeError, match="the engine died"):
        await watch_steps(broken, lambda: True, stall_s=20, sleep=engine.sleep)
