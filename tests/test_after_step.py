"""Work that clients leave for the end of a step."""

from __future__ import annotations

import asyncio

import pytest

from forge_rl.errors import CheckpointError, ReplicaError
from forge_rl.run.live.after_step import AfterStepQueue
from forge_rl.runtime.hold import Hold


async def test_work_added_just_before_a_pause_is_run_in_it() -> None:
    queue, hold, log = AfterStepQueue(), Hold(), list[str]()

    async def note() -> None:
        log.append("saved")

    async def note_twice() -> None:
        second = asyncio.create_task(queue.add(note))
        await asyncio.sleep(0)
        await note()
        seconds.append(second)

    seconds = list[asyncio.Task[None]]()
    hold.pause()
    await queue.run()
    # The run asks its rollouts to hold, which takes a while.
    first = asyncio.create_task(queue.add(note_twice))
    await asyncio.sleep(0)
    pause = asyncio.create_task(queue.run_while(hold))
    async with asyncio.timeout(10):
        await first
        await seconds[0]
        await queue.add(note)
    assert log == ["saved"] * 3
    hold.resume()
    await pause


async def test_an_error_reaches_the_client_alone_and_a_dead_service_the_run_too() -> None:
    queue = AfterStepQueue()

    async def ask(error: Exception) -> str:
        async def work() -> None:
            raise error

        with pytest.raises(type(error)):
            await queue.add(work)
        return str(error)

    clients = [asyncio.create_task(ask(error)) for error in (IndexError("a bug"), CheckpointError("a full disk"))]
    await asyncio.sleep(0)
    await queue.run()
    assert await asyncio.gather(*clients) == ["a bug", "a full disk"]
    client = asyncio.create_task(ask(ReplicaError("killed", service="trainer")))
    await asyncio.sleep(0)
    with pytest.raises(ReplicaError):
        await queue.run()
    assert "killed" in await client
