"""Concurrent tasks and their errors: task groups, tasks whose errors do not matter, users' code in tasks of its own,
and bodies that another task may interrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from forge_rl.errors import ForgeError

T = TypeVar("T")
_CLOSES = 4
"""Tries to close a coroutine that ignores its end, such as one that tries everything three times."""


class TaskGroup(asyncio.TaskGroup):
    """An asyncio.TaskGroup whose failures are not counted as cancellations of its parent.

    Until Python 3.13, the failure of a child after the body has ended is counted. Whoever compares the count, as
    `interrupted_by` and `asyncio.timeout` do, then takes its own cancellation for someone else's, and lets a
    CancelledError out, which ends the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self._children: set[asyncio.Task[Any]] = set()

    def create_task(self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **settings: Any) -> asyncio.Task[T]:
        """Start a task of the group; see `asyncio.TaskGroup.create_task`."""
        task = super().create_task(coro, **settings)
        self._children.add(task)
        task.add_done_callback(self._children.discard)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:  # while the body still runs, so to speak: asyncio takes back what it cancels there
                while self._children:
                    await asyncio.wait(self._children)
            except asyncio.CancelledError as cancelled:
                kind, error, trace = type(cancelled), cancelled, cancelled.__traceback__
        return await super().__aexit__(kind, error, trace)


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Run a TaskGroup that raises the first ForgeError, or else the first error, not an exception group."""
    try:
        async with TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup) -> BaseException:
    subgroup = errors.subgroup(ForgeError) or errors
    first = subgroup.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def ended(task: asyncio.Future[Any]) -> None:
    """Wait until a task has ended; if it failed, that counts as seen, so that asyncio does not print its traceback."""
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


def in_own_task(work: Awaitable[T]) -> asyncio.Future[T]:
    """Run a user's code in a task of its own, and return it to be awaited.

    Code that catches errors of an asyncio.TaskGroup changes the count of its task's cancellations; see `TaskGroup`.
    """
    return asyncio.ensure_future(work)


class EndableTask(Generic[T]):
    """A user's coroutine in a task of its own, which can be ended even if the coroutine catches all exceptions.

        working = EndableTask(agent(task, session))
        working.task.cancel()
        working.end()  # if it continues

    A task ends a coroutine by raising CancelledError in it, and resumes it if it catches that. This one can stop
    resuming it: only its `finally` clauses are run, up to their first `await`.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.is_ended = False
        """True once `end` was called."""
        self.task = asyncio.ensure_future(self._run(work))

    def end(self) -> None:
        """End the task as soon as its current `await` is cancelled, which another task that it awaits may refuse."""
        self.is_ended = True
        self.task.cancel()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._driven(work)  # type: ignore[no-any-return]

    @types.coroutine
    def _driven(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, Any]:
        """Pass the coroutine's futures to the event loop, and their results to the coroutine."""
        error: BaseException | None = None
        while True:
            try:
                waits_for = work.send(None) if error is None else work.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as raised:
                error = raised
            if self.is_ended:
                for _ in range(_CLOSES):
                    with contextlib.suppress(Exception):
                        work.close()
                        break
                else:
                    # Never collected: its finalizer would resume it, perhaps for ever, in whatever code runs then.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
                raise asyncio.CancelledError


async def left_behind_late(task: asyncio.Task[T], grace_s: float) -> T:
    """Await a user's task. If the caller is cancelled, cancel it, and leave it behind if it has not ended after
    `grace_s`, which happens if its code catches CancelledError."""
    try:
        # Shielded, so that the task is cancelled below, where waiting for its end has a limit.
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=grace_s)
        if task.done() and not task.cancelled():
            task.exception()  # else asyncio would complain that nobody looked
        raise


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
        # Somebody else cancelled, alone or as well: that cancellation takes precedence.
        if error is None or body.cancelling() > before + 1:
            raise
        raise error from None
    finally:
        watching.cancel()
        if error is not None:
            # Takes back this function's own cancellation, which is an error by now.
            body.uncancel()
