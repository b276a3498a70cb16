"""Task groups that fail with one cause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from forge_rl.errors import ForgeError


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """asyncio's TaskGroup, but when tasks fail, the first error that a user can mend is raised, not a group of all."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup) -> BaseException:
    chosen = errors.subgroup(ForgeError) or errors
    first = chosen.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
