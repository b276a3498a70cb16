"""Code of a user that overcomes an error."""

import asyncio
import contextlib


async def overcome_an_error() -> None:
    """Catches what a task group raises, after which asyncio counts one cancellation of its parent too many."""

    async def fail() -> None:
        raise ValueError("boom")

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
