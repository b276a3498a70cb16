"""Work that clients leave for the end of a step."""

from __future__ import annotations

import asyncio

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
