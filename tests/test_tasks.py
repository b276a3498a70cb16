"""Task groups and interrupted bodies: which error comes out. Exact, without processes."""

import asyncio
import contextlib
import gc
import warnings

import pytest

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.tasks import EndableTask, TaskGroup, interrupted_by, task_group


async def fail(error: Exception) -> None:
    raise error


def test_a_task_group_raises_the_forge_error():
    async def fail_both() -> None:
        async with task_group() as group:
            group.create_task(fail(ValueError("other")))
            group.create_task(fail(ConfigError("mine")))

    async def fail_inside() -> None:
        async with task_group(), task_group() as inner:
            inner.create_task(fail(ValueError("other")))

    with pytest.raises(ConfigError, match="mine"):
        asyncio.run(fail_both())
    with pytest.raises(ValueError, match="other"):
        asyncio.run(fail_inside())


@pytest.mark.parametrize("ended", [False, True])
async def test_a_failure_in_a_task_group_is_no_cancellation_of_its_parent(ended: bool):
    async def overcome() -> None:
        with contextlib.suppress(ExceptionGroup):
            async with TaskGroup() as group:
                group.create_task(fail(ValueError("mine")))
                await asyncio.sleep(0 if ended else 60)
        assert asyncio.current_task().cancelling() == 0
        overcame.set()
        await asyncio.Event().wait()

    async def fail_then() -> None:
        await overcame.wait()
        raise ForgeError("late")

    overcame = asyncio.Event()

    with pytest.raises(ForgeError, match="late"), interrupted_by(fail_then):
        await overcome()


async def test_a_task_group_cancels_children_and_awaits_grandchildren():
    ends: list[str] = []
    started = asyncio.Event()

    async def child(name: str, group: TaskGroup | None = None) -> None:
        try:
            await asyncio.sleep(0)
            if group is not None:
                group.create_task(child("started late"))
            await asyncio.sleep(0 if group is None else 60)
        except asyncio.CancelledError:
            name += ", cancelled"
            raise
        finally:
            ends.append(name)
            started.set()

    async def parent() -> None:
        async with TaskGroup() as group:
            group.create_task(child("first", group))

    task = asyncio.create_task(parent())
    await started.wait()
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends == ["started late", "first, cancelled"]


async def test_a_body_ends_with_the_error_that_interrupts_it():
    with pytest.raises(ForgeError, match="late"), interrupted_by(lambda: fail(ForgeError("late"))):
        await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # the task is not left cancelled


@pytest.mark.parametrize("raises", [False, True])
def test_a_body_that_ends_by_itself_is_not_interrupted(raises: bool):
    async def main() -> None:
        gate = asyncio.Event()

        async def watch() -> None:
            await gate.wait()
            raise ForgeError("late")

        with interrupted_by(watch):
            await asyncio.sleep(0)
            gate.set()
            if raises:
                raise ValueError("mine")
        for _ in range(3):
            await asyncio.sleep(0)

    if raises:
        with pytest.raises(ValueError, match="mine"):
            asyncio.run(main())
    else:
        asyncio.run(main())


async def test_what_a_body_makes_of_its_interruption_counts():
    async def body() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("mine") from None

    with pytest.raises(ValueError, match="mine"), interrupted_by(lambda: fail(ForgeError("late"))):
        await body()
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_cancellation_from_elsewhere_stays_one(interrupted: bool):
    started = asyncio.Event()
    inner = asyncio.Event()

    async def watch() -> None:
        await inner.wait()
        raise ForgeError("late")

    async def body() -> None:
        with interrupted_by(watch):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await started.wait()
    if interrupted:  # in the same turn of the loop, before the body runs again
        inner.set()
        asyncio.get_running_loop().call_soon(task.cancel)
    else:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_two_interruptions_the_outer_one_wins():
    with (
        pytest.raises(ForgeError, match="outer"),
        interrupted_by(lambda: fail(ForgeError("outer"))),
        interrupted_by(lambda: fail(ForgeError("inner"))),
    ):
        await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


async def test_an_endable_task_is_as_a_task_until_it_is_ended():
    async def works(outcome: object) -> object:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert await EndableTask(works(3)).task == 3
    with pytest.raises(ValueError, match="mine"):
        await EndableTask(works(ValueError("mine"))).task
    waiting = EndableTask(asyncio.Event().wait())
    await asyncio.sleep(0)
    waiting.task.cancel()
    await asyncio.wait([waiting.task])
    assert waiting.task.cancelled()


@pytest.mark.parametrize("tries", [2, 10**9])
def test_a_coroutine_that_catches_everything_is_still_ended(tries: int):
    calls = []

    async def stubborn() -> None:
        try:
            for _ in range(tries):
                calls.append("works")
                with contextlib.suppress(BaseException):
                    await asyncio.Event().wait()
        finally:
            calls.append("cleans up")

    async def check() -> None:
        working = EndableTask(stubborn())
        await asyncio.sleep(0)
        working.task.cancel()
        await asyncio.sleep(0)
        assert calls == ["works", "works"]
        assert not working.task.done()
        working.end()
        await asyncio.wait([working.task], timeout=60)
        assert working.task.cancelled()
        assert ("cleans up" in calls) == (tries == 2)
        count = len(calls)
        await asyncio.sleep(0.01)
        assert len(calls) == count

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        asyncio.run(check())
        gc.collect()
