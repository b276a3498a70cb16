"""Runs work at the end of a step, or in a pause there, that other tasks such as clients' requests have queued."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from forge_rl.errors import ServiceError
from forge_rl.runtime.hold import Hold

T = TypeVar("T")


class AfterStepQueue:
    """Runs work between steps, where nothing else touches the run.

    folder = await after_step.add(run.checkpoint)  # in the task of a client
    await after_step.run()  # in the run's own, after each step
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = []
        self._any_asked = asyncio.Event()

    async def add(self, work: Callable[[], Awaitable[T]]) -> T:
        """Leave work for the end of the current step, and wait for its result.

        Raises:
            Exception: the work failed.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.append((work, future))
        self._any_asked.set()
        return await future

    async def run(self) -> None:
        """Run all pending work.

        Raises:
            ServiceError: a service failed; other errors only reach the tasks that added the work.
        """
        # Before the work is taken: what comes meanwhile is run below, or wakes `run_while`.
        self._any_asked.clear()
        while self._asked:
            work, future = self._asked.pop(0)
            # A failure, such as a full disk, is the client's alone; a service that died is the run's too.
            try:
                result = await work()
            except Exception as error:
                if not future.done():  # the client may have gone meanwhile, which cancels its wait
                    future.set_exception(error)
                if isinstance(error, ServiceError):
                    raise
            else:
                if not future.done():
                    future.set_result(result)

    async def run_while(self, hold: Hold) -> None:
        """Run each piece of added work until the pause ends."""
        released = asyncio.ensure_future(hold.released())
        try:
            while hold.paused:
                new_work = asyncio.ensure_future(self._any_asked.wait())
                await asyncio.wait([released, new_work], return_when=asyncio.FIRST_COMPLETED)
                new_work.cancel()
                await self.run()
        finally:
            released.cancel()
