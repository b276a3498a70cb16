"""Errors of concurrent tasks: a task group that raises a single cause, waiting for a task whose error does not matter,
and a body that another task may interrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from forge_rl.errors import ForgeError


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Run an asyncio.TaskGroup that raises the first ForgeError, or else the first error, not an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup) -> BaseException:
    chosen = errors.subgroup(ForgeError) or errors
    first = chosen.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def ended(task: asyncio.Future[Any]) -> None:
    """Wait until a task has ended; if it failed, that counts as seen, so that asyncio does not print its traceback."""
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


@contextlib.contextmanager
def interrupted_by(watch: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Run the body until it ends or the concurrent task `watch` raises, in which case the body ends with that error.

        async def until_late() -> None:
            await asyncio.sleep(60)
            raise DeadlineError("...", service="controller")

        with interrupted_by(until_late):
            await work()

    A cancellation by someone else stays a CancelledError, even if both happen at once.
    """
    body = asyncio.current_task()
    assert body is not None
    before = body.cancelling()
    error: Exception | None = None

    async def run() -> None:
        nonlocal error
        try:
            await watch()
        except Exception as raised:
            error = raised
            body.cancel()

    watching = asyncio.get_running_loop().create_task(run())
    try:
        yield
    except asyncio.CancelledError:
        if error is None or body.cancelling() > before + 1:
            raise
        raise error from None
    finally:
        watching.cancel()
        if error is not None:
            body.uncancel()
