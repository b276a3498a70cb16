"""The loop's clock leaves out times in which the process did not run."""

from __future__ import annotations

import asyncio

import pytest

from forge_rl.runtime.pauses import clock_without_pauses


async def test_a_deadline_does_not_pass_while_the_process_is_stopped() -> None:
    loop = asyncio.get_running_loop()
    real, stopped = loop.time, 0.0
    loop.time = lambda: real() + stopped  # type: ignore[method-assign]
    with clock_without_pauses():
        async with asyncio.timeout(60):
            for _ in range(3):
                stopped += 3600.0
                await asyncio.sleep(0.01)
        began = loop.time()
        stopped += 3.0  # the loop was busy: that counts
        assert loop.time() - began > 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
    began = loop.time()
    stopped += 3600.0  # afterwards an idle loop need not look at its clock
    assert loop.time() - began > 3600
